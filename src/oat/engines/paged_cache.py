"""The paged KV cache: keys and values in pages of 8 tokens, within a limit on bytes.

A page belongs to one row, or holds a piece of a prompt that several rows share. The pages in use form two
blocks in one memory: pages of single rows at its front, shared pages at its end. The blocks grow towards each
other, so `engine.cache_gb` limits both together.

A decoding step computes attention by matrix products over the two blocks, and copies no page. Nearly all
padding is the empty rest of each row's last page. The attention of a row is summed in the order of the row's
pages, so other rows in the cache do not change this order.

In a measurement on two cores, pages of 8 tokens were as fast as pages of 16 or 32. The empty rests of last
pages were less than a tenth of all keys.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from oat.models.attention import Packed

PAGE = 8
"""Number of tokens in a page."""
_SLACK = 1.03
"""The gaps of a block are closed if `Pages.used` is more than this number times `Pages.live`."""
_WHOLE = 8
"""With fixed shapes, the number of pages in the block `own` is rounded up to a multiple of this number. Then
each thread of an elementwise kernel computes only complete SIMD vectors."""
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


class Pages:
    """A block of pages at the front of a storage. With `backwards`, the block is at the storage's end, and
    its pages are counted from the end.

    Args:
        readers: largest number of rows that read a page.
        multiple: the number of pages of the block is rounded up to a multiple of this number.

    Attributes:
        used: number of pages in use plus number of gaps. A gap is a page that was dropped and not taken
            again.
        live: number of pages in use.
        rows_PG: (capacity, readers) indices of the rows that read each page; -1 fills the unused places.
    """

    def __init__(self, readers: int, storage: Storage, *, multiple: int = 1, backwards: bool = False):
        self.readers = readers
        self.storage = storage
        self.multiple = multiple
        self.backwards = backwards
        self.used = self.live = 0
        self.rows_PG = np.full((storage.capacity, readers), _NONE)
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
        """Convert page numbers within this block to indices in the storage."""
        return self.storage.capacity - 1 - pages if self.backwards else pages

    def within_block(self, pages: np.ndarray) -> np.ndarray:
        """Convert the numbers of pages to their indices in the tensors that `tensors` returns."""
        return self.block - 1 - pages if self.backwards else pages

    def take(self) -> int:
        """Mark a free page as in use, and return it."""
        self.live += 1
        if self._free:
            return heapq.heappop(self._free)
        self.used += 1
        return self.used - 1

    def drop(self, page: int) -> None:
        self.rows_PG[page] = _NONE
        self.live -= 1
        heapq.heappush(self._free, page)

    def close_gaps(self, slack: float) -> np.ndarray | None:
        """If `used` is more than `slack` times `live`, move the last pages into free ones.

        Returns:
            For each page that was in use, the page that has its content now; None if nothing was to be done.
        """
        if self.used <= self.live * slack:
            return None
        free = sorted(page for page in self._free if page < self.live)
        last = np.setdiff1d(np.arange(self.live, self.used), self._free)
        places = np.arange(self.used)
        places[last] = free
        self.rows_PG[free] = self.rows_PG[last]
        self.rows_PG[self.live : self.used] = _NONE
        to, source = self.at(np.array(free, dtype=np.int64)), self.at(last)
        for keys, values in self.storage.layers.values():
            keys[to], values[to] = keys[source], values[source]
        self.used, self._free = self.live, []
        return places

    def layer(self, module: torch.nn.Module, key_THd: Tensor, value_THd: Tensor) -> tuple[Tensor, Tensor]:
        """Return the memory of a layer's keys and of its values (`Storage.of`). First set the memory
        of pages that are new in this block to zero. It could hold NaN, and even with weight 0 a NaN makes
        sums NaN."""
        memory, clean = self.storage.of(module, key_THd, value_THd), self._clean.get(module, 0)
        for tensor in memory if clean < self.block else ():
            self._part(tensor, clean, self.block).zero_()
        self._clean[module] = max(clean, self.block)
        return memory

    def tensors(self, module: torch.nn.Module, key_THd: Tensor, value_THd: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and the values that a layer has in these pages, each of shape (number of pages,
        heads, PAGE, width)."""
        keys, values = (
            self._part(tensor, 0, self.block) for tensor in self.layer(module, key_THd, value_THd)
        )
        return keys, values

    def _part(self, tensor: Tensor, start: int, stop: int) -> Tensor:
        """Return the part of a layer's memory that holds the pages from `start` to `stop` - 1."""
        end = self.storage.capacity
        return tensor[end - stop : end - start] if self.backwards else tensor[start:stop]


