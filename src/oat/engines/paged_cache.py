"""The paged KV cache: the keys and values of rows in pages of 8 tokens, within a limit on bytes.

A page belongs to one row, or holds a piece of a prompt that several rows share. The pages in use form two
sets in one memory (`Pages`): pages of single rows at its front, shared pages at its end. So `engine.cache_gb`
limits both together.

A row that has finished a turn of an episode may be parked: its pages stay for the next turn. They count
against the limit, but a decoding step does not compute with them.

`cached_attention.py` computes attention over the pages. The attention of a row is summed in the order of the
row's pages, so other rows in the cache do not change this order.

Pages are blocks of memory for the keys and values of 8 tokens. They lie in one of two sets, which grow
towards each other in one storage. The first pages of a set form its block: the pages that a decoding step
computes with. Pages that are in use but wait for a later turn of an episode are parked. They lie behind the
block, so that they cost nothing but memory.

In a measurement on two cores, pages of 8 tokens were as fast as pages of 16 or 32. The empty rests of last
pages were less than a tenth of all keys.
"""

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from oat.models.causal_lm import CausalLM
from oat.types import Request

PAGE = 8
"""Number of tokens in a page."""
_NONE = -1


class Storage:
    """The memory of pages: for each layer, keys and values, (capacity, heads, PAGE, width) each. A layer's
    memory is allocated when the layer first writes."""

    def __init__(self, capacity: int, dtype: torch.dtype):
        self.capacity, self.dtype = capacity, dtype
        self.layers: dict[torch.nn.Module, tuple[Tensor, Tensor]] = {}

    def of(self, module: torch.nn.Module, key_THd: Tensor, value_THd: Tensor) -> tuple[Tensor, Tensor]:
        """Return the memory of a layer's keys and of its values. The first call for a layer allocates it,
        with the heads and widths of `key_THd` and `value_THd`."""
        if module not in self.layers:
            keys, values = (
                like.new_empty(self.capacity, like.shape[1], PAGE, like.shape[2], dtype=self.dtype)
                for like in (key_THd, value_THd)
            )
            self.layers[module] = keys, values
        return self.layers[module]

    def grow(self, capacity: int, first: int, last: int) -> None:
        """Allocate a larger memory, layer by layer, and copy the first `first` pages to its beginning and the
        last `last` pages to its end."""
        for module, held in self.layers.items():
            grown = tuple(tensor.new_empty(capacity, *tensor.shape[1:]) for tensor in held)
            for new, old in zip(grown, held, strict=True):
                new[:first] = old[:first]
                new[capacity - last :] = old[self.capacity - last :]
            self.layers[module] = grown[0], grown[1]
        self.capacity = capacity


