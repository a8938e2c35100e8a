"""Continuous batching: rows enter the batch, get one token in each decoding step, and leave.

A row is a request, identified by its index among all requests. Rows enter while others are being decoded, as
soon as enough places are free. Samples of a prompt enter in groups (`Decoding._groups`), and the rows of a
group share the prompt's full pages.

When the KV cache is full, the rows that entered last leave and wait. When such a row enters again, its prompt
and its tokens so far are computed again. Its next tokens are drawn with the same random numbers as without
the wait, since a token's random number depends on its address alone.

A finished row whose request says so (`Request.keeps`) leaves its pages in the cache. A later batch takes them
over (`paged_cache.py`): a request that goes on with these tokens computes only the new ones. Running rows go
before kept pages: if the cache is full, pages are dropped, and the tokens are computed again when they are
needed.

What a running batch has drawn: for each request its tokens so far, their log-probabilities, kept sets, and
the hidden states of which features are made.

Rows of a running batch that have had the same tokens so far.

Samples of a prompt that enter together are equal until their tokens differ. Equal rows have the same hidden
states, keys and values. So a decoding step computes one row of each set of equal rows, and writes its keys
and values for all of them.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice, takewhile
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from oat import seeds
from oat.engines.cached_attention import Continuing, Filling, Step
from oat.engines.paged_cache import Kept, PagedCache, cache_dtype
from oat.engines.shapes import filled_up, passes
from oat.errors import EngineError, NonFiniteError
from oat.functional.logprobs import token_logps
from oat.functional.sampling import inverse_cdf, kept_ids, truncated_logits
from oat.hardware.roofline import Meter
from oat.models.attention import Packed, pack
from oat.models.causal_lm import CausalLM, Layer
from oat.types import KEPT_LIMIT, Completion, FinishReason, KeptSets, Request

_LEAST_ROWS = 64
"""With fewer rows, a step computes every row. Its time then hardly depends on the number of rows."""
_SHARE_FROM = 1.2
"""A step computes every row if there are not more than this many times as many rows as sets."""


class EqualRows:
    """The sets of equal rows. Rows are identified by their indices from 0 to `count` - 1."""

    def __init__(self, count: int):
        self._set_N = np.arange(count)

    def enter(self, groups: Iterable[Sequence[int]]) -> None:
        """Make a set of each group of rows that enter the batch with the same tokens. A row may have been in
        the batch before."""
        for rows in groups:
            self._set_N[rows] = rows[0]

    def divide(self, rows: np.ndarray, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Divide each set by the newest token of its rows.

        Args:
            rows: (R,) indices of all rows in the batch.
            ids: (R,) newest token of each row.

        Returns:
            (C,) places in `rows` of the rows to compute, ascending: the first row of each set, or all rows if
            that would save too little. (R,) for each row, the index among the C of the one that is computed
            for it.
        """
        _, firsts, set_R = np.unique(
            np.stack([self._set_N[rows], ids]), axis=1, return_index=True, return_inverse=True
        )
        set_R = set_R.reshape(-1)
        self._set_N[rows] = rows[firsts][set_R]
        if len(rows) < _LEAST_ROWS or len(rows) <= _SHARE_FROM * len(firsts):
            every = np.arange(len(rows))
            return every, every
        order = np.argsort(firsts)
        return firsts[order], np.argsort(order)[set_R]


class Pooling(NamedTuple):
    """The features of a response that the engine keeps while it samples.

    Attributes:
        layer: the layer whose hidden states are read, or "all".
        takes_last: True: the hidden states from which the last token was drawn. False: their mean over the
            tokens.
    """

    layer: Layer
    takes_last: bool


