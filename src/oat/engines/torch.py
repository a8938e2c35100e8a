"""The embedded engine: continuous batching with a transformers model, on the CPU or one GPU.

1. Rows enter and leave while others are decoded (`decoding.py`). The paged KV cache (`paged_cache.py`) takes
   at most `cache_gb`. Samples of a prompt that enter together share two things: one pass over the prompt,
   and the cache's pages that the prompt fills.
2. A token is drawn by inverting the cumulative distribution at one uniform number. The number depends only on
   the token's address (`oat.seeds`); no generator has a state.
3. A matrix product may round differently if its shape differs. With `deterministic`, every shape depends only
   on the request and the settings. The prompts of a batch are padded to one width, a power of two, and share
   no page. Kernels divide a tensor among threads, and the last elements of a small part may be rounded
   differently. So batches have a fixed number of rows, at least 64, and at most two threads compute.
4. The pages of an episode stay in the cache between its turns (`paged_cache.py`), except with
   `deterministic`.

Not handled: speculative decoding, prefixes shared by different prompts.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from oat.engines.cache_trial import page_bytes_of
from oat.engines.decoding import Decode, Decoding, Pooling
from oat.engines.paged_cache import PAGE, Kept
from oat.engines.scoring import score
from oat.engines.shapes import fixed_rows, fixed_width
from oat.errors import EngineError, WeightsError, did_you_mean
from oat.hardware.roofline import Meter
from oat.hardware.threads import candidates, fastest, measured_tokens, on_threads
from oat.models.causal_lm import CausalLM
from oat.types import Completion, Request, Sampling, Work

_DETERMINISTIC_THREADS = 2
GB = 10**9
_MEASURED_TOKENS = 16
"""Tokens of each prompt and of each response in the measurement that chooses the number of threads."""

_IDLE = Request(np.zeros(1, dtype=np.int32), Sampling(max_new_tokens=0), key=0)
"""Fills the unused rows of a deterministic batch."""


class TorchEngine:
    """Samples and scores with the weights of its slots. Slots that share a model share its version.

    Attributes:
        threads: number of threads of the computation; None: torch's own number. It may be set at any time.
    """

    def __init__(
        self,
        slots: Mapping[str, CausalLM],
        *,
        num_tokens: int,
        stop_ids: Collection[int],
        decode: Decode,
        max_rows: int = 256,
        cache_gb: float = 4.0,
        deterministic: bool = False,
        context_length: int | None = None,
        threads: int | None = None,
        pooling: Pooling | None = None,
    ):
        """
        Args:
            slots: the model of each slot.
            num_tokens: size of the tokenizer's vocabulary; ids of `num_tokens` and above are never sampled.
            stop_ids: ids that end a response.
            decode: turns ids, which follow the ids of the second argument, into text; stop strings are
                searched for in this text.
            max_rows: largest batch, in rows. `deterministic` rounds it up to a power of two, at least 64.
            cache_gb: largest KV cache, 10^9 bytes. If it is full, the rows that entered last leave and wait.
            deterministic: on a CPU, tokens and log-probabilities of a request are bitwise equal in any batch.
            context_length: largest number of tokens of a prompt with its response; None: the model's limit.
            threads: number of threads of the computation; None: torch's own number.
            pooling: the features that completions have (`Completion.features`); None: none.

        Raises:
            EngineError: an argument is out of range.
            ModelError: a model cannot be decoded with a cache.
        """
        if max_rows < 1 or not cache_gb > 0:
            raise EngineError(
                f"the engine was given max_rows = {max_rows} and cache_gb = {cache_gb}; give at least 1 row "
                "and some memory"
            )
        for slot, lm in slots.items():
            _check_sizes(slot, lm, num_tokens, context_length)
        self._page_bytes = {
            id(lm): page_bytes_of(lm) for lm in {id(lm): lm for lm in slots.values()}.values()
        }
        self._pages = {model: int(cache_gb * GB / size) for model, size in self._page_bytes.items()}
        self._meters = {id(lm): Meter(lm, self._page_bytes[id(lm)] / PAGE) for lm in slots.values()}
        self.threads = threads
        self._pooling = pooling
        self._slots = dict(slots)
        self._versions = {id(lm): 0 for lm in slots.values()}
        self._kept: dict[int, Kept] = {}
        self._num_tokens = num_tokens
        self._is_stop_V = np.isin(np.arange(num_tokens), list(stop_ids))
        self._decode = decode
        self._deterministic = deterministic
        self._max_rows = fixed_rows(max_rows) if deterministic else max_rows
        self._context_length = context_length

    def version(self, slot: str) -> int:
        """Return the version of the slot's weights; 0 before weights are loaded.

        Raises:
            EngineError: there is no such slot.
        """
        return self._versions[id(self._model(slot))]

    def work(self) -> Work:
        """Return the work of decoding since the first call of this method. The first call measures the
        machine and returns zeros."""
        return sum((meter.work(self._thread_count) for meter in self._meters.values()), Work())

    def choose_threads(self, rows: int) -> None:
        """Set `threads` to the number that is fastest in a measurement with `rows` short requests."""
        lm = next(iter(self._slots.values()))
        parameters = sum(tensor.numel() for tensor in lm.tensors().values())
        rows = min(rows, self._max_rows)
        most = min(_MEASURED_TOKENS, (lm.context_length or 2 * _MEASURED_TOKENS) // 2)
        few = max(1, measured_tokens(parameters, 2 * rows * most) // (2 * rows))
        requests = [Request(np.zeros(few, dtype=np.int32), Sampling(few), key) for key in range(rows)]
        self.threads = None
        self.threads = fastest(
            lambda: list(self.generate(requests, next(iter(self._slots)))), candidates(parameters)
        )

    def generate(self, requests: Sequence[Request], slot: str) -> Iterator[Completion]:
        """Return an iterator over completions, in the order in which they finish. A response ends at a stop
        id or a stop string, at `max_new_tokens`, or at the end of the context.

        Raises:
            EngineError: at the call: there is no such slot, or a request cannot be served. In the iteration:
                a kept set is too large, or the slot's weights were replaced.
            NonFiniteError: in the iteration: the model's logits are not finite.
        """
        lm = self._model(slot)
        context = self._context(lm)
        for index in {id(request.sampling): index for index, request in enumerate(requests)}.values():
            _check_sampling(f"request {index}", requests[index].sampling)
        vocab_rows, checked = lm.vocab_rows, set[int]()
        for index, request in enumerate(requests):
            if id(request.ids) not in checked:  # the samples of a prompt have the same ids
                _check_ids(f"request {index}", request.ids, context, vocab_rows)
                checked.add(id(request.ids))
        rooms = [_room(request, context) for request in requests]
        self._check_pages(
            [len(request.ids) + room for request, room in zip(requests, rooms, strict=True)], lm
        )
        return self._generate(requests, rooms, slot)

    def release(self, slot: str, keys: Sequence[int]) -> None:
        """Drop the pages that are kept for requests with these keys.

        Raises:
            EngineError: there is no such slot.
        """
        model = id(self._model(slot))
        if model in self._kept:
            self._kept[model].drop(keys)
            if not len(self._kept[model]):
                del self._kept[model]

    def stream(self, request: Request, slot: str) -> Iterator[Completion]:
        """Yield the completion so far after each token of the response to one request. The finish reason is
        "aborted" in all completions except the last. No kept sets are recorded.

        Raises:
            EngineError: there is no such slot, or the request cannot be served.
            NonFiniteError: the model's logits are not finite.
        """
        lm, version = self._model(slot), self.version(slot)
        _check_sampling("the request", request.sampling)
        context = self._context(lm)
        _check_ids("the request", request.ids, context, lm.vocab_rows)
        room = _room(request, context)
        self._check_pages([len(request.ids) + room], lm)
        if room == 0:
            yield from self._generate([request], [room], slot)
            return
        decoding = self._decoding(
            [replace(request, sampling=replace(request.sampling, keep_sets=False))], [room], lm
        )
        while decoding.busy:
            with self._computing(lm), self._meters[id(lm)].clock():
                finished = decoding.step()
            yield decoding.completion(0, 0, finished[0][1] if finished else "aborted", version)

    def logps(self, sequences: Sequence[np.ndarray], slot: str) -> list[np.ndarray]:
        """Return, for each sequence, the raw log-probabilities of all its tokens except the first: (T - 1,)
        float32, nats.

        Raises:
            EngineError: the slot is unknown, or a sequence is empty, too long, or has an unknown id.
        """
        lm = self._model(slot)
        context, vocab_rows = self._context(lm), lm.vocab_rows
        for index, ids in enumerate(sequences):
            _check_ids(f"sequence {index}", ids, context, vocab_rows)
        with self._computing(lm):
            return score(lm, sequences, fixed_rows=self._max_rows if self._deterministic else None)

    def load(self, slot: str, version: int, tensors: Mapping[str, Tensor]) -> None:
        """Copy the tensors into the slot's model. A tensor that is the model's own memory is not copied. If a
        tensor is refused, nothing is copied. If a call of `generate` is under way for this slot, it fails at
        its next step. The pages that are kept for later turns are dropped.

        Raises:
            EngineError: there is no such slot.
            WeightsError: a tensor is missing or unknown, or its shape is not that of the model's tensor.
        """
        lm = self._model(slot)
        held = lm.tensors()
        for name in sorted(tensors.keys() - held.keys()):
            raise WeightsError(
                f"slot `{slot}` was sent `{name}`, which its model lacks; {did_you_mean(name, held)}"
            )
        for name in sorted(held.keys() - tensors.keys()):
            raise WeightsError(
                f"slot `{slot}` was not sent `{name}`; send every tensor of the model, a tied one once"
            )
        for name, tensor in tensors.items():
            if tensor.shape != held[name].shape:
                raise WeightsError(
                    f"slot `{slot}` holds `{name}` as {tuple(held[name].shape)} and was sent "
                    f"{tuple(tensor.shape)}; send its own model's"
                )
        self._kept.pop(id(lm), None)
        with torch.no_grad():
            for name, tensor in tensors.items():
                if not _same_memory(held[name], tensor):
                    held[name].copy_(tensor)
        self._versions[id(lm)] = version

    def tensors(self, slot: str) -> dict[str, Tensor]:
        """Return the tensors of the slot's model, by name.

        Raises:
            EngineError: there is no such slot.
        """
        return self._model(slot).tensors()

    def _model(self, slot: str) -> CausalLM:
        if slot not in self._slots:
            raise EngineError(f"the engine has no slot `{slot}`: {did_you_mean(slot, self._slots)}")
        return self._slots[slot]

    def _context(self, lm: CausalLM) -> int | None:
        """Return the largest number of tokens that a sequence may have; None: no limit."""
        return self._context_length if self._context_length is not None else lm.context_length

    def _check_pages(self, lengths: Sequence[int], lm: CausalLM) -> None:
        """Check that the cache can hold the longest request. If the engine is deterministic, the cache must
        hold `_max_rows` requests of this length, which are decoded together.

        Raises:
            EngineError: the cache is too small.
        """
        rows = self._max_rows if self._deterministic else None
        refuse_small_cache(max(lengths, default=0), self._pages[id(lm)], self._page_bytes[id(lm)], rows)

    def _generate(self, requests: Sequence[Request], rooms: Sequence[int], slot: str) -> Iterator[Completion]:
        lm, version = self._model(slot), self.version(slot)
        for index, room in enumerate(rooms):
            if room == 0:
                nothing = np.empty(0, dtype=np.float32)
                yield Completion(
                    index, np.empty(0, dtype=np.int32), nothing, nothing, None, "length", version
                )
        for indices in self._batches(requests, rooms):
            decoding = self._decoding(
                [requests[index] for index in indices],
                [rooms[index] for index in indices],
                lm,
                self._kept.pop(id(lm), None),
            )
            while decoding.busy:
                if self.version(slot) != version:
                    raise EngineError(
                        f"the weights of slot `{slot}` were replaced while it was generating; load between "
                        "two calls of `generate`"
                    )
                with self._computing(lm), self._meters[id(lm)].clock():
                    finished = decoding.step()
                for row, reason in finished:
                    yield decoding.completion(row, indices[row], reason, version)
            kept = decoding.kept()
            if kept is not None and self.version(slot) == version:
                self._kept[id(lm)] = kept

    def _decoding(
        self, requests: list[Request], rooms: list[int], lm: CausalLM, kept: Kept | None = None
    ) -> Decoding:
        width = None
        if self._deterministic:
            idle = self._max_rows - len(requests)
            requests, rooms = requests + [_IDLE] * idle, rooms + [0] * idle
            width = fixed_width(max(len(request.ids) for request in requests))
        return Decoding(
            requests,
            rooms,
            lm,
            num_tokens=self._num_tokens,
            is_stop_V=self._is_stop_V,
            decode=self._decode,
            max_rows=self._max_rows,
            pages=self._pages[id(lm)],
            meter=self._meters[id(lm)],
            prompt_width=width,
            kept=kept,
            pooling=self._pooling,
        )

    def _batches(self, requests: Sequence[Request], rooms: Sequence[int]) -> Iterator[list[int]]:
        """Yield the indices of requests that can get a token, as lists to decode together. If the engine is
        deterministic, a list has at most `_max_rows` requests, whose prompts are padded to one width."""
        groups: dict[int, list[int]] = {}
        for index, request in enumerate(requests):
            if rooms[index] > 0:
                width = fixed_width(len(request.ids)) if self._deterministic else 0
                groups.setdefault(width, []).append(index)
        for group in groups.values():
            size = self._max_rows if self._deterministic else len(group)
            for start in range(0, len(group), size):
                yield group[start : start + size]

    @property
    def _thread_count(self) -> int:
        count = self.threads or torch.get_num_threads()
        return min(count, _DETERMINISTIC_THREADS) if self._deterministic else count

    @contextmanager
    def _computing(self, lm: CausalLM) -> Iterator[None]:
        """Within the body, set the number of threads, and put the model into evaluation mode. (In training
        mode, gradient checkpointing would drop the cache.)"""
        was_training = lm.module.training
        if was_training:
            lm.module.eval()
        try:
            with on_threads(self._thread_count):
                yield
        finally:
            if was_training:
                lm.module.train()


def refuse_small_cache(
    tokens: int, pages: int, page_bytes: int, rows: int | None = None, *, of_episode: bool = False
) -> None:
    """Refuse a cache that is too small for a sequence.

    Args:
        tokens: number of tokens of the sequence.
        pages: number of pages of the cache.
        page_bytes: bytes of a page.
        rows: rows in the batch of a deterministic engine, all as long as the sequence; None: only one row.
        of_episode: True if the sequence is a conversation with an environment that fills the context.

    Raises:
        EngineError: the cache is too small.
    """
    needed = -(-tokens // PAGE) * (rows or 1)
    if needed <= pages:
        return
    size = rounded_up(needed * page_bytes / GB)
    fewer = "engine.max_rows" if rows else ""
    if of_episode:
        what = "an episode with the environment may fill the model's context, and "
        advice = f"set it to {size} or more (memory that is not needed is not taken)"
    else:
        what, fewer = "", " or ".join(filter(None, ["sampling.max_new_tokens", fewer]))
        advice = "raise engine.cache_gb"
    raise EngineError(
        f"{what}keys and values of {tokens} tokens take {size} GB{' in every row' if rows else ''}, and the "
        f"cache holds {pages * page_bytes / GB:.3g}; {advice}{f', or lower {fewer}' if fewer else ''}"
    )


def rounded_up(size: float) -> str:
    """Return a positive size as a decimal number with three digits that is not below it."""
    unit = 10.0 ** (math.floor(math.log10(size)) - 2)
    return f"{math.ceil(size * (1 + 1e-9) / unit) * unit:.3g}"


def _check_sampling(what: str, sampling: Sampling) -> None:
    for name in sampling.faults():
        raise EngineError(
            f"{what} asks for {name} = {getattr(sampling, name)!r}; see `oat.types.Sampling` for what it may "
            "be"
        )


def _room(request: Request, context: int | None) -> int:
    """Return the largest number of tokens that the response may have."""
    most = request.sampling.max_new_tokens
    return most if context is None else min(most, context - len(request.ids))


def _check_ids(what: str, ids: np.ndarray, context: int | None, vocab_rows: int) -> None:
    if len(ids) == 0:
        raise EngineError(
            f"{what} has no token; begin it with at least one, such as the tokenizer's first token of a "
            "sequence"
        )
    if context is not None and len(ids) > context:
        raise EngineError(f"{what} has {len(ids)} tokens and the context holds {context}; shorten or drop it")
    if ids.min() < 0 or ids.max() >= vocab_rows:
        raise EngineError(
            f"{what} has an id outside 0 to {vocab_rows - 1}; use the tokenizer that belongs to the model"
        )


def _same_memory(held: Tensor, sent: Tensor) -> bool:
    return (held.data_ptr(), held.dtype, held.device, held.stride()) == (
        sent.data_ptr(),
        sent.dtype,
        sent.device,
        sent.stride(),
    )


def _check_sizes(slot: str, lm: CausalLM, num_tokens: int, context_length: int | None) -> None:
    """Refuse a model with fewer embeddings than `num_tokens`, or with a context shorter than
    `context_length`.

    Raises:
        EngineError: the model is refused.
    """
    if num_tokens > lm.vocab_rows:
        raise EngineError(
            f"the tokenizer has {num_tokens} tokens but the model of slot `{slot}` only {lm.vocab_rows}; use "
            "its own tokenizer"
        )
    if context_length is not None and lm.context_length is not None and context_length > lm.context_length:
        raise EngineError(
            f"a context of {context_length} is more than the {lm.context_length} tokens of the model of slot "
            f"`{slot}`; lower it"
        )
