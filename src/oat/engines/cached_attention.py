"""The attention layouts that write and read the paged KV cache (`paged_cache.py`).

* `Filling`: complete sequences, of which nothing is in the cache.
* `Continuing`: the newest tokens of rows whose earlier tokens are in the cache.
* `Step`: one new token for each row, the usual step of decoding.

`Step` computes by matrix products over the blocks of pages, and copies no page. Nearly all padding is the
empty rest of each row's last page. `Continuing` copies the pages of its rows once for each layer.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from oat.engines.paged_cache import PAGE, PagedCache, Pages, Places
from oat.models.attention import Packed


class Filling:
    """The attention layout of a pass over complete sequences (prefill). The layout also writes the sequences'
    keys and values into the cache."""

    def __init__(self, cache: PagedCache, packed: Packed, places: Sequence[tuple[Pages, Places]]):
        self.cache = cache
        self.packed = packed
        self.places = places

    def attend(
        self, module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, scale: float
    ) -> Tensor:
        key_THd, value_THd = (tensor[0].transpose(0, 1).to(self.cache.dtype) for tensor in (key, value))
        self.cache.write(self.places, module, key_THd, value_THd)
        return self.packed.attend(module, query, key, value, scale)


@dataclass(frozen=True, eq=False)
class _Bucket:
    """Rows of a `Continuing` whose attention one call computes: n rows with L queries and J pages each.

    Attributes:
        tokens_nL: for each query, the index of its token in the pass. A row with fewer new tokens repeats its
            last one.
        pages: indices in the storage, of the pages of all rows.
        mask_n1LS: 0 where a query attends to a key, else -inf; S is J pages of keys.
    """

    tokens_nL: Tensor
    pages_nJ: Tensor
    mask_n1LS: Tensor


class Continuing:
    """The attention layout of a pass over the newest tokens of rows. The earlier tokens of the rows are in
    the cache. The layout also writes the new keys and values into the cache. `PagedCache.admit` must have
    made room for them.

    Rows of nearly equal lengths are computed together.

    Args:
        rows: (R,) the cache's rows, as indices, in the order of the pass.
        counts: (R,) number of new tokens of each row, at least 1.
    """

    def __init__(self, cache: PagedCache, rows: np.ndarray, counts: np.ndarray, device: torch.device):
        self.cache = cache
        starts = np.cumsum(counts) - counts
        positions = np.arange(counts.sum()) + np.repeat(cache.lengths_N[rows] - counts - starts, counts)
        self.positions_1T = torch.from_numpy(positions)[None].to(device)
        self.places = cache.places(np.repeat(rows, counts), positions, np.arange(len(positions)), device)
        shapes = [
            (_rounded(-(-int(length) // PAGE)), _rounded(int(count)))
            for length, count in zip(cache.lengths_N[rows], counts, strict=True)
        ]
        self.buckets, order, place = [], np.zeros(len(positions), dtype=np.int64), 0
        for shape in dict.fromkeys(shapes):
            mine = np.array([number for number, other in enumerate(shapes) if other == shape])
            self.buckets.append(
                self._bucket(rows[mine], starts[mine], counts[mine], positions, shape, device)
            )
            for number in mine:
                order[starts[number] : starts[number] + counts[number]] = place + np.arange(counts[number])
                place += shape[1]
        self.order_T = torch.from_numpy(order).to(device)

    def attend(
        self, module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, scale: float
    ) -> Tensor:
        cache, key_heads = self.cache, key.shape[1]
        key_THd, value_THd = (tensor[0].transpose(0, 1).to(cache.dtype) for tensor in (key, value))
        cache.write(self.places, module, key_THd, value_THd)
        held = cache.storage.of(module, key_THd, value_THd)
        query_THd = query[0].transpose(0, 1)
        outputs = []
        for bucket in self.buckets:
            count, queries = bucket.tokens_nL.shape
            query_hgLd = (
                query_THd[bucket.tokens_nL]
                .unflatten(2, (key_heads, -1))
                .permute(0, 2, 3, 1, 4)
                .flatten(0, 1)
                .to(cache.dtype)
            )
            of_heads = bucket.pages_nJ[:, None] * key_heads + torch.arange(
                key_heads, device=query.device
            ).view(1, -1, 1)
            keys, values = (
                memory.view(len(memory) * key_heads, -1)
                .index_select(0, of_heads.flatten())
                .view(count * key_heads, 1, bucket.pages_nJ.shape[1] * PAGE, -1)
                .expand(-1, query_hgLd.shape[1], -1, -1)
                for memory in held
            )
            mask = bucket.mask_n1LS.to(query_hgLd.dtype).repeat_interleave(key_heads, 0)
            seen = F.scaled_dot_product_attention(query_hgLd, keys, values, attn_mask=mask, scale=scale)
            outputs.append(
                seen.unflatten(0, (count, key_heads))
                .permute(0, 3, 1, 2, 4)
                .reshape(count * queries, query.shape[1], -1)
            )
        return torch.cat(outputs).index_select(0, self.order_T).to(query.dtype)[None]

    def _bucket(
        self,
        rows: np.ndarray,
        starts: np.ndarray,
        counts: np.ndarray,
        positions: np.ndarray,
        shape: tuple[int, int],
        device: torch.device,
    ) -> _Bucket:
        """Make the bucket of rows that are padded to one shape: number of pages, and of queries."""
        pages_nJ = self.cache.pages_at(rows)
        pages_nJ = np.pad(pages_nJ, ((0, 0), (0, shape[0] - pages_nJ.shape[1])), constant_values=-1)
        pages_nJ = np.where(pages_nJ < 0, pages_nJ[:, :1], pages_nJ)
        tokens_nL = starts[:, None] + np.minimum(np.arange(shape[1]), counts[:, None] - 1)
        sees_nLS = np.arange(shape[0] * PAGE) <= positions[tokens_nL][..., None]
        mask = np.where(sees_nLS, np.float32(0.0), np.float32(-np.inf))[:, None]
        return _Bucket(*(torch.from_numpy(numbers).to(device) for numbers in (tokens_nL, pages_nJ, mask)))


class Step:
    """The attention layout of a decoding step: one new token per row. `PagedCache.extend` must have made room
    for these tokens.

    If other rows get the keys and values of a computed row too, the step copies the own pages of the computed
    rows, and computes with these only.

    Args:
        rows: (R,) the cache's rows that the pass computes, as indices, in the order of the pass.
        written: indices of all rows that get a token, and for each the place in `rows` of the row from which
            its key and value come (`decoding.py`); None: these are `rows`.
    """

    def __init__(
        self,
        cache: PagedCache,
        rows: np.ndarray,
        device: torch.device,
        written: tuple[np.ndarray, np.ndarray] | None = None,
    ):
        self.cache = cache
        entries, starts, empty_PC = cache.index(rows)
        to, sources = written or (rows, np.arange(len(rows)))
        self.places = cache.places(to, cache.lengths_N[to] - 1, sources, device)
        place_of_N = np.zeros(len(cache.lengths_N) + 1, dtype=np.int64)
        place_of_N[rows] = np.arange(len(rows))
        self.pools = [pages for pages in (cache.own, cache.shared) if pages.used]
        blocks = [pages.rows_PG[pages.within_block(np.arange(pages.block))] for pages in self.pools]
        self.chosen: Tensor | None = None
        if len(to) > len(rows):
            chosen = np.unique(entries[entries < cache.own.block])
            entries = np.where(
                entries < cache.own.block,
                np.searchsorted(chosen, entries),
                entries - cache.own.block + len(chosen),
            )
            blocks[0], empty_PC = blocks[0][chosen], empty_PC[chosen]
            self.chosen = torch.from_numpy(chosen).to(device)
        self.entries, self.starts, self.empty_PC = (
            torch.from_numpy(numbers).to(device) for numbers in (entries, starts, empty_PC)
        )
        self.queries_PG = [torch.from_numpy(place_of_N[rows_PG]).to(device) for rows_PG in blocks]

    @property
    def keys(self) -> int:
        """The number of keys that the step computes with in each layer, padding included."""
        return PAGE * sum(map(len, self.queries_PG))

    def attend(
        self, module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, scale: float
    ) -> Tensor:
        cache = self.cache
        key_RHd, value_RHd = (tensor[: len(self.starts), :, 0].to(cache.dtype) for tensor in (key, value))
        cache.write(self.places, module, key_RHd, value_RHd)
        heads, groups = query.shape[1], query.shape[1] // key.shape[1]
        query_RHgd = (query[:, :, 0] * scale).to(cache.dtype).unflatten(1, (-1, groups))
        held = [pages.tensors(module, key_RHd, value_RHd) for pages in self.pools]
        if self.chosen is not None:
            keys, values = held[0]
            held[0] = keys.index_select(0, self.chosen), values.index_select(0, self.chosen)
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


def _rounded(count: int) -> int:
    """Round a number up by at most an eighth, so that few different numbers remain."""
    step = max(1, (1 << count.bit_length()) // 16)
    return -(-count // step) * step