class Records:
    """The tokens that have been drawn for N requests.

    Attributes:
        made_N: (N,) number of tokens of each request so far. The caller counts.
        ids_NT: (N, T) the tokens.

    Args:
        most: largest number of tokens of a response, T.
        pooling: None: no features are kept.
    """

    def __init__(self, requests: Sequence[Request], most: int, pooling: Pooling | None):
        shape = len(requests), most
        self.ids_NT = np.zeros(shape, np.int32)
        self.made_N = np.zeros(len(requests), dtype=np.int64)
        self._raw_NT = np.zeros(shape, np.float32)
        self._sampled_NT = np.zeros(shape, np.float32)
        self._keeps_N = np.array([request.sampling.keep_sets for request in requests])
        self._kept: dict[int, list[np.ndarray]] = {int(row): [] for row in np.flatnonzero(self._keeps_N)}
        self._pooling = pooling
        self._states_ND = torch.zeros(0)

    def write(self, rows: np.ndarray, drawn: np.ndarray, raw: np.ndarray, sampled: np.ndarray) -> None:
        """Record one token of each of these requests, with its log-probabilities."""
        places = rows, self.made_N[rows]
        for record_NT, column in ((self.ids_NT, drawn), (self._raw_NT, raw), (self._sampled_NT, sampled)):
            record_NT[places] = column

    def keeping(self, rows: np.ndarray) -> np.ndarray:
        """Return which of these requests record kept sets, (R,) bool."""
        return self._keeps_N[rows]

    def write_kept(self, rows: np.ndarray, logits_SV: Tensor) -> None:
        """Record the kept sets of the tokens of these requests.

        Raises:
            EngineError: a set has more than `KEPT_LIMIT` ids.
        """
        ids, counts = (values.cpu().numpy() for values in kept_ids(logits_SV))
        if counts.max() > KEPT_LIMIT:
            raise EngineError(
                f"a token keeps {counts.max()} ids and a recorded kept set holds at most {KEPT_LIMIT}; lower "
                "sampling.top_k or sampling.top_p, or use a preference algorithm, which needs no kept sets"
            )
        ends = np.cumsum(counts)
        for row, start, end in zip(rows.tolist(), (ends - counts).tolist(), ends.tolist(), strict=True):
            self._kept[row].append(ids[start:end].astype(np.int32))

    def write_states(self, rows: np.ndarray, states_RD: Tensor) -> None:
        """Record the hidden states from which a token of each of these requests is drawn."""
        if self._pooling is None:
            return
        if not len(self._states_ND):
            self._states_ND = torch.zeros(len(self.made_N), states_RD.shape[1], device=states_RD.device)
        at = torch.from_numpy(rows).to(states_RD.device)
        if self._pooling.takes_last:
            self._states_ND[at] = states_RD.float()
        else:
            self._states_ND[at] += states_RD.float()

    def completion(self, row: int, index: int, reason: FinishReason, version: int) -> Completion:
        """Return the completion of a request, with its tokens so far.

        Args:
            index: index that the completion reports for its request.
        """
        made = int(self.made_N[row])
        kept = None
        if self._keeps_N[row]:
            offsets = np.cumsum([0] + [len(ids) for ids in self._kept[row]])
            kept = KeptSets(np.concatenate(self._kept.pop(row)), offsets)
        ids, raw, sampled = (
            values[row, :made].copy() for values in (self.ids_NT, self._raw_NT, self._sampled_NT)
        )
        return Completion(index, ids, raw, sampled, kept, reason, version, self._features(row, made))

    def _features(self, row: int, made: int) -> np.ndarray | None:
        if self._pooling is None:
            return None
        count = 1 if self._pooling.takes_last else made
        return (self._states_ND[row] / count).cpu().numpy()


_ENTER_SHARE = 1 / 16
"""Waiting rows enter the running batch if at least this share of its `max_rows` places is free, or if it is
empty."""
_AHEAD = 4
"""On a CPU, the cache of rows that keep their pages has memory for this number of times as many pages as the
first turn needs. Memory that is never written costs nothing there."""
_STOP_MARGIN = 8
"""To find a stop string, the newest tokens are turned into text: as many as the longest stop string has
bytes, and this number more. More are needed because the first characters of such a text can be garbled."""