@dataclass(frozen=True, eq=False)
class _Places:
    """The places of new tokens: token `source[i]` of a pass is written to place `offset[i]` of page
    `page[i]`."""

    source: Tensor
    page: Tensor
    offset: Tensor


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

    Attributes:
        lengths_N: for each row, the number of its tokens that have a place; 0 for a row that is not in the
            cache.
    """

    def __init__(
        self, most_N: np.ndarray, readers: int, pages: int, dtype: torch.dtype, *, fixed: bool = False
    ):
        self.pages, self.dtype = pages, dtype
        self._most_pages_N = -(-most_N // PAGE)
        self._most = min(pages, int(self._most_pages_N.sum()))
        multiple = _WHOLE if fixed else 1
        self._storage = Storage(-(-self._most // multiple) * multiple, dtype)
        self.own, self.shared = (
            Pages(1, self._storage, multiple=multiple),
            Pages(readers, self._storage, backwards=True),
        )
        shape = len(most_N), int(self._most_pages_N.max())
        self._entries_NJ, self._is_shared_NJ = np.full(shape, _NONE), np.zeros(shape, dtype=bool)
        self._count_N = np.zeros(len(most_N), dtype=np.int64)
        self.lengths_N = np.zeros(len(most_N), dtype=np.int64)

    @property
    def room(self) -> int:
        """The number of pages that may still be taken."""
        return self.pages - self.own.live - self.shared.live

    @property
    def keys(self) -> int:
        """The number of keys that a decoding step computes with in each layer, padding included."""
        return PAGE * (self.own.block + self.shared.block)

    @property
    def page_bytes(self) -> int:
        """Bytes of the keys and values of a page, summed over the layers that have written to the cache."""
        return sum(tensor[0].nbytes for layer in self._storage.layers.values() for tensor in layer)

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

    def pages_for(self, rows: Sequence[int], length: int) -> int:
        """Return the number of pages that `admit` would take for rows of `length` tokens, plus one page for
        each row that may need a further page later."""
        common, whole = self._common(rows, length), -(-length // PAGE)
        return common + sum(min(whole + 1, int(most)) - common for most in self._most_pages_N[list(rows)])

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
            rows: indices of rows. Each shared page in use must be read by at least one of them.
        """
        return (
            int((self.lengths_N[rows] - PAGE * self._is_shared_NJ[rows].sum(1)).sum())
            + PAGE * self.shared.live
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
            else:
                self.own.drop(entry)
        self._entries_NJ[row] = _NONE
        self._is_shared_NJ[row] = False
        self._count_N[row] = self.lengths_N[row] = 0

    def _page(self, pages: Pages) -> int:
        """Take a free page of `pages` (`own` or `shared`), and return it. If the storage is full and
        `pages` has no gap to reuse, first close the gaps of both `own` and `shared`."""
        if not pages.has_gaps and self.own.used + self.shared.used >= self._most:
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
    ) -> list[tuple[Pages, _Places]]:
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
                found.append((pages, _Places(*(torch.from_numpy(column).to(device) for column in columns))))
        return found

    def write(
        self,
        places: Sequence[tuple[Pages, _Places]],
        module: torch.nn.Module,
        key_THd: Tensor,
        value_THd: Tensor,
    ) -> None:
        for pages, where in places:
            keys, values = pages.layer(module, key_THd, value_THd)
            keys[where.page, :, where.offset] = key_THd[where.source]
            values[where.page, :, where.offset] = value_THd[where.source]

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


