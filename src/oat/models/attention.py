"""Attention for engine and learner: sequences of any lengths follow each other in one row of tokens, without
padding.

Transformers' models call `attention`, which is registered there under the name `oat`. If the call has a
`layout`, the layout computes the attention. Otherwise transformers' scaled dot-product attention does. There
are two kinds of layout:

* `Packed`, in this module, is the layout of a row of complete sequences (spans).
* `engines/cached_attention.py` has the layouts of a KV cache.

`Packed` computes attention in one of two ways:

* In buckets: spans of nearly equal length are padded, and one call computes them as the rows of a batch. A
  call for each span would take 0.3 ms forward and backward, however short the span.
* By one kernel of variable-length attention for all spans. Three conditions must hold. A GPU computes in half
  precision; no tokens lie between the spans; and the kernel's results agree with those of the buckets
  (`kernel_agrees`).

Packing: sequences of any lengths follow each other in one row of tokens. They are padded only if a width
is given. `attention.py` computes the attention of such a row.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from oat.errors import ModelError


@dataclass(frozen=True)
class Span:
    """A sequence in a packed row: tokens `start` to `stop` - 1, which attend to each other causally.

    Attributes:
        prefix: index of an earlier span; this span's tokens also attend to all tokens of that span. None:
            there is no prefix.
    """

    start: int
    stop: int
    prefix: int | None = None


def pack(
    sequences: Sequence[np.ndarray], device: torch.device, *, width: int | None = None, rows: int = 0
) -> tuple[Tensor, Tensor, list[Span]]:
    """Put sequences one after another into one row of tokens.

    Args:
        sequences: the ids of each sequence; at least one sequence.
        width: number of tokens to which each sequence is padded on the right; None: no padding.
        rows: if `width` is given, the result is padded at its end to at least `rows` * `width` tokens.

    Returns:
        Ids (1, T); positions (1, T); and the span of each sequence, without its padding.
    """
    widths = [width if width is not None else len(ids) for ids in sequences]
    starts = np.concatenate([[0], np.cumsum(widths)]).astype(np.int64)
    spans = [Span(int(start), int(start) + len(ids)) for start, ids in zip(starts, sequences, strict=False)]
    return *_lay(sequences, spans, max(int(starts[-1]), rows * (width or 0)), device), spans


def pack_groups(
    sequences: Sequence[np.ndarray], prefixes: Sequence[int], device: torch.device
) -> tuple[Tensor, Tensor, list[Span], list[np.ndarray]]:
    """Put sequences one after another into one row of tokens. Several sequences may share a prefix, which is
    in the row once.

    Args:
        sequences: the ids of each sequence.
        prefixes: for each sequence, the length of its prefix, which may be the whole sequence; 0 for no
            prefix. Equal prefixes are shared.

    Returns:
        Ids (1, T); positions (1, T); the spans (a prefix is a span of its own); and for each sequence the
        indices of its tokens in the row.
    """
    spans: list[Span] = []
    pieces: list[np.ndarray] = []
    places: list[np.ndarray] = []
    number_of: dict[bytes, int] = {}

    def add(ids: np.ndarray, prefix: int | None = None) -> None:
        start = spans[-1].stop if spans else 0
        spans.append(Span(start, start + len(ids), prefix))
        pieces.append(ids)

    for ids, length in zip(sequences, prefixes, strict=True):
        common = ids[:length].tobytes()
        if length and common not in number_of:
            number_of[common] = len(spans)
            add(ids[:length])
        own = []
        prefix = number_of[common] if length else None
        if prefix is not None:
            own.append(np.arange(spans[prefix].start, spans[prefix].stop))
        if prefix is None or len(ids) > length:
            add(ids[length:], prefix)
            own.append(np.arange(spans[-1].start, spans[-1].stop))
        places.append(np.concatenate(own))
    return *_lay(pieces, spans, spans[-1].stop, device), spans, places


def _lay(
    pieces: Sequence[np.ndarray], spans: Sequence[Span], total: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    tokens, positions = np.zeros(total, dtype=np.int64), np.zeros(total, dtype=np.int64)
    for span, ids in zip(spans, pieces, strict=True):
        before = 0 if span.prefix is None else spans[span.prefix].stop - spans[span.prefix].start
        tokens[span.start : span.stop], positions[span.start : span.stop] = (
            ids,
            np.arange(before, before + len(ids)),
        )
    return torch.from_numpy(tokens)[None].to(device), torch.from_numpy(positions)[None].to(device)


NAME = "oat"
_NEAR_UP_TO = 512
"""Where `Packed` has no `width`: if a span and its prefix have at most this many tokens together, the span
may share a bucket with spans of nearly equal lengths. Otherwise it shares a bucket only with spans of equal
lengths."""
_AGREEMENT = 3e-2
"""Largest allowed difference between results in half precision of `Packed.at_once` and `Packed.in_buckets`,
relative to the largest absolute value in the result of `Packed.in_buckets`. On normal random inputs, each is
within 7e-3 of float32."""


class AttentionLayout(Protocol):
    """The rule by which tokens attend to each other in one forward pass."""

    def attend(
        self, module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, scale: float
    ) -> Tensor:
        """Compute one layer's attention for R rows of L tokens.

        Args:
            module: the layer's attention module; it identifies the layer.
            query, key, value: (R, heads, L, head width); key and value may have fewer heads than query.
            scale: factor of the scalar products of queries and keys.

        Returns:
            (R, L, heads, value width).
        """


class Bounds(NamedTuple):
    """The S spans of a row in the form that the kernel of variable-length attention takes: S sequences of
    queries and S sequences of keys. Each sequence begins where the one before it ends.

    Attributes:
        queries, keys: (S + 1,) int32 bounds of the sequences of queries and of keys. Entry i is the index at
            which sequence i begins; the last entry is the index at which the last sequence ends.
        longest_query, longest_key: length of the longest sequence of queries and of keys.
        tokens: for each key, the index of its token in the row. A token of a shared prefix is a key in every
            sequence that attends to it. None: every token is a key once, in order.
    """

    queries: Tensor
    keys: Tensor
    longest_query: int
    longest_key: int
    tokens: Tensor | None


@dataclass(frozen=True, eq=False)
class _Bucket:
    """Spans of nearly equal length. One call computes their attention.

    Attributes:
        count: number of spans.
        queries, keys: number of queries and of keys of each span, padding included.
        mask: a mask made by `_mask`; None: attention is causal.
    """

    count: int
    queries: int
    keys: int
    mask: Tensor | None


class Packed:
    """Layout of one row of tokens that is divided into spans, in order. There may be tokens between spans;
    their outputs have no meaning.

    Two spans share a bucket if they have equal padded lengths, and their prefixes (`Span.prefix`) have equal
    padded lengths. One call computes the attention of a bucket. A span is padded on the right with copies of
    its last token. Since attention is causal, no real token attends to the copies. A prefix is padded on the
    left, and a mask hides its padding.

    Args:
        width: number of tokens to which every span is padded; prefixes are then not padded. None: prefix and
            span are each padded by at most an eighth of their length; if they have more than 512 tokens
            together, they are not padded.

    Attributes:
        uses: number of calls of `attend`: one for each layer of each pass.
    """

    def __init__(self, spans: Sequence[Span], *, width: int | None = None):
        self.spans = spans
        self.width = width
        self.uses = 0
        self._plan: tuple[list[_Bucket], Rows, Rows, Rows] | None = None
        self._bounds: Bounds | None = None

    def attend(
        self, module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, scale: float
    ) -> Tensor:
        self.uses += 1
        dtype = half_dtype(query)
        if dtype is None or sum(map(_length, self.spans)) < query.shape[2]:
            return self.in_buckets(query, key, value, scale)
        if not kernel_agrees(
            query.device, dtype, query.shape[1], key.shape[1], query.shape[3], value.shape[3]
        ):
            return self.in_buckets(query, key, value, scale)
        return self.at_once(query.to(dtype), key.to(dtype), value.to(dtype), scale)

    def at_once(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Compute the attention of all spans by one kernel. There must be no tokens between the spans."""
        if self._bounds is None:
            self._bounds = self.bounds(query.device)
        bounds = self._bounds
        query_THd, key_THd, value_THd = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
        if bounds.tokens is not None:
            key_THd, value_THd = key_THd[bounds.tokens], value_THd[bounds.tokens]
        return variable_length(query_THd, key_THd, value_THd, bounds, scale)[None]

    def bounds(self, device: torch.device) -> Bounds:
        """Return the spans in the form that `variable_length` takes."""
        own = [np.arange(span.start, span.stop) for span in self.spans]
        keys = [
            ids if span.prefix is None else np.concatenate([own[span.prefix], ids])
            for ids, span in zip(own, self.spans, strict=True)
        ]
        query_starts, key_starts = (
            torch.from_numpy(np.cumsum([0, *map(len, parts)]).astype(np.int32)).to(device)
            for parts in (own, keys)
        )
        is_shared = any(span.prefix is not None for span in self.spans)
        tokens = torch.from_numpy(np.concatenate(keys)).to(device) if is_shared else None
        return Bounds(query_starts, key_starts, max(map(len, own)), max(map(len, keys)), tokens)

    def in_buckets(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Compute the attention of the spans bucket by bucket, by scaled dot-product attention."""
        if self._plan is None:
            self._plan = self._make_plan(query)
        buckets, query_rows, key_rows, back = self._plan
        queries, keys, values = (
            rows.take(tensor[0].transpose(0, 1)).split(
                [bucket.count * getattr(bucket, width) for bucket in buckets]
            )
            for tensor, rows, width in (
                (query, query_rows, "queries"),
                (key, key_rows, "keys"),
                (value, key_rows, "keys"),
            )
        )
        outputs = [
            _attend(bucket, *parts, scale)
            for bucket, parts in zip(buckets, zip(queries, keys, values, strict=True), strict=True)
        ]
        return back.take(torch.cat(outputs))[None]

    def _make_plan(self, like: Tensor) -> tuple[list[_Bucket], "Rows", "Rows", "Rows"]:
        """Put the spans into buckets.

        Returns:
            The buckets, and three selections. The first selects the tokens whose queries go into the buckets.
            The second selects the tokens whose keys and values go into the buckets. The third selects, from
            the outputs of all buckets, the output of each token.
        """
        groups: dict[tuple[int, int], list[int]] = {}
        before = [0 if span.prefix is None else _length(self.spans[span.prefix]) for span in self.spans]
        for number, span in enumerate(self.spans):
            if _length(span):
                groups.setdefault(self._shape(before[number], _length(span)), []).append(number)
        buckets = []
        of_queries = []
        of_keys = []
        back_T = np.zeros(like.shape[2], dtype=np.int64)
        place = 0
        for (ahead, own), numbers in groups.items():
            starts, lengths = (
                np.array([get(self.spans[number]) for number in numbers]) for get in (_start, _length)
            )
            columns_nL = starts[:, None] + np.minimum(np.arange(own), lengths[:, None] - 1)
            real_nL = np.arange(own) < lengths[:, None]
            back_T[columns_nL[real_nL]] = place + np.flatnonzero(real_nL)
            place += columns_nL.size
            firsts = np.array([_start(self.spans[self.spans[number].prefix or 0]) for number in numbers])
            left_nP = np.arange(ahead) - (ahead - np.array([before[number] for number in numbers]))[:, None]
            of_queries.append(columns_nL.ravel())
            of_keys.append(
                np.concatenate([firsts[:, None] + np.maximum(left_nP, 0), columns_nL], axis=1).ravel()
            )
            buckets.append(
                _Bucket(len(numbers), own, ahead + own, _mask(left_nP >= 0, own, like) if ahead else None)
            )
        queries, keys = (
            Rows(np.concatenate(numbers), like.shape[2], like.device) for numbers in (of_queries, of_keys)
        )
        return buckets, queries, keys, Rows(back_T, place, like.device)

    def _shape(self, before: int, own: int) -> tuple[int, int]:
        """Return the padded lengths of a span's prefix (`before` tokens) and of the span (`own` tokens)."""
        if self.width is not None:
            return before, self.width
        return (before, own) if before + own > _NEAR_UP_TO else (_near(before), _near(own))


class Rows:
    """A selection of rows of a matrix. A row may be selected several times; its gradient is then the sum of
    the gradients of its copies.

    Args:
        numbers: indices of the selected rows.
        count: number of rows of the matrix.
    """

    def __init__(self, numbers: np.ndarray, count: int, device: torch.device):
        self.is_every = np.array_equal(numbers, np.arange(count))
        self.numbers = torch.from_numpy(numbers).to(device)
        self.copies = torch.from_numpy(np.argsort(numbers, kind="stable")).to(device)
        self.starts = torch.from_numpy(np.searchsorted(np.sort(numbers), np.arange(count))).to(device)

    def take(self, matrix: Tensor) -> Tensor:
        """Return the selected rows in the order of `numbers`. The matrix is (`count`, ...)."""
        if self.is_every:
            return matrix
        taken: Tensor = _Take.apply(matrix.flatten(1), self)
        return taken.view(-1, *matrix.shape[1:])


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, matrix: Tensor, rows: Rows) -> Tensor:
        ctx.rows = rows
        return matrix.index_select(0, rows.numbers)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return F.embedding_bag(ctx.rows.copies, gradient, ctx.rows.starts, mode="sum"), None