class Pages:
    """A set of pages at the front of a storage. With `backwards`, the set is at the storage's end, and its
    pages are counted from the end.

    Args:
        readers: largest number of rows that read a page.
        multiple: the number of pages of the block is rounded up to a multiple of this number.

    Attributes:
        used: number of pages of the block: one more than the number of the last page that is in use and not
            parked. Gaps (free pages) and parked pages may lie between them until `close_gaps`.
        top: number of pages up to the last one in use; parked pages and gaps are counted.
        live: number of pages in use, parked ones included.
        parked: number of parked pages.
        rows_PG: (capacity, readers) indices of the rows that read each page; -1 fills the unused places.
    """

    def __init__(self, readers: int, storage: Storage, *, multiple: int = 1, backwards: bool = False):
        self.readers = readers
        self.storage = storage
        self.multiple = multiple
        self.backwards = backwards
        self.used = self.top = self.live = self.parked = 0
        self.rows_PG = np.full((storage.capacity, readers), _NONE)
        self._is_parked_P = np.zeros(storage.capacity, dtype=bool)
        self._free: list[int] = []
        self._clean: dict[torch.nn.Module, int] = {}

    @property
    def block(self) -> int:
        """Number of pages that a decoding step computes with: `used`, rounded up to a multiple of
        `multiple`."""
        return -(-self.used // self.multiple) * self.multiple

    @property
    def has_gaps(self) -> bool:
        """True if there are free pages between those in use."""
        return bool(self._free)

    def at(self, pages: np.ndarray) -> np.ndarray:
        """Convert page numbers within this set to indices in the storage."""
        return self.storage.capacity - 1 - pages if self.backwards else pages

    def within_block(self, pages: np.ndarray) -> np.ndarray:
        """Convert the numbers of pages to their indices in the tensors that `tensors` returns."""
        return self.block - 1 - pages if self.backwards else pages

    def take(self) -> int:
        """Mark a free page as in use, and return it."""
        self.live += 1
        page = heapq.heappop(self._free) if self._free else self.top
        self.top, self.used = max(self.top, page + 1), max(self.used, page + 1)
        return page

    def drop(self, page: int) -> None:
        self.rows_PG[page] = _NONE
        self.live -= 1
        self.parked -= int(self._is_parked_P[page])
        self._is_parked_P[page] = False
        heapq.heappush(self._free, page)

    def park(self, pages: np.ndarray) -> None:
        """Take pages out of the block. They keep their content. `close_gaps` moves them."""
        self.parked += int((~self._is_parked_P[pages]).sum())
        self._is_parked_P[pages] = True

    def resume(self, pages: np.ndarray) -> None:
        """Take parked pages into the block again."""
        self.parked -= int(self._is_parked_P[pages].sum())
        self._is_parked_P[pages] = False
        self.used = max(self.used, int(pages.max(initial=-1)) + 1)

    def close_gaps(self, slack: float) -> np.ndarray | None:
        """Move pages so that those of the block come first and the parked ones behind them, without gaps.
        Do nothing if the block has at most `slack` times as many pages as belong into it, and the same holds
        for all pages.

        Returns:
            For each page that was in use, the page that has its content now; None if nothing was to be done.
        """
        active = self.live - self.parked
        if self.used <= active * slack and self.top <= self.live * slack:
            return None
        is_used = np.ones(self.top, dtype=bool)
        is_used[self._free] = False
        parked = self._is_parked_P[: self.top]
        source, to = (
            np.concatenate(pages)
            for pages in zip(
                _misplaced(is_used & ~parked, 0, active), _misplaced(parked, active, self.live), strict=True
            )
        )
        places = np.arange(self.top)
        places[source] = to
        self.rows_PG[to] = self.rows_PG[source]
        self.rows_PG[self.live : self.top] = _NONE
        self._is_parked_P[: self.top] = np.arange(self.top) >= active
        self._is_parked_P[self.live : self.top] = False
        self._move(to, source)
        self.used, self.top, self._free = active, self.live, []
        return places

    def grow(self) -> None:
        """Follow the storage, whose capacity has grown. Only the pages up to `top` have been copied."""
        more = self.storage.capacity - len(self.rows_PG)
        self.rows_PG = np.concatenate([self.rows_PG, np.full((more, self.readers), _NONE)])
        self._is_parked_P = np.concatenate([self._is_parked_P, np.zeros(more, dtype=bool)])
        self._clean = {module: min(clean, self.top) for module, clean in self._clean.items()}

    def layer(self, module: torch.nn.Module, key_THd: Tensor, value_THd: Tensor) -> tuple[Tensor, Tensor]:
        """Return the memory of a layer's keys and of its values (`Storage.of`). First set the memory
        of pages that are new in this block to zero. It could hold NaN, and even with weight 0 a NaN makes
        sums NaN."""
        memory = self.storage.of(module, key_THd, value_THd)
        self._wipe(module, self.block)
        return memory

    def tensors(self, module: torch.nn.Module, key_THd: Tensor, value_THd: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and the values that a layer has in these pages, each of shape (number of pages,
        heads, PAGE, width)."""
        keys, values = (
            self._part(tensor, 0, self.block) for tensor in self.layer(module, key_THd, value_THd)
        )
        return keys, values

    def _move(self, to: np.ndarray, source: np.ndarray) -> None:
        if len(to):
            to, source = self.at(to), self.at(source)
            for module, (keys, values) in self.storage.layers.items():
                self._wipe(module, self.top)
                keys[to], values[to] = keys[source], values[source]

    def _wipe(self, module: torch.nn.Module, stop: int) -> None:
        """Set the memory of the pages before `stop` that this set has never had before to zero."""
        clean = self._clean.get(module, 0)
        for tensor in self.storage.layers[module] if clean < stop else ():
            self._part(tensor, clean, stop).zero_()
        self._clean[module] = max(clean, stop)

    def _part(self, tensor: Tensor, start: int, stop: int) -> Tensor:
        """Return the part of a layer's memory that holds the pages from `start` to `stop` - 1."""
        end = self.storage.capacity
        return tensor[end - stop : end - start] if self.backwards else tensor[start:stop]


def _misplaced(is_mine_P: np.ndarray, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the pages that belong to `start` to `stop` - 1 and lie elsewhere, and the pages of that range
    that are not among them. There are equally many.

    Args:
        is_mine_P: true for `stop` - `start` pages, those that belong there.
    """
    mine = np.flatnonzero(is_mine_P)
    return mine[(mine < start) | (mine >= stop)], start + np.flatnonzero(~is_mine_P[start:stop])


_SLACK = 1.03
"""The gaps of a block are closed if `Pages.used` is more than this number times the pages that belong into
the block."""
_WHOLE = 8
"""With fixed shapes, the number of pages in the block `own` is rounded up to a multiple of this number. Then
each thread of an elementwise kernel computes only complete SIMD vectors."""


@dataclass(frozen=True, eq=False)
class Places:
    """The places of new tokens: token `source[i]` of a pass is written to place `offset[i]` of page
    `page[i]`."""

    source: Tensor
    page: Tensor
    offset: Tensor
    _slots: dict[int, Tensor] = field(default_factory=dict, init=False)

    def slots(self, heads: int) -> Tensor:
        """Return the places in a memory of shape (pages * heads * PAGE, width), one head of a token after
        another."""
        if heads not in self._slots:
            first = (self.page * heads)[:, None] + torch.arange(heads, device=self.page.device)
            self._slots[heads] = (first * PAGE + self.offset[:, None]).flatten()
        return self._slots[heads]


class PagedCache:
    """The keys and values of rows. A row is identified by its index. Its tokens fill its pages in order.

    Args:
        most_N: for each row, the largest number of tokens that it can have.
        readers: largest number of rows that share a prompt; 1: nothing is shared.
        pages: largest number of pages in use at once.
        dtype: dtype of the keys and values in memory, and of the products with them.
        fixed: True: the number of pages that a decoding step computes with is rounded up to a multiple of
            `_WHOLE`, so that rounding errors do not depend on how threads divide the work. `readers` must
            then be 1.
        ahead: the memory is allocated for this number of times as many pages as the rows can have, within
            `pages`.

    Attributes:
        lengths_N: for each row, the number of its tokens that have a place; 0 for a row that is not in the
            cache.
        is_parked_N: true for rows in the cache that wait for their next turn.
    """

    def __init__(
        self,
        most_N: np.ndarray,
        readers: int,
        pages: int,
        dtype: torch.dtype,
        *,
        fixed: bool = False,
        ahead: int = 1,
    ):
        self.pages, self.dtype = pages, dtype
        self._most_pages_N = -(-most_N // PAGE)
        self._most = min(pages, ahead * int(self._most_pages_N.sum()))
        multiple = _WHOLE if fixed else 1
        self.storage = Storage(-(-self._most // multiple) * multiple, dtype)
        self.own, self.shared = (
            Pages(1, self.storage, multiple=multiple),
            Pages(readers, self.storage, backwards=True),
        )
        shape = len(most_N), int(self._most_pages_N.max())
        self._entries_NJ, self._is_shared_NJ = np.full(shape, _NONE), np.zeros(shape, dtype=bool)
        self._count_N = np.zeros(len(most_N), dtype=np.int64)
        self.lengths_N = np.zeros(len(most_N), dtype=np.int64)
        self.is_parked_N = np.zeros(len(most_N), dtype=bool)

    @property
    def room(self) -> int:
        """The number of pages that may still be taken."""
        return self.pages - self.own.live - self.shared.live

    @property
    def parked(self) -> int:
        """The number of pages of parked rows that no row in the batch reads."""
        return self.own.parked + self.shared.parked

    @property
    def page_bytes(self) -> int:
        """Bytes of the keys and values of a page, summed over the layers that have written to the cache."""
        return sum(tensor[0].nbytes for layer in self.storage.layers.values() for tensor in layer)

    def admit(self, rows: Sequence[int], length: int) -> None:
        """Take pages for the first `length` tokens of rows. These tokens are equal in all rows, and the rows
        share the pages that the tokens fill completely. A `Filling` writes the keys and values afterwards."""
        common = self._common(rows, length)
        for _ in range(common):
            page = self._page(self.shared)
            for reader, row in enumerate(rows):
                self.shared.rows_PG[page, reader] = row
                self._add(row, page * self.shared.readers + reader, is_shared=True)
        for row in rows:
            for _ in range(-(-length // PAGE) - common):
                self._take(row)
            self.lengths_N[row] = length

    def admit_again(self, rows: np.ndarray, lengths: np.ndarray) -> None:
        """Take parked rows into the batch again, and take the pages that they lack for their first `lengths`
        tokens. A `Continuing` writes the keys and values of the new tokens afterwards."""
        self.is_parked_N[rows] = False
        own, shared = self._pages_of(rows)
        self.own.resume(own)
        self.shared.resume(shared)
        more = -(-lengths // PAGE) - self._count_N[rows]
        for row in np.repeat(rows, more).tolist():
            self._take(row)
        self.lengths_N[rows] = lengths

    def pages_for(self, rows: Sequence[int], length: int) -> int:
        """Return the number of pages that `admit` would take for rows of `length` tokens, plus one page for
        each row that may need a further page later."""
        common, whole = self._common(rows, length), -(-length // PAGE)
        return common + sum(min(whole + 1, int(most)) - common for most in self._most_pages_N[list(rows)])

    def pages_again(self, rows: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Return, for each parked row, the number of pages that `admit_again` would take, plus one page if
        the row may need a further one later."""
        whole_R: np.ndarray = np.minimum(-(-lengths // PAGE) + 1, self._most_pages_N[rows])
        return whole_R - self._count_N[rows]

    def needed(self, rows: np.ndarray) -> int:
        """Return the number of pages that `extend` would take."""
        return int((self.lengths_N[rows] == self._count_N[rows] * PAGE).sum())

    def extend(self, rows: np.ndarray) -> None:
        """Make room for one more token of each row."""
        for row in rows[self.lengths_N[rows] == self._count_N[rows] * PAGE]:
            self._take(row)
        self.lengths_N[rows] += 1

    def seen(self, rows: np.ndarray) -> int:
        """Return the number of tokens that rows attend to. A token of a shared page counts once, although
        several rows read it.

        Args:
            rows: indices of rows. Each shared page in use must be read by at least one of them, or be parked.
        """
        return int((self.lengths_N[rows] - PAGE * self._is_shared_NJ[rows].sum(1)).sum()) + PAGE * (
            self.shared.live - self.shared.parked
        )

    def free(self, row: int) -> None:
        """Remove a row from the cache, and free those of its pages that no other row reads."""
        for place in range(self._count_N[row]):
            entry = int(self._entries_NJ[row, place])
            if self._is_shared_NJ[row, place]:
                page, reader = divmod(entry, self.shared.readers)
                self.shared.rows_PG[page, reader] = _NONE
                if (self.shared.rows_PG[page] == _NONE).all():
                    self.shared.drop(page)
                elif not self._has_readers(np.array([page])).any():
                    self.shared.park(np.array([page]))
            else:
                self.own.drop(entry)
        self._entries_NJ[row] = _NONE
        self._is_shared_NJ[row] = False
        self._count_N[row] = self.lengths_N[row] = 0
        self.is_parked_N[row] = False

    def park(self, rows: np.ndarray) -> None:
        """Keep the pages of rows that leave the batch. `admit_again` takes such a row into the batch again;
        `free` removes it. A shared page is parked when none of its readers is in the batch."""
        self.is_parked_N[rows] = True
        own, shared = self._pages_of(rows)
        self.own.park(own)
        self.shared.park(shared[~self._has_readers(shared)])

    def renumber(self, old_N: np.ndarray, most_N: np.ndarray) -> None:
        """Replace the rows by new ones, of which some keep the pages of former rows. All other former rows
        are removed. No row may be in the batch.

        Args:
            old_N: for each new row, the index of the former row whose pages it has; -1 for none.
            most_N: for each new row, the largest number of tokens that it can have.
        """
        for row in np.setdiff1d(np.flatnonzero(self._count_N), old_N):
            self.free(row)
        has_N = old_N != _NONE
        new_of = np.full(len(self._count_N) + 1, _NONE)  # the last entry is that of the row -1
        new_of[old_N[has_N]] = np.flatnonzero(has_N)
        for pages in (self.own, self.shared):
            pages.rows_PG = new_of[pages.rows_PG]
        self._most_pages_N = -(-most_N // PAGE)
        width = max(self._entries_NJ.shape[1], int(self._most_pages_N.max()))
        more = ((0, 0), (0, width - self._entries_NJ.shape[1]))
        self._entries_NJ = np.where(
            has_N[:, None], np.pad(self._entries_NJ, more, constant_values=_NONE)[old_N], _NONE
        )
        self._is_shared_NJ = has_N[:, None] & np.pad(self._is_shared_NJ, more)[old_N]
        self._count_N, self.lengths_N, self.is_parked_N = (
            np.where(has_N, values_N[old_N], 0).astype(values_N.dtype)
            for values_N in (self._count_N, self.lengths_N, self.is_parked_N)
        )
        self._grow()

    def _grow(self) -> None:
        """Make the memory large enough for the rows, within the limit. It at least doubles, so that a
        further turn seldom needs it."""
        needed = int(self._most_pages_N.sum())
        most = min(self.pages, max(needed, 2 * self._most))
        if needed > self._most < most:
            self._most = most
            self.storage.grow(most, self.own.top, self.shared.top)
            self.own.grow()
            self.shared.grow()

    def _pages_of(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the own pages of rows, and the shared pages that they read, each once."""
        entries_RJ, is_shared_RJ = self._entries_NJ[rows], self._is_shared_NJ[rows]
        own = entries_RJ[(entries_RJ != _NONE) & ~is_shared_RJ]
        return own, np.unique(entries_RJ[is_shared_RJ] // self.shared.readers)

    def _has_readers(self, shared: np.ndarray) -> np.ndarray:
        """Return, for each of these shared pages, true if a row in the batch reads it."""
        readers_PG = self.shared.rows_PG[shared]
        found: np.ndarray = ((readers_PG != _NONE) & ~self.is_parked_N[readers_PG]).any(1)
        return found

    def _page(self, pages: Pages) -> int:
        """Take a free page of `pages` (`own` or `shared`), and return it. If the storage is full and
        `pages` has no gap to reuse, first close the gaps of both `own` and `shared`."""
        if not pages.has_gaps and self.own.top + self.shared.top >= self._most:
            self._close_gaps(slack=1.0)
        return pages.take()

    def _close_gaps(self, slack: float) -> None:
        for pages, is_shared in ((self.own, False), (self.shared, True)):
            places = pages.close_gaps(slack)
            if places is not None:
                mine_NJ = (self._entries_NJ != _NONE) & (self._is_shared_NJ == is_shared)
                page, reader = np.divmod(self._entries_NJ[mine_NJ], pages.readers)
                self._entries_NJ[mine_NJ] = places[page] * pages.readers + reader

    def places(
        self, rows: np.ndarray, positions: np.ndarray, sources: np.ndarray, device: torch.device
    ) -> list[tuple[Pages, Places]]:
        """Return where the keys and values of new tokens are to be written: the set of pages (`own` or
        `shared`), and the tokens' places in the storage. If several rows share a page, each of them has the
        page's tokens; only the tokens of the first such row get a place.

        Args:
            rows, positions: for each token, its row and its position in the row.
            sources: for each token, its index among the tokens of the forward pass.
        """
        entries, is_shared = (
            self._entries_NJ[rows, positions // PAGE],
            self._is_shared_NJ[rows, positions // PAGE],
        )
        found = []
        for pages, mine in ((self.own, ~is_shared), (self.shared, is_shared)):
            page, reader = np.divmod(entries[mine], pages.readers)
            first = reader == 0
            columns = (sources[mine][first], pages.at(page[first]), positions[mine][first] % PAGE)
            if first.any():
                found.append((pages, Places(*(torch.from_numpy(column).to(device) for column in columns))))
        return found

    def write(
        self,
        places: Sequence[tuple[Pages, Places]],
        module: torch.nn.Module,
        key_THd: Tensor,
        value_THd: Tensor,
    ) -> None:
        for pages, where in places:
            memories = pages.layer(module, key_THd, value_THd)
            for memory, new_THd in zip(memories, (key_THd, value_THd), strict=True):
                new = new_THd.index_select(0, where.source).flatten(0, 1)
                memory.view(-1, memory.shape[3]).index_copy_(0, where.slots(memory.shape[1]), new)

    def pages_at(self, rows: np.ndarray) -> np.ndarray:
        """Return the indices in the storage of the pages of rows, (R, J); -1 fills up rows with fewer
        pages."""
        entries_RJ = self._entries_NJ[rows, : self._count_N[rows].max()]
        shared_RJ = self.shared.at(entries_RJ // self.shared.readers)
        pages_RJ = np.where(
            self._is_shared_NJ[rows, : entries_RJ.shape[1]], shared_RJ, self.own.at(entries_RJ)
        )
        return np.where(entries_RJ == _NONE, _NONE, pages_RJ)

    def index(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the index by which a decoding step finds the pages of rows. If there are many gaps
        (`_SLACK`) among the own or the shared pages, they are closed first.

        Returns:
            Three arrays:
            * The entries of all rows, one row after another. A row has one entry for each of its pages. The
              entry for an own page is the page's number, from 0 on. The entry for a shared page is a larger
              number, and rows that share a page have different entries for it.
            * (R,) the place of each row's first entry in the first array.
            * (number of own pages, PAGE) float32, the mask of attention: -inf for the empty places in the
              last page of each row, else 0.
        """
        self._close_gaps(_SLACK)
        entries_RJ = self._entries_NJ[rows]
        counts_R = self._count_N[rows]
        lengths_R = self.lengths_N[rows]
        filled_P = np.full(self.own.block, PAGE)
        filled_P[entries_RJ[np.arange(len(rows)), counts_R - 1]] = (lengths_R - 1) % PAGE + 1
        page_RJ, reader_RJ = np.divmod(entries_RJ, self.shared.readers)
        shared_RJ = self.own.block + self.shared.within_block(page_RJ) * self.shared.readers + reader_RJ
        entries_RJ = np.where(self._is_shared_NJ[rows], shared_RJ, entries_RJ)
        entries = entries_RJ[np.arange(entries_RJ.shape[1]) < counts_R[:, None]]
        empty_PC = np.where(np.arange(PAGE) < filled_P[:, None], 0.0, -np.inf)
        return entries, np.concatenate([[0], np.cumsum(counts_R)[:-1]]), empty_PC.astype(np.float32)

    def _common(self, rows: Sequence[int], length: int) -> int:
        """Return the number of pages that rows share if their first `length` tokens are equal: as many as
        these tokens fill completely. Return 0 for a single row, or if the cache shares no pages."""
        return length // PAGE if len(rows) > 1 and self.shared.readers > 1 else 0

    def _take(self, row: int) -> None:
        page = self._page(self.own)
        self.own.rows_PG[page, 0] = row
        self._add(row, page, is_shared=False)

    def _add(self, row: int, entry: int, *, is_shared: bool) -> None:
        place = self._count_N[row]
        self._entries_NJ[row, place], self._is_shared_NJ[row, place] = entry, is_shared
        self._count_N[row] += 1


def cache_dtype(lm: CausalLM) -> torch.dtype:
    """Return the dtype of a model's cached keys and values."""
    return cache_dtype_on(lm.device, next(lm.module.parameters()).dtype)


def cache_dtype_on(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of cached keys and values. On a CPU this is float32, since a product in half precision
    would round the scores. On other devices it is the dtype of the weights."""
    return torch.float32 if device.type == "cpu" else dtype


class Kept:
    """Rows of a cache that wait for the next turns of their episodes. A row is known by the key of its
    request.

    Attributes:
        cache: the cache, in which all rows are parked.
    """

    def __init__(self, cache: PagedCache):
        self.cache = cache
        self._rows: dict[int, tuple[int, np.ndarray]] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, key: int, row: int, ids: np.ndarray) -> None:
        """Note a row of the cache.

        Args:
            key: the key of its request.
            ids: the tokens whose keys and values the row has.
        """
        self._rows[key] = row, ids

    def rows_of(self, requests: Sequence[Request]) -> np.ndarray:
        """Return, for each request, the row with which it goes on; -1 if there is none. The request must
        begin with the row's tokens, and have at least one more. No row is returned twice."""
        found = np.full(len(requests), -1)
        left = dict(self._rows)
        for number, request in enumerate(requests):
            row, ids = left.get(request.key, (-1, request.ids))
            if len(ids) < len(request.ids) and np.array_equal(ids, request.ids[: len(ids)]):
                found[number] = row
                del left[request.key]
        return found

    def drop(self, keys: Iterable[int]) -> None:
        """Drop the pages of the requests with these keys. If none is left, the cache is not tidied up: the
        caller lets go of it."""
        keys = set(keys)
        if self._rows.keys() <= keys:
            self._rows.clear()
        for key in keys:
            if key in self._rows:
                self.cache.free(self._rows.pop(key)[0])