class Filling:
    """The attention layout of a pass over complete sequences (prefill). The layout also writes the sequences'
    keys and values into the cache."""

    def __init__(self, cache: PagedCache, packed: Packed, places: Sequence[tuple[Pages, _Places]]):
        self.cache = cache
        self.packed = packed
        self.places = places

    def attend(
        self, module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, scale: float
    ) -> Tensor:
        key_THd, value_THd = (tensor[0].transpose(0, 1).to(self.cache.dtype) for tensor in (key, value))
        self.cache.write(self.places, module, key_THd, value_THd)
        return self.packed.attend(module, query, key, value, scale)


class Step:
    """The attention layout of a decoding step: one new token per row. `PagedCache.extend` must have made room
    for these tokens.

    Args:
        rows: (R,) the cache's rows that get a token, as indices, in the order of the pass.
    """

    def __init__(self, cache: PagedCache, rows: np.ndarray, device: torch.device):
        self.cache = cache
        self.entries, self.starts, self.empty_PC = (
            torch.from_numpy(numbers).to(device) for numbers in cache.index(rows)
        )
        self.places = cache.places(rows, cache.lengths_N[rows] - 1, np.arange(len(rows)), device)
        place_of_N = np.zeros(len(cache.lengths_N) + 1, dtype=np.int64)
        place_of_N[rows] = np.arange(len(rows))
        self.pools = [pages for pages in (cache.own, cache.shared) if pages.used]
        blocks = [pages.rows_PG[pages.within_block(np.arange(pages.block))] for pages in self.pools]
        self.queries_PG = [torch.from_numpy(place_of_N[rows_PG]).to(device) for rows_PG in blocks]

    def attend(
        self, module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, scale: float
    ) -> Tensor:
        cache = self.cache
        key_RHd, value_RHd = (tensor[: len(self.starts), :, 0].to(cache.dtype) for tensor in (key, value))
        cache.write(self.places, module, key_RHd, value_RHd)
        heads, groups = query.shape[1], query.shape[1] // key.shape[1]
        query_RHgd = (query[:, :, 0] * scale).to(cache.dtype).unflatten(1, (-1, groups))
        held = [pages.tensors(module, key_RHd, value_RHd) for pages in self.pools]
        scores = []
        for queries_PG, (keys, _) in zip(self.queries_PG, held, strict=True):
            query_PHQd = query_RHgd[queries_PG].transpose(1, 2).flatten(2, 3)
            scores.append(torch.matmul(query_PHQd, keys.transpose(2, 3)).float())
        scores[0] += self.empty_PC[:, None, None]
        highest_RH = self._bag(
            [
                _by_entry(score.amax(-1), pages.readers)
                for score, pages in zip(scores, self.pools, strict=True)
            ],
            "max",
        )
        highest_RHg = highest_RH.unflatten(1, (-1, groups))
        totals, sums = [], []
        for score, queries_PG, pages, (_, values) in zip(
            scores, self.queries_PG, self.pools, held, strict=True
        ):
            score -= highest_RHg[queries_PG].transpose(1, 2).flatten(2, 3)[..., None]
            weights = score.exp_()
            totals.append(_by_entry(weights.sum(-1), pages.readers))
            seen = torch.matmul(weights.to(cache.dtype), values).float()
            sums.append(_by_entry(seen, pages.readers))
        seen_RHd = self._bag(sums, "sum").unflatten(1, (heads, -1)) / self._bag(totals, "sum")[
            ..., None
        ].clamp(min=1e-30)
        return F.pad(seen_RHd, (0, 0, 0, 0, 0, len(query) - len(seen_RHd))).to(query.dtype)[:, None]

    def _bag(self, values: Sequence[Tensor], mode: str) -> Tensor:
        """Return for each of the R rows the sum or the maximum (`mode`) of its pages' values, (R, ...)."""
        table = values[0] if len(values) == 1 else torch.cat(list(values))
        return F.embedding_bag(self.entries, table, self.starts, mode=mode)


def _by_entry(values: Tensor, readers: int) -> Tensor:
    """Regroup values of P pages by page and reader; `readers` rows may read each page. The shape
    (P, key heads, readers * query heads per key head, ...) becomes (P * readers, X). Index p * readers + r
    of the result has all values of page p for reader r, one key head after another."""
    values = values.unflatten(2, (readers, -1)).transpose(1, 2)
    return values.reshape(len(values) * readers, -1)