def _attend(bucket: _Bucket, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Return the attention outputs of a bucket, (spans * queries of a span, heads, value width). For query
    heads that share a key head, keys and values are not copied, but expanded along an axis."""
    heads, key_heads = query.shape[1], key.shape[1]
    query = (
        query.view(bucket.count, bucket.queries, key_heads, heads // key_heads, -1)
        .permute(0, 2, 3, 1, 4)
        .flatten(0, 1)
    )
    key, value = (
        tensor.view(bucket.count, bucket.keys, key_heads, -1).transpose(1, 2).flatten(0, 1)[:, None]
        for tensor in (key, value)
    )
    key, value = (tensor.expand(-1, heads // key_heads, -1, -1) for tensor in (key, value))
    mask = (
        bucket.mask
        if bucket.mask is None or len(bucket.mask) == 1
        else bucket.mask.repeat_interleave(key_heads, 0)
    )
    output = F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=scale
    )
    return (
        output.unflatten(0, (bucket.count, key_heads))
        .permute(0, 3, 1, 2, 4)
        .reshape(bucket.count * bucket.queries, heads, -1)
    )


def _mask(sees_nP: np.ndarray, own: int, like: Tensor) -> Tensor:
    """Return the mask of a bucket of n spans: (n, 1, L, P + L), or (1, 1, L, P + L) if no prefix is padded.
    The mask is 0 if the query attends to the key, else -inf. A query attends to the real tokens of its
    prefix, and causally to its own span.

    Args:
        sees_nP: (n, P), true if the key of the prefix is a real token, false if it is padding.
        own: L, the padded length of the spans.
        like: a tensor that has the precision and the device of the mask.
    """
    sees_nP = sees_nP[:1] if sees_nP.all() else sees_nP
    causal = np.tril(np.ones((own, own), dtype=bool))
    sees = np.concatenate(
        [np.repeat(sees_nP[:, None], own, axis=1), np.broadcast_to(causal, (len(sees_nP), own, own))], axis=2
    )
    hidden = torch.from_numpy(~sees[:, None]).to(like.device)
    return like.new_zeros(hidden.shape).masked_fill_(hidden, -torch.inf)


def _start(span: Span) -> int:
    return span.start


def _length(span: Span) -> int:
    return span.stop - span.start


def _near(length: int) -> int:
    """Round a length up by at most an eighth, such as 33 to 36. There are eight results between two
    neighbouring powers of two."""
    step = max(1, (1 << length.bit_length()) // 16)
    return -(-length // step) * step


def half_dtype(like: Tensor) -> torch.dtype | None:
    """Return the half precision in which a GPU computes the attention of the tensor `like`: the dtype of
    autocast if it is on, else the tensor's. Return None if the tensor is not on a GPU, or this dtype is no
    half precision."""
    if not like.is_cuda:
        return None
    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else like.dtype
    return dtype if dtype in (torch.float16, torch.bfloat16) else None


def variable_length(
    query_THd: Tensor, key_SHd: Tensor, value_SHd: Tensor, bounds: Bounds, scale: float
) -> Tensor:
    """Compute causal attention within each sequence by torch's kernel. The last query of a sequence is
    aligned with the sequence's last key. Return (T, heads, value width)."""
    from torch.nn.attention.varlen import varlen_attn

    # the causal window is aligned at the lower right, as in flash attention since 2.1
    causal: dict[str, Any] = {"window_size": (-1, 0), "enable_gqa": True}
    output = varlen_attn(query_THd, key_SHd, value_SHd, *bounds[:4], scale=scale, **causal)
    assert isinstance(output, Tensor)
    return output


@cache
def kernel_agrees(
    device: torch.device, dtype: torch.dtype, heads: int, key_heads: int, width: int, value_width: int
) -> bool:
    """Return True if torch's kernel (`Packed.at_once`) gives the same attention and gradients as
    `Packed.in_buckets`, within `_AGREEMENT`, for spans with a prefix and without. Return False if they
    differ, or if the kernel fails or does not exist. The result is kept for later calls with equal arguments.

    The computation is no part of the caller's autograd graph, and the caller's hooks on saved tensors are not
    called.
    """
    packed = Packed([Span(0, 5), Span(5, 8, prefix=0), Span(8, 9, prefix=0), Span(9, 20)])
    scale = width**-0.5
    no_hooks = torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
    no_cast = torch.autocast(device.type, enabled=False)
    with torch.inference_mode(False), torch.enable_grad(), no_cast, no_hooks:
        drawn = torch.Generator().manual_seed(0)
        query, key, value = (
            torch.randn(1, count, 20, size, generator=drawn).to(device, dtype).requires_grad_()
            for count, size in ((heads, width), (key_heads, width), (key_heads, value_width))
        )
        found = []
        try:
            for attend in (packed.at_once, packed.in_buckets):
                output = attend(query, key, value, scale)
                gradients = torch.autograd.grad(output.float().square().sum(), (query, key, value))
                found.append([output, *gradients])
        except (RuntimeError, TypeError, ValueError, ImportError):
            return False
        return all(
            bool((one - other).abs().max() <= _AGREEMENT * other.abs().max())
            for one, other in zip(*found, strict=True)
        )


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    layout: AttentionLayout | None = None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute the attention of one layer. Transformers calls this function in every layer.

    Raises:
        ModelError: there is a layout, and the layer's attention has soft caps, tensors that are not known
            here, such as sinks or a position bias, or a mask that is not the caller's.
    """
    if layout is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    for name, given in kwargs.items():
        # for example `s_aux` (sinks) or `indices` (the tokens that sparse attention chooses)
        is_unknown = isinstance(given, Tensor) and name not in ("position_ids", "cache_position")
        if is_unknown or (name == "softcap" and given is not None):
            raise ModelError(
                f"its attention has `{name}`, which is not done here; give a plain attention model"
            )
    if attention_mask is not None and attention_mask.numel() > 1:  # `NO_MASK` has one element
        raise ModelError(
            "its attention chooses the tokens that a token attends to (a mask of its own), which is not done "
            "here; give a plain attention model"
        )
    return layout.attend(
        module, query, key, value, scaling if scaling is not None else query.shape[-1] ** -0.5
    ), None


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
