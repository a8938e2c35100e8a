"""The embedded engine: cached, batched decoding with a transformers model, on the CPU or one GPU.

1. Requests are cut into batches of at most `max_rows`. A batch prefills each distinct prompt once, then makes one token a step for all its
   rows; rows that finish are handed out at once and leave the cache when a quarter of it is idle.
2. Prompts are padded on the right, so that a token's position is its column. A row sees its own columns and no others.
3. A token is drawn with one addressed uniform number through the inverse distribution function (`oat.seeds`); no generator has a state.
4. A matrix product may round differently in another shape. `deterministic` therefore fixes every shape by the request alone: width, prompt
   padding and cache capacity are powers of two, and requests of one batch share the last two. At least 64 rows, and at most two threads,
   because an elementwise kernel treats what is left over at the end of a thread's share, short of two full vectors, by other instructions.

Not handled: paged caches, speculative decoding, refilling a running batch with waiting requests.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from oat import seeds
from oat.engines.base import checksum
from oat.engines.kv import KeyValueCache
from oat.errors import EngineError, ModelError, NonFiniteError, WeightsError, did_you_mean
from oat.functional.logprobs import chunked_head, token_logps
from oat.functional.sampling import inverse_cdf, kept_ids, truncated_logits
from oat.lm import CausalLM
from oat.types import Completion, FinishReason, KeptSets, Receipt, Request, Sampling

KEPT_LIMIT = 1024
"""Most ids of a recorded kept set."""

_PASS_TOKENS = 16_384
"""Most tokens, padding included, of a forward pass over whole sequences."""
_HEAD_LOGITS = 2**24
"""Most logits held at a time when sequences are scored."""
_LEAST_WIDTH, _LEAST_ROWS = 16, 64
_DETERMINISTIC_THREADS = 2
_LIVE_SHARE = 0.75
"""Rows leave the cache when no more than this share of it is live."""
_CACHE_TOLERANCE, _CACHE_TOLERANCE_HALF = 1e-4, 5e-2
_STOP_MARGIN = 8
"""Tokens decoded before those that could hold a stop string, since the first characters of a decoded tail can be garbled."""

_IDLE = Request(np.zeros(1, dtype=np.int32), Sampling(max_new_tokens=0), key=0)
"""Fills a deterministic batch up to its width."""

Decode = Callable[[Sequence[int]], str]


class TorchEngine:
    """Generates and scores with the weights of its slots; slots may share a model, and then share its version."""

    def __init__(
        self,
        slots: Mapping[str, CausalLM],
        *,
        num_tokens: int,
        stop_ids: Collection[int],
        decode: Decode,
        max_rows: int = 64,
        deterministic: bool = False,
        context_length: int | None = None,
    ):
        """
        Args:
            slots: the model of each slot.
            num_tokens: size of the tokenizer's vocabulary; ids from there on are never sampled.
            stop_ids: ids that end a response.
            decode: text of ids, to look for stop strings in.
            max_rows: most rows decoded together; `deterministic` rounds it up to a power of two, at least 64.
            deterministic: a request gives bitwise the same tokens and log-probabilities whatever it is batched with.
            context_length: most tokens of a sequence; None: as many as the model allows.

        Raises:
            EngineError: an argument is out of range.
            ModelError: a model cannot be decoded with a cache.
        """
        if max_rows < 1:
            raise EngineError(f"the engine was given max_rows = {max_rows}; give at least 1")
        for slot, lm in slots.items():
            if num_tokens > lm.vocab_rows:
                raise EngineError(f"the tokenizer has {num_tokens} tokens but the model of slot `{slot}` only {lm.vocab_rows}; use its own tokenizer")
            if context_length is not None and lm.context_length is not None and context_length > lm.context_length:
                raise EngineError(
                    f"a context of {context_length} is more than the {lm.context_length} tokens of the model of slot `{slot}`; lower it"
                )
        for lm in {id(lm): lm for lm in slots.values()}.values():
            _check_cache(lm)
        self._slots = dict(slots)
        self._versions = {id(lm): 0 for lm in slots.values()}
        self._num_tokens = num_tokens
        self._is_stop_V = np.isin(np.arange(num_tokens), list(stop_ids))
        self._decode = decode
        self._deterministic = deterministic
        self._max_rows = max(_power_above(max_rows), _LEAST_ROWS) if deterministic else max_rows
        self._context_length = context_length

    def version(self, slot: str) -> int:
        """The version the slot holds; 0 until weights are loaded.

        Raises:
            EngineError: no such slot.
        """
        return self._versions[id(self._model(slot))]

    def generate(self, requests: Sequence[Request], slot: str) -> Iterator[Completion]:
        """Completions as they finish. A request ends at a stop id or stop string, or at `max_new_tokens` or the end of the context.

        Raises:
            EngineError: no such slot, or a request cannot be served (here, before anything is sampled); a kept set is too large, or the slot's
                weights were replaced (while iterating).
            NonFiniteError: the model's logits are not finite numbers.
        """
        lm = self._model(slot)
        rooms = [self._room(f"request {index}", request, lm) for index, request in enumerate(requests)]
        return self._generate(requests, rooms, slot)

    def logps(self, sequences: Sequence[np.ndarray], slot: str) -> list[np.ndarray]:
        """Raw log-probabilities of every token but the first of each sequence: (T - 1,) float32 each.

        Raises:
            EngineError: no such slot, or a sequence is empty, longer than the context, or has an unknown id.
        """
        lm = self._model(slot)
        for index, ids in enumerate(sequences):
            self._check_ids(f"sequence {index}", ids, lm)
        order = sorted(range(len(sequences)), key=lambda index: len(sequences[index]), reverse=True)
        scored: list[np.ndarray] = [np.empty(0, dtype=np.float32)] * len(sequences)
        while order:
            width = self._width(len(sequences[order[0]]))
            rows = min(self._max_rows, _rows_per_pass(width))
            some = [index for index in order[:rows] if not self._deterministic or self._width(len(sequences[index])) == width]
            order = order[len(some) :]
            logps_NT = self._logps_padded(lm, [sequences[index] for index in some], rows if self._deterministic else len(some), width)
            for index, logps_T in zip(some, logps_NT, strict=False):
                scored[index] = logps_T[: len(sequences[index]) - 1].copy()
        return scored

    def load(self, slot: str, version: int, tensors: Mapping[str, Tensor]) -> Receipt:
        """Copy the tensors into the slot's own, unless they share their memory, and read back what the slot now generates with.

        Nothing is copied unless everything fits. Cached keys and values live no longer than one `generate`, and one under way fails at its next
        token.

        Raises:
            EngineError: no such slot.
            WeightsError: a tensor is missing, unknown, or of another shape.
        """
        lm = self._model(slot)
        held = lm.tensors()
        for name in sorted(tensors.keys() - held.keys()):
            raise WeightsError(f"slot `{slot}` was sent `{name}`, which its model lacks; {did_you_mean(name, held)}")
        for name in sorted(held.keys() - tensors.keys()):
            raise WeightsError(f"slot `{slot}` was not sent `{name}`; send every tensor of the model, a tied one once")
        for name, tensor in tensors.items():
            if tensor.shape != held[name].shape:
                raise WeightsError(
                    f"slot `{slot}` holds `{name}` as {tuple(held[name].shape)} and was sent {tuple(tensor.shape)}; send its own model's"
                )
        with torch.no_grad():
            for name, tensor in tensors.items():
                if not _same_memory(held[name], tensor):
                    held[name].copy_(tensor)
        self._versions[id(lm)] = version
        return Receipt(slot, version, {name: checksum(tensor) for name, tensor in lm.tensors().items()})

    def _model(self, slot: str) -> CausalLM:
        if slot not in self._slots:
            raise EngineError(f"the engine has no slot `{slot}`: {did_you_mean(slot, self._slots)}")
        return self._slots[slot]

    def _room(self, what: str, request: Request, lm: CausalLM) -> int:
        """How many tokens the request may get, once it is known to be sound."""
        context = self._check_ids(what, request.ids, lm)
        sampling = request.sampling
        sound = {
            "max_new_tokens": sampling.max_new_tokens >= 0,
            "temperature": 0.0 <= sampling.temperature < float("inf"),
            "top_k": sampling.top_k >= 0,
            "top_p": 0.0 < sampling.top_p <= 1.0,
            "min_p": 0.0 <= sampling.min_p <= 1.0,
            "stop": all(sampling.stop),
        }
        for name, is_sound in sound.items():
            if not is_sound:
                raise EngineError(f"{what} asks for {name} = {getattr(sampling, name)!r}; see `oat.types.Sampling` for what it may be")
        return sampling.max_new_tokens if context is None else min(sampling.max_new_tokens, context - len(request.ids))

    def _check_ids(self, what: str, ids: np.ndarray, lm: CausalLM) -> int | None:
        """The context length, once the ids are known to fit it."""
        context = self._context_length if self._context_length is not None else lm.context_length
        if len(ids) == 0:
            raise EngineError(f"{what} has no token; begin it with at least one, such as the tokenizer's first token of a sequence")
        if context is not None and len(ids) > context:
            raise EngineError(f"{what} has {len(ids)} tokens and the context holds {context}; shorten or drop it")
        if ids.min() < 0 or ids.max() >= lm.vocab_rows:
            raise EngineError(f"{what} has an id outside 0 to {lm.vocab_rows - 1}; use the tokenizer that belongs to the model")
        return context

    def _generate(self, requests: Sequence[Request], rooms: Sequence[int], slot: str) -> Iterator[Completion]:
        lm, version = self._model(slot), self.version(slot)
        for index, room in enumerate(rooms):
            if room == 0:
                nothing = np.empty(0, dtype=np.float32)
                yield Completion(index, np.empty(0, dtype=np.int32), nothing, nothing, None, "length", version)
        for indices in self._batches(requests, rooms):
            idle = self._max_rows - len(indices) if self._deterministic else 0
            batch_requests = [requests[index] for index in indices] + [_IDLE] * idle
            batch_rooms = [rooms[index] for index in indices] + [0] * idle
            batch = _Batch(batch_requests, batch_rooms, lm, self._num_tokens, self._is_stop_V, self._decode, self._deterministic)
            prompt_width = self._width(max(len(requests[index].ids) for index in indices))
            capacity = self._width(max(len(requests[index].ids) + rooms[index] for index in indices))
            with self._computing(lm):
                batch.prefill(prompt_width, capacity)
            while batch.live_N.any():
                if self.version(slot) != version:
                    raise EngineError(f"the weights of slot `{slot}` were replaced while it was generating; load between two calls of `generate`")
                with self._computing(lm):
                    finished = batch.step()
                for row, reason in finished:
                    yield batch.completion(row, indices[row], reason, version)

    def _batches(self, requests: Sequence[Request], rooms: Sequence[int]) -> Iterator[list[int]]:
        """Indices of requests to decode together: of near lengths, or, when deterministic, of the same widths."""
        groups: dict[tuple[int, int], list[int]] = {}
        for index in sorted(range(len(requests)), key=lambda index: len(requests[index].ids)):
            if rooms[index] > 0:
                length = len(requests[index].ids)
                widths = (self._width(length), self._width(length + rooms[index])) if self._deterministic else (0, 0)
                groups.setdefault(widths, []).append(index)
        for group in groups.values():
            for start in range(0, len(group), self._max_rows):
                yield group[start : start + self._max_rows]

    @contextmanager
    def _computing(self, lm: CausalLM) -> Iterator[None]:
        """The model in evaluation mode (gradient checkpointing would drop the cache) and, when deterministic, few threads; both put back."""
        was_training, threads = lm.module.training, torch.get_num_threads()
        if was_training:
            lm.module.eval()
        if self._deterministic and threads > _DETERMINISTIC_THREADS:
            torch.set_num_threads(_DETERMINISTIC_THREADS)
        try:
            yield
        finally:
            if was_training:
                lm.module.train()
            if torch.get_num_threads() != threads:
                torch.set_num_threads(threads)

    def _width(self, length: int) -> int:
        return max(_power_above(length), _LEAST_WIDTH) if self._deterministic else length

    @torch.inference_mode()
    def _logps_padded(self, lm: CausalLM, sequences: Sequence[np.ndarray], rows: int, width: int) -> np.ndarray:
        """(rows, width) log-probabilities of the next token, of which a row's first T - 1 count."""
        tokens_NT, lengths_N, positions_NT = _pad(sequences, rows, width, lm.device)
        scored_NT = torch.arange(width, device=lm.device) < lengths_N[:, None] - 1
        if self._deterministic:
            scored_NT = torch.ones_like(scored_NT)
        next_K = tokens_NT.roll(-1, 1)[scored_NT]
        raw = {"raw": lambda logits_CV, span: token_logps(logits_CV, next_K[span])}
        logps_NT = torch.zeros(rows, width, device=lm.device)
        with self._computing(lm):
            hidden_NTD = lm.hidden(tokens_NT, mask=_causal_mask(width, lm.device), positions=positions_NT)
            logps_NT[scored_NT] = chunked_head(hidden_NTD[scored_NT], lm.head, raw, _power_below(_HEAD_LOGITS // lm.vocab_rows))["raw"]
        return logps_NT.cpu().numpy()


class _Batch:
    """Requests that are decoded together; every live row has as many new tokens as the batch has made steps.

    Rows of the arrays `_N` are requests, and stay. Rows of tensors `_R` are rows of the cache, which holds request `_held_R[r]` in row r.
    """

    def __init__(
        self, requests: Sequence[Request], rooms: Sequence[int], lm: CausalLM, num_tokens: int, is_stop_V: np.ndarray, decode: Decode, fixed: bool
    ):
        self._requests, self._lm, self._num_tokens, self._is_stop_V, self._decode = list(requests), lm, num_tokens, is_stop_V, decode
        self._fixed = fixed
        self._rooms_N = np.array(rooms)
        self.live_N = self._rooms_N > 0
        self._lengths_N = np.array([len(request.ids) for request in requests])
        self._keys_N = np.array([request.key for request in requests], dtype=np.uint64)
        samplings = [request.sampling for request in requests]
        self._truncates = any(sampling.truncates or sampling.temperature != 1.0 for sampling in samplings)
        self._settings_N = (
            torch.tensor([sampling.temperature for sampling in samplings], dtype=torch.float32),
            torch.tensor([sampling.top_k for sampling in samplings]),
            torch.tensor([sampling.top_p for sampling in samplings], dtype=torch.float64),
            torch.tensor([sampling.min_p for sampling in samplings], dtype=torch.float64),
        )
        self._watches_N = np.array([bool(sampling.stop) for sampling in samplings])
        self._keeps_N = np.array([sampling.keep_sets and sampling.truncates for sampling in samplings])
        self._kept: dict[int, list[np.ndarray]] = {row: [] for row in np.flatnonzero(self._keeps_N).tolist()}
        shape = len(requests), int(self._rooms_N.max())
        self._ids_NT, self._raw_NT, self._sampled_NT = np.zeros(shape, np.int32), np.zeros(shape, np.float32), np.zeros(shape, np.float32)
        self._made = 0

    @torch.inference_mode()
    def prefill(self, prompt_width: int, capacity: int) -> None:
        """Fill a cache of that capacity with the prompts, each distinct one computed once."""
        device, rows = self._lm.device, len(self._requests)
        contents = [request.ids.astype(np.int64).tobytes() for request in self._requests]
        number = {content: index for index, content in enumerate(dict.fromkeys(contents))}
        prompt_of_N = torch.tensor([number[content] for content in contents], device=device)
        prompts = [np.frombuffer(content, dtype=np.int64) for content in number]
        tokens_PT, lengths_P, positions_PT = _pad(prompts, rows if self._fixed else len(prompts), prompt_width, device)
        self._cache = KeyValueCache(rows, capacity)
        mask, last_PD = _causal_mask(prompt_width, device), []
        together = _rows_per_pass(prompt_width)
        for start in range(0, len(tokens_PT), together):
            span = slice(start, start + together)
            if len(prompts) == rows:
                self._cache.expect_prompts(span, slice(None))
            else:
                targets = ((prompt_of_N >= start) & (prompt_of_N < start + together)).nonzero().squeeze(1)
                self._cache.expect_prompts(targets, prompt_of_N[targets] - start)
            hidden_PTD = self._lm.hidden(tokens_PT[span], mask=mask, positions=positions_PT[span], cache=self._cache)
            last_PD.append(hidden_PTD[torch.arange(len(hidden_PTD), device=device), lengths_P[span] - 1])
        self._hidden_RD = torch.cat(last_PD)[prompt_of_N]
        self._hold(np.arange(rows))

    @torch.inference_mode()
    def step(self) -> list[tuple[int, FinishReason]]:
        """One token for every live row; the rows that finish with it, and why."""
        ids_R = self._draw()
        finished = self._finished()
        self._made += 1
        for row, _ in finished:
            self.live_N[row] = False
        if self.live_N.any():
            live_R = self.live_N[self._held_R]
            if not self._fixed and live_R.sum() <= _LIVE_SHARE * len(live_R):
                kept_R = torch.from_numpy(np.flatnonzero(live_R)).to(ids_R.device)
                self._cache.keep(kept_R)
                ids_R = ids_R[kept_R]
                self._hold(self._held_R[live_R])
            self._advance(ids_R)
        return finished

    def completion(self, row: int, index: int, reason: FinishReason, version: int) -> Completion:
        """The completion of a finished row."""
        made = self._made
        kept = None
        if self._keeps_N[row]:
            offsets = np.cumsum([0] + [len(ids) for ids in self._kept[row]])
            kept = KeptSets(np.concatenate(self._kept.pop(row)), offsets)
        ids, raw, sampled = (values[row, :made].copy() for values in (self._ids_NT, self._raw_NT, self._sampled_NT))
        return Completion(index, ids, raw, sampled, kept, reason, version)

    def _hold(self, held_R: np.ndarray) -> None:
        self._held_R = held_R
        self._settings_R = tuple(setting_N[torch.from_numpy(held_R)].to(self._lm.device) for setting_N in self._settings_N)

    def _draw(self) -> Tensor:
        """Draw and record one token a row of the cache; (R,) ids."""
        logits_RV = self._lm.head(self._hidden_RD).float()
        drawable_RV = logits_RV[:, : self._num_tokens]
        if self._truncates:
            drawable_RV = truncated_logits(drawable_RV, *self._settings_R)
        held_R = self._held_R
        uniforms_R = torch.from_numpy(seeds.uniforms(self._keys_N[held_R], self._lengths_N[held_R] + self._made))
        ids_R = inverse_cdf(drawable_RV, uniforms_R.to(logits_RV.device))
        columns = [ids_R.double(), token_logps(logits_RV, ids_R).double(), token_logps(drawable_RV, ids_R).double()]
        drawn, raw, sampled = torch.stack(columns).cpu().numpy()
        live_R = self.live_N[held_R]
        if not np.isfinite(raw[live_R]).all():
            raise NonFiniteError("the model's logits are not finite numbers, so nothing can be sampled; go back to weights from before it diverged")
        live_N = held_R[live_R]
        for record_NT, column in ((self._ids_NT, drawn), (self._raw_NT, raw), (self._sampled_NT, sampled)):
            record_NT[live_N, self._made] = column[live_R]
        keeping_R = np.flatnonzero(self._keeps_N[held_R] & live_R)
        if len(keeping_R):
            self._record_kept(held_R[keeping_R], drawable_RV[torch.from_numpy(keeping_R).to(logits_RV.device)])
        return ids_R

    def _record_kept(self, rows: np.ndarray, logits_SV: Tensor) -> None:
        ids, counts = (values.cpu().numpy() for values in kept_ids(logits_SV))
        if counts.max() > KEPT_LIMIT:
            raise EngineError(
                f"a token keeps {counts.max()} ids and a recorded kept set holds at most {KEPT_LIMIT}; lower sampling.top_k or sampling.top_p, "
                f"or use a preference algorithm, which needs no kept sets"
            )
        ends = np.cumsum(counts)
        for row, start, end in zip(rows.tolist(), (ends - counts).tolist(), ends.tolist(), strict=True):
            self._kept[row].append(ids[start:end].astype(np.int32))

    def _finished(self) -> list[tuple[int, FinishReason]]:
        newest_N = self._ids_NT[:, self._made]
        stops_N = self._is_stop_V[newest_N]
        for row in np.flatnonzero(self._watches_N & self.live_N & ~stops_N).tolist():
            stops_N[row] = self._shows_stop(row)
        over_N = self.live_N & (stops_N | (self._made + 1 == self._rooms_N))
        return [(row, "stop" if stops_N[row] else "length") for row in np.flatnonzero(over_N).tolist()]

    def _shows_stop(self, row: int) -> bool:
        stop = self._requests[row].sampling.stop
        most_tokens = max(len(text.encode()) for text in stop) + _STOP_MARGIN
        tail = self._decode(self._ids_NT[row, max(self._made + 1 - most_tokens, 0) : self._made + 1].tolist())
        return any(text in tail for text in stop)

    def _advance(self, ids_R: Tensor) -> None:
        """Hidden states after the newest token of each row, which goes to its own column; an idle row's goes to column 0."""
        live_R = self.live_N[self._held_R]
        columns_R = np.where(live_R, self._lengths_N[self._held_R] + self._made - 1, 0)
        length = self._cache.capacity if self._fixed else int(columns_R.max()) + 1
        positions_R = torch.from_numpy(columns_R).to(ids_R.device)
        self._cache.expect_tokens(positions_R, length)
        mask = torch.arange(length, device=ids_R.device) <= positions_R[:, None, None, None]
        self._hidden_RD = self._lm.hidden(ids_R[:, None], mask=mask, positions=positions_R[:, None], cache=self._cache)[:, 0]


def _pad(sequences: Sequence[np.ndarray], rows: int, width: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Ids padded on the right and by rows of one token, (rows, width), their lengths, and their positions: padding has the last token's."""
    tokens = np.zeros((rows, width), dtype=np.int64)
    lengths = np.ones(rows, dtype=np.int64)
    for row, ids in enumerate(sequences):
        tokens[row, : len(ids)], lengths[row] = ids, len(ids)
    positions = np.minimum(np.arange(width), lengths[:, None] - 1)
    return torch.from_numpy(tokens).to(device), torch.from_numpy(lengths).to(device), torch.from_numpy(positions).to(device)


def _causal_mask(width: int, device: torch.device) -> Tensor:
    return torch.ones(1, 1, width, width, dtype=torch.bool, device=device).tril()


def _power_above(number: int) -> int:
    """The first power of two that is not below the number."""
    return 1 << (number - 1).bit_length()


def _power_below(number: int) -> int:
    """The last power of two that is not above the number, at least 1."""
    return 1 << max(number, 1).bit_length() - 1


def _rows_per_pass(width: int) -> int:
    """How many rows of that width go through the model at once: a power of two, so that it divides a deterministic batch."""
    return _power_below(_PASS_TOKENS // width)


def _same_memory(held: Tensor, sent: Tensor) -> bool:
    return (held.data_ptr(), held.dtype, held.device, held.stride()) == (sent.data_ptr(), sent.dtype, sent.device, sent.stride())


@torch.inference_mode()
def _check_cache(lm: CausalLM) -> None:
    """A cached step gives the logits of a pass without a cache, for a long row and a padded one."""
    device, ids = lm.device, torch.arange(4) % lm.vocab_rows
    prompts, whole = [ids[:3].numpy(), ids[:1].numpy()], [ids[:4], ids[:2]]
    tokens_PT, lengths_P, positions_PT = _pad(prompts, 2, 3, device)
    rows, cache = torch.arange(2, device=device), KeyValueCache(2, 4)
    try:
        cache.expect_prompts(rows, rows)
        lm.hidden(tokens_PT, mask=_causal_mask(3, device), positions=positions_PT, cache=cache)
        cache.expect_tokens(lengths_P, 4)
        mask = torch.arange(4, device=device) <= lengths_P[:, None, None, None]
        next_R1 = torch.stack([row[-1:] for row in whole]).to(device)
        cached_RV = lm.head(lm.hidden(next_R1, mask=mask, positions=lengths_P[:, None], cache=cache)[:, 0])
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError, NotImplementedError) as error:
        raise ModelError(f"a `{lm.model_type}` cannot be decoded with this engine's cache ({error}); give a plain attention model") from error
    plain_RV = torch.stack([lm.module(input_ids=row[None].to(device)).logits[0, -1] for row in whole])
    difference = ((cached_RV - plain_RV).abs().max() / plain_RV.abs().max().clamp(min=1.0)).item()
    if not difference <= (_CACHE_TOLERANCE if plain_RV.dtype == torch.float32 else _CACHE_TOLERANCE_HALF):
        raise ModelError(
            f"a `{lm.model_type}` gives other logits with this engine's cache than without it (relative difference {difference:.3g}); give a plain "
            f"attention model"
        )