Decode = Callable[[Sequence[int], Sequence[int]], str]
"""A function that decodes ids to text. Its second argument is the ids before them, of which the last one may
decide whether the text begins with a blank."""


class Decoding:
    """The running batch.

    Axis N has all requests. Axis R has the rows in the batch, in the order in which they entered; `_held_R`
    has their indices.

    Args:
        rooms: for each request, the largest number of tokens that it may get; a request with 0 is idle.
        max_rows: largest number of rows in the batch.
        pages: largest number of pages of the cache; enough for any single row.
        meter: counts the computed work, without idle rows and padding.
        prompt_width: number of tokens to which every prompt is padded. Shapes are then fixed: all rows enter
            at once, no row leaves, and no page is shared or kept. None: prompts are packed, and rows enter
            and leave.
        kept: pages of earlier turns, which the batch takes over; None: there are none.
        pooling: the features that completions have; None: none.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        rooms: Sequence[int],
        lm: CausalLM,
        *,
        num_tokens: int,
        is_stop_V: np.ndarray,
        decode: Decode,
        max_rows: int,
        pages: int,
        meter: Meter,
        prompt_width: int | None = None,
        kept: Kept | None = None,
        pooling: Pooling | None = None,
    ):
        self._requests = list(requests)
        self._lm = lm
        self._num_tokens = num_tokens
        self._is_stop_V = is_stop_V
        self._decode = decode
        self._max_rows = max_rows
        self._meter = meter
        self._prompt_width = prompt_width
        self._fixed = prompt_width is not None
        self._rooms_N = np.array(rooms)
        self._lengths_N = np.array([len(request.ids) for request in requests])
        self._keys_N = np.array([request.key for request in requests], dtype=np.uint64)
        samplings = [request.sampling for request in requests]
        self._truncates = any(sampling.changes_logits for sampling in samplings)
        self._settings_N = (
            torch.tensor([sampling.temperature for sampling in samplings], dtype=torch.float32),
            torch.tensor([sampling.top_k for sampling in samplings]),
            torch.tensor([sampling.top_p for sampling in samplings], dtype=torch.float64),
            torch.tensor([sampling.min_p for sampling in samplings], dtype=torch.float64),
        )
        self._watches_N = np.array([bool(sampling.stop) for sampling in samplings])
        self._pooling = pooling
        self._also = None if pooling is None else pooling.layer
        self._records = Records(requests, int(self._rooms_N.max()), pooling)
        self._ids_NT, self._made_N = self._records.ids_NT, self._records.made_N
        self._live_N = self._rooms_N > 0
        self._keeps_pages_N = np.array([request.keeps and not self._fixed for request in requests])
        old_N = kept.rows_of(requests) if kept else np.full(len(requests), -1)
        self._waiting = deque(self._groups(old_N, kept.cache.shared.readers if kept else None))
        self._cache = self._take_over(kept.cache, old_N) if kept else self._new_cache(pages)
        self._hold(np.zeros(0, dtype=np.int64))
        self._hidden_RD = torch.zeros(0)
        self._parked: list[int] = []
        self._equal_rows = EqualRows(len(requests))

    @property
    def busy(self) -> bool:
        """True until all requests are finished."""
        return bool(self._live_N.any())

    @torch.inference_mode()
    def step(self) -> list[tuple[int, FinishReason]]:
        """Let waiting rows enter, and sample one token for every unfinished row in the batch.

        Returns:
            Index and reason of each row that finishes with this token.
        """
        self._enter()
        ids_R = self._draw()
        finished = self._finished()
        self._made_N[self._held_R] += self._live_N[self._held_R]
        for row, _ in finished:
            self._live_N[row] = False
        if self.busy:
            self._advance(ids_R)
        elif self._keeps_pages_N.any():
            self._leave(self._held_R)
        return finished

    def completion(self, row: int, index: int, reason: FinishReason, version: int) -> Completion:
        """Return the completion of a row. If `reason` is "aborted", the row is unfinished, and the completion
        has its tokens so far.

        Args:
            index: index that the completion reports for its request.
        """
        return self._records.completion(row, index, reason, version)

    def kept(self) -> Kept | None:
        """Return the pages that the finished batch leaves; None if there are none."""
        rows = np.flatnonzero(self._cache.is_parked_N).tolist()
        found = Kept(self._cache)
        for row in rows:
            found.add(self._requests[row].key, row, self._so_far(row)[: self._cache.lengths_N[row]])
        return found if rows else None

    def _new_cache(self, pages: int) -> PagedCache:
        readers = 1 if self._fixed else max(len(group) for group in self._waiting)
        most_N = self._lengths_N + self._rooms_N
        ahead = _AHEAD if self._keeps_pages_N.any() and self._lm.device.type == "cpu" else 1
        dtype = cache_dtype(self._lm)
        return PagedCache(most_N, readers, pages, dtype, fixed=self._fixed, ahead=ahead)

    def _take_over(self, cache: PagedCache, old_N: np.ndarray) -> PagedCache:
        cache.renumber(old_N, self._lengths_N + self._rooms_N)
        return cache

    def _groups(self, old_N: np.ndarray, readers: int | None) -> list[list[int]]:
        """Return groups of rows. The rows of a group have the same prompt and enter together. If shapes are
        fixed, or a row has kept pages, each row is a group. Otherwise the rows of a prompt are cut into
        groups. The largest size of a group is the smallest of these numbers:

        * The median number of rows of a prompt. A decoding step computes each shared page for as many rows as
          the largest group has, so one large group would slow all steps.
        * A quarter of `max_rows`, if there are more requests than `max_rows`. A group enters only when there
          are free places for all of its rows.
        * `readers`, if it is not None.

        Args:
            old_N: for each row, the row of the kept cache whose pages it has; -1 for none.
        """
        if self._fixed:
            return [[row] for row in range(len(self._requests))]
        rows_of: dict[bytes | int, list[int]] = {}
        for row, request in enumerate(self._requests):
            common = row if old_N[row] >= 0 else request.ids.astype(np.int64).tobytes()
            rows_of.setdefault(common, []).append(row)
        places = self._max_rows if len(self._requests) <= self._max_rows else max(1, self._max_rows // 4)
        most = min(places, readers or places, sorted(map(len, rows_of.values()))[len(rows_of) // 2])
        return [
            rows[start : start + most] for rows in rows_of.values() for start in range(0, len(rows), most)
        ]

    def _hold(self, held_R: np.ndarray) -> None:
        self._held_R = held_R
        self._settings_R = tuple(
            setting_N[torch.from_numpy(held_R)].to(self._lm.device) for setting_N in self._settings_N
        )

    def _enter(self) -> None:
        """Let waiting rows enter if enough places are free and the cache has room for the rows."""
        held = len(self._held_R)
        if not self._waiting or (held and self._max_rows - held < self._max_rows * _ENTER_SHARE):
            return
        cached_N = self._cache.lengths_N.copy()
        again = self._enter_again(held)
        fresh = self._enter_fresh(held + len(again))
        if len(again) or fresh:
            self._equal_rows.enter([*again[:, None], *fresh])
            new = self._lengths_N[again] - cached_N[again]
            self._hidden_RD = torch.cat(
                [*([self._hidden_RD] if held else []), *self._fill_up(again, new), *self._fill(fresh)]
            )
            self._hold(np.concatenate([self._held_R, again, *fresh]))
        assert len(self._held_R), "a row that fits into an empty cache waits for nobody"

    def _enter_again(self, in_use: int) -> np.ndarray:
        """Take rows with kept pages from the beginning of the queue, as far as places and pages go. Return
        them."""
        waiting = islice((group[0] for group in self._waiting), self._max_rows - in_use)
        rows = np.array(list(takewhile(self._cache.is_parked_N.__getitem__, waiting)), dtype=np.int64)
        lengths = self._lengths_N[rows]
        needed = self._cache.pages_again(rows, lengths)
        count = len(rows) if needed.sum() + (in_use + len(rows)) // 4 <= self._cache.room else 0
        for _ in range(count):
            self._waiting.popleft()
        self._cache.admit_again(rows[:count], lengths[:count])
        while count < len(rows) and self._cache.is_parked_N[rows[count]]:
            group = self._waiting.popleft()
            held = in_use + count
            if not self._makes_room(int(needed[count]) + held // 4) and held:
                self._waiting.appendleft(group)
                break
            self._cache.admit_again(rows[count : count + 1], lengths[count : count + 1])
            count += 1
        return rows[:count]

    def _enter_fresh(self, in_use: int) -> list[list[int]]:
        """Take groups of rows without pages from the beginning of the queue, as far as places and pages go.
        Return them."""
        fresh: list[list[int]] = []
        while self._waiting and len(self._waiting[0]) <= self._max_rows - in_use:
            group = self._waiting[0]
            if self._cache.is_parked_N[group[0]]:
                break
            length = int(self._lengths_N[group[0]] + self._made_N[group[0]])
            needed = self._cache.pages_for(group, length) + (0 if self._fixed else in_use // 4)
            if not self._makes_room(needed):
                if in_use or len(group) == 1:
                    break
                self._waiting.popleft()
                self._waiting.extendleft([row] for row in reversed(group))
                continue
            self._waiting.popleft()
            self._cache.admit(group, length)
            fresh.append(group)
            in_use += len(group)
        return fresh

    def _makes_room(self, needed: int) -> bool:
        """Return True if the cache has room for so many pages. If it has not, first drop kept pages: those of
        rows that finished last, then those of rows that wait, the last of the queue first."""
        if needed > self._cache.room + self._cache.parked:
            return False
        while needed > self._cache.room:
            last = self._parked.pop() if self._parked else self._last_waiting()
            if last is None:
                return False
            self._cache.free(last)
        return True

    def _last_waiting(self) -> int | None:
        """Return the last row of the queue that has pages; None if there is none."""
        waiting = (group[0] for group in reversed(self._waiting))
        return next((row for row in waiting if self._cache.is_parked_N[row]), None)

    def _fill(self, groups: Sequence[list[int]]) -> Iterator[Tensor]:
        """Make the forward passes over the sequences of groups that enter the cache: one sequence per group,
        whose keys and values are written for all rows of the group. The sequence is the prompt. A row that
        already has tokens forms a group of one row, and its sequence is the prompt and these tokens.

        Yields:
            For each pass, (rows, D): the hidden state of the last token of each row in the groups of the
            pass.
        """
        device = self._lm.device
        sequences = [self._so_far(group[0]) for group in groups]
        widths = np.array([self._prompt_width or len(ids) for ids in sequences])
        for some in passes(widths):
            ids_1T, positions_1T, spans = pack(
                [sequences[number] for number in some], device, width=self._prompt_width
            )
            counts = [len(groups[number]) for number in some]
            rows = np.concatenate(
                [
                    np.repeat(row, span.stop - span.start)
                    for n, span in zip(some, spans, strict=True)
                    for row in groups[n]
                ]
            )
            sources = np.concatenate(
                [
                    np.arange(span.start, span.stop)
                    for span, count in zip(spans, counts, strict=True)
                    for _ in range(count)
                ]
            )
            places = self._cache.places(rows, positions_1T[0].cpu().numpy()[sources], sources, device)
            hidden_1TD = self._lm.hidden(
                ids_1T,
                positions=positions_1T,
                layout=Filling(self._cache, Packed(spans, width=self._prompt_width), places),
                also=self._also,
            )
            lengths = np.array(
                [
                    span.stop - span.start
                    for n, span in zip(some, spans, strict=True)
                    if self._live_N[groups[n][0]]
                ]
            )
            self._meter.backbone(int(lengths.sum()), pairs=int((lengths * (lengths + 1) // 2).sum()))
            last = np.repeat([span.stop - 1 for span in spans], counts)
            yield hidden_1TD[0, torch.from_numpy(last).to(device)]

    def _fill_up(self, rows: np.ndarray, new: np.ndarray) -> Iterator[Tensor]:
        """Make the forward passes over the new tokens of rows whose other tokens are in the cache.

        Args:
            new: number of new tokens of each row. They are the last ones of its prompt.

        Yields:
            For each pass, (rows, D): the hidden state of the last token of each row.
        """
        device = self._lm.device
        for some in passes(self._cache.lengths_N[rows]):
            held, counts = rows[some], new[some]
            ids = [self._requests[row].ids[-count:] for row, count in zip(held, counts, strict=True)]
            layout = Continuing(self._cache, held, counts, device)
            hidden_1TD = self._lm.hidden(
                torch.from_numpy(np.concatenate(ids).astype(np.int64))[None].to(device),
                positions=layout.positions_1T,
                layout=layout,
                also=self._also,
            )
            pairs = (counts * (self._cache.lengths_N[held] - counts) + counts * (counts + 1) // 2).sum()
            self._meter.backbone(int(counts.sum()), pairs=int(pairs))
            yield hidden_1TD[0, torch.from_numpy(np.cumsum(counts) - 1).to(device)]

    def _so_far(self, row: int) -> np.ndarray:
        """Return the ids of a row's prompt and of its tokens so far, int64."""
        made = self._ids_NT[row, : self._made_N[row]]
        return np.concatenate([self._requests[row].ids, made]).astype(np.int64)

    def _draw(self) -> Tensor:
        """Draw and record one token per row. Return the ids, (R,)."""
        rows = len(self._held_R)
        last_RD = self._hidden_RD if self._also is None else self._hidden_RD[:, : self._lm.width_of(-1)]
        logits_RV = self._lm.head(F.pad(last_RD, (0, 0, 0, filled_up(rows) - rows)))[:rows].float()
        drawable_RV = logits_RV[:, : self._num_tokens]
        if self._truncates:
            drawable_RV = truncated_logits(drawable_RV, *self._settings_R)
        held_R = self._held_R
        uniforms_R = torch.from_numpy(
            seeds.uniforms(self._keys_N[held_R], self._lengths_N[held_R] + self._made_N[held_R])
        )
        ids_R = inverse_cdf(drawable_RV, uniforms_R.to(logits_RV.device))
        raw_R = token_logps(logits_RV, ids_R)
        sampled_R = (
            token_logps(drawable_RV, ids_R)
            if drawable_RV.shape != logits_RV.shape or self._truncates
            else raw_R
        )
        drawn, raw, sampled = torch.stack([ids_R.double(), raw_R.double(), sampled_R.double()]).cpu().numpy()
        live_R = self._live_N[held_R]
        if not np.isfinite(raw[live_R]).all():
            raise NonFiniteError(
                "the model's logits are not finite numbers, so nothing can be sampled; go back to weights "
                "from before it diverged"
            )
        self._records.write(held_R[live_R], drawn[live_R], raw[live_R], sampled[live_R])
        self._meter.head(int(live_R.sum()))
        keeping_R = np.flatnonzero(self._records.keeping(held_R) & live_R)
        if len(keeping_R):
            self._records.write_kept(
                held_R[keeping_R], drawable_RV[torch.from_numpy(keeping_R).to(logits_RV.device)]
            )
        if self._pooling is not None:
            live = torch.from_numpy(np.flatnonzero(live_R)).to(logits_RV.device)
            states_RD = self._lm.features(self._hidden_RD, self._pooling.layer)
            self._records.write_states(held_R[live_R], states_RD[live])
        return ids_R

    def _finished(self) -> list[tuple[int, FinishReason]]:
        rows = self._held_R[self._live_N[self._held_R]]
        made_R = self._made_N[rows]
        stops_R = self._is_stop_V[self._ids_NT[rows, made_R]]
        for place in np.flatnonzero(self._watches_N[rows] & ~stops_R).tolist():
            stops_R[place] = self._shows_stop(rows[place])
        over_R = stops_R | (made_R + 1 == self._rooms_N[rows])
        return [
            (int(row), "stop" if stops else "length")
            for row, stops in zip(rows[over_R], stops_R[over_R], strict=True)
        ]

    def _shows_stop(self, row: int) -> bool:
        request, made = self._requests[row], self._made_N[row]
        stop = request.sampling.stop
        most_tokens = max(len(text.encode()) for text in stop) + _STOP_MARGIN
        start = max(made + 1 - most_tokens, 0)
        newest = self._ids_NT[row, start : made + 1].tolist()
        begin = len(request.ids) - min(request.begun, most_tokens - len(newest))
        after = self._ids_NT[row, start - 1 : start] if start else request.ids[begin - 1 : begin]
        tail = self._decode([*request.ids[begin:].tolist(), *newest], after.tolist())
        return any(text in tail for text in stop)

    def _advance(self, ids_R: Tensor) -> None:
        """Compute the hidden state of the newest token of each row. If shapes are not fixed, finished rows
        leave the batch first. If the cache is full, the rows that entered last leave the batch too, and
        wait."""
        stays_R = self._live_N[self._held_R]
        if self._fixed:
            self._cache.extend(self._held_R[stays_R])
        else:
            self._leave(self._held_R[~stays_R])
            while not self._makes_room(self._cache.needed(self._held_R[stays_R])):
                last = np.flatnonzero(stays_R)[-1]
                stays_R[last] = False
                self._cache.free(self._held_R[last])
                self._waiting.appendleft([int(self._held_R[last])])
            if not stays_R.all():
                ids_R = ids_R[torch.from_numpy(stays_R).to(ids_R.device)]
                self._hold(self._held_R[stays_R])
            self._cache.extend(self._held_R)
            if not len(self._held_R):
                return
        places_C, set_R = self._to_compute()
        rows_C, device = self._held_R[places_C], ids_R.device
        step = Step(self._cache, rows_C, device, (self._held_R, set_R))
        ids_C = ids_R[torch.from_numpy(places_C).to(device)]
        positions_C = torch.from_numpy(self._cache.lengths_N[rows_C] - 1).to(device)
        padding = 0, filled_up(len(rows_C)) - len(rows_C)
        ids_P1, positions_P1 = (F.pad(numbers_C, padding)[:, None] for numbers_C in (ids_C, positions_C))
        hidden_P1D = self._lm.hidden(ids_P1, positions=positions_P1, layout=step, also=self._also)
        self._hidden_RD = hidden_P1D[torch.from_numpy(set_R).to(device), 0]
        computed = rows_C[self._live_N[rows_C]]
        self._meter.backbone(
            len(computed),
            pairs=int(self._cache.lengths_N[computed].sum()),
            seen=self._cache.seen(computed),
            keys=step.keys,
        )

    def _to_compute(self) -> tuple[np.ndarray, np.ndarray]:
        """Return which rows of the batch the next pass computes, and for which rows (`EqualRows.divide`)."""
        rows, every = self._held_R, np.arange(len(self._held_R))
        newest = self._ids_NT[rows, self._made_N[rows] - 1]
        return (every, every) if self._fixed else self._equal_rows.divide(rows, newest)

    def _leave(self, rows: np.ndarray) -> None:
        """Take finished rows out of the cache, or park them if their requests keep their pages."""
        keeps_R = self._keeps_pages_N[rows]
        for row in rows[~keeps_R]:
            self._cache.free(row)
        if keeps_R.any():
            self._cache.park(rows[keeps_R])
            self._parked.extend(rows[keeps_R].tolist())
