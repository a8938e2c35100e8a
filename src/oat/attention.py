"""Attention without padding, for engine and learner: sequences of any lengths lie end to end in one row of tokens.

A model of transformers finds `attention` under the name `oat`. Called with a `layout`, it lets the layout say who sees whom; without one it is
scaled dot-product attention as it was. Two layouts exist: `Packed`, below, and the step of a cache (`engines/kv.py`).

`Packed` goes span by span. On a GPU in half precision one kernel of variable-length attention takes all spans, if its values and gradients are
those of the spans one by one; that is tried once for every shape of heads.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
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

NAME = "oat"
_AGREEMENT = 5e-2
"""Most that a kernel in half precision may differ from the spans one by one, relative to the largest number."""


class Layout(Protocol):
    """Who sees whom in one forward pass."""

    def attend(self, module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """One layer's attention.

        Args:
            module: the layer, which tells layers apart.
            query: (R, heads, L, head width); key and value may have fewer heads.
        Returns:
            (R, L, heads, value width).
        """


@dataclass(frozen=True)
class Span:
    """A sequence among the tokens of a packed row: tokens `start` to `stop` - 1 see themselves causally.

    Attributes:
        prefix: number of the earlier span that they see whole, or None.
    """

    start: int
    stop: int
    prefix: int | None = None


class Bounds(NamedTuple):
    """Spans as a kernel of variable-length attention reads them: S sequences of queries and of keys, end to end.

    Attributes:
        queries, keys: (S + 1,) int32, where each sequence begins, and the end.
        tokens: the token of each key, those of a common prefix once for every span that sees it; None: each token is a key once, in order.
    """

    queries: Tensor
    keys: Tensor
    longest_query: int
    longest_key: int
    tokens: Tensor | None


@dataclass(eq=False)
class Packed:
    """Spans of one row of tokens, in order and disjoint; tokens between them see nothing and get zeros."""

    spans: Sequence[Span]
    uses: int = 0
    """Layers that have asked it."""
    _masks: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    _bounds: Bounds | None = None

    def attend(self, module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        self.uses += 1
        dtype = half_dtype(query)
        if dtype is None or any(self._sizes(query.shape[2])[0::2]):
            return self.one_by_one(query, key, value, scale)
        if not kernel_agrees(query.device, dtype, query.shape[1], key.shape[1], query.shape[3], value.shape[3]):
            return self.one_by_one(query, key, value, scale)
        return self.at_once(query.to(dtype), key.to(dtype), value.to(dtype), scale)

    def at_once(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """All spans, without tokens between them, in one kernel."""
        if self._bounds is None:
            self._bounds = self.bounds(query.device)
        bounds = self._bounds
        query_THd, key_THd, value_THd = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
        if bounds.tokens is not None:
            key_THd, value_THd = key_THd[bounds.tokens], value_THd[bounds.tokens]
        return variable_length(query_THd, key_THd, value_THd, bounds, scale)[None]

    def bounds(self, device: torch.device) -> Bounds:
        """The spans for a kernel that takes queries to stand at the end of their keys."""
        own = [np.arange(span.start, span.stop) for span in self.spans]
        keys = [ids if span.prefix is None else np.concatenate([own[span.prefix], ids]) for ids, span in zip(own, self.spans, strict=True)]
        of_queries, of_keys = (torch.from_numpy(np.cumsum([0, *map(len, parts)]).astype(np.int32)).to(device) for parts in (own, keys))
        is_shared = any(span.prefix is not None for span in self.spans)
        tokens = torch.from_numpy(np.concatenate(keys)).to(device) if is_shared else None
        return Bounds(of_queries, of_keys, max(map(len, own)), max(map(len, keys)), tokens)

    def one_by_one(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """The spans in turn, each by scaled dot-product attention."""
        sizes = self._sizes(query.shape[2])
        queries, keys, values = (list(tensor.split(sizes, dim=2))[1::2] for tensor in (query, key, value))
        gaps = sizes[0::2]
        seen = [query.new_zeros(1, gaps[0], query.shape[1], value.shape[3])] if gaps[0] else []
        for number, span in enumerate(self.spans):
            own_keys, own_values, mask = keys[number], values[number], None
            if span.prefix is not None:
                own_keys = torch.cat([keys[span.prefix], own_keys], dim=2)
                own_values = torch.cat([values[span.prefix], own_values], dim=2)
                mask = self._mask(own_keys.shape[2], span.stop - span.start, query)
            seen.append(_causal(queries[number], own_keys, own_values, mask, scale))
            if gaps[number + 1]:
                seen.append(query.new_zeros(1, gaps[number + 1], query.shape[1], value.shape[3]))
        return torch.cat(seen, dim=1)

    def _sizes(self, length: int) -> list[int]:
        """Tokens before the first span, in it, between it and the next, and so on."""
        sizes, place = [], 0
        for span in self.spans:
            sizes += [span.start - place, span.stop - span.start]
            place = span.stop
        return [*sizes, length - place]

    def _mask(self, keys: int, queries: int, like: Tensor) -> Tensor:
        """(queries, keys): 0 where a query that stands at the end of the keys may look, -inf elsewhere."""
        if (keys, queries) not in self._masks:
            hidden = torch.ones(queries, keys, dtype=torch.bool, device=like.device).triu(keys - queries + 1)
            self._masks[keys, queries] = like.new_zeros(queries, keys).masked_fill_(hidden, -torch.inf)
        return self._masks[keys, queries]


def pack(sequences: Sequence[np.ndarray], device: torch.device, *, width: int | None = None, rows: int = 0) -> tuple[Tensor, Tensor, list[Span]]:
    """Sequences end to end.

    Args:
        sequences: ids, each at least one.
        width: tokens that each sequence takes up, padding included; None: its own.
        rows: with `width`, as many rows there are, sequences or not.
    Returns:
        Ids (1, T), positions (1, T), and where the sequences lie.
    """
    widths = [width if width is not None else len(ids) for ids in sequences]
    starts = np.concatenate([[0], np.cumsum(widths)]).astype(np.int64)
    spans = [Span(int(start), int(start) + len(ids)) for start, ids in zip(starts, sequences, strict=False)]
    return *_lay(sequences, spans, max(int(starts[-1]), rows * (width or 0)), device), spans


def pack_groups(
    sequences: Sequence[np.ndarray], prefixes: Sequence[int], device: torch.device
) -> tuple[Tensor, Tensor, list[Span], list[np.ndarray]]:
    """Sequences end to end, of which those that begin alike have their beginning in common.

    Args:
        sequences: ids.
        prefixes: tokens of each sequence that may be common; below its length.
    Returns:
        Ids (1, T), positions (1, T), the spans, and for each sequence where its tokens lie.
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
        prefix = number_of[common] if length else None
        add(ids[length:], prefix)
        before = np.arange(spans[prefix].start, spans[prefix].stop) if prefix is not None else np.zeros(0, dtype=np.int64)
        places.append(np.concatenate([before, np.arange(spans[-1].start, spans[-1].stop)]))
    return *_lay(pieces, spans, spans[-1].stop, device), spans, places


def _lay(pieces: Sequence[np.ndarray], spans: Sequence[Span], total: int, device: torch.device) -> tuple[Tensor, Tensor]:
    tokens, positions = np.zeros(total, dtype=np.int64), np.zeros(total, dtype=np.int64)
    for span, ids in zip(spans, pieces, strict=True):
        before = 0 if span.prefix is None else spans[span.prefix].stop - spans[span.prefix].start
        tokens[span.start : span.stop], positions[span.start : span.stop] = ids, np.arange(before, before + len(ids))
    return torch.from_numpy(tokens)[None].to(device), torch.from_numpy(positions)[None].to(device)


def _causal(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """(1, L, heads, width); heads that share a key are batched beside each other, so that no key is copied."""
    heads, key_heads = query.shape[1], key.shape[1]
    query = query[0].unflatten(0, (key_heads, heads // key_heads))
    key, value = (tensor[0][:, None].expand(-1, heads // key_heads, -1, -1) for tensor in (key, value))
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=mask is None, scale=scale)
    return out.flatten(0, 1).transpose(0, 1)[None]


def half_dtype(like: Tensor) -> torch.dtype | None:
    """The half precision that attention of such a tensor is computed in on a GPU; None on a CPU, and in more than half precision."""
    if not like.is_cuda:
        return None
    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else like.dtype
    return dtype if dtype in (torch.float16, torch.bfloat16) else None


def variable_length(query_THd: Tensor, key_SHd: Tensor, value_SHd: Tensor, bounds: Bounds, scale: float) -> Tensor:
    """torch's kernel: causal attention within each sequence, whose queries stand at the end of its keys; (T, heads, width)."""
    from torch.nn.attention.varlen import varlen_attn

    causal: dict[str, Any] = {"window_size": (-1, 0), "enable_gqa": True}  # aligned at the lower right, as flash attention is since 2.1
    seen = varlen_attn(query_THd, key_SHd, value_SHd, *bounds[:4], scale=scale, **causal)
    assert isinstance(seen, Tensor)
    return seen


@cache
def kernel_agrees(device: torch.device, dtype: torch.dtype, heads: int, key_heads: int, width: int, value_width: int) -> bool:
    """Whether values and gradients of the kernel are those of the spans one by one, for spans with a prefix and without; False where there is none.

    What it computes shows in no graph and in no hook around it.
    """
    packed, scale = Packed([Span(0, 5), Span(5, 8, prefix=0), Span(8, 9, prefix=0), Span(9, 20)]), width**-0.5
    unseen = torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast(device.type, enabled=False), unseen:
        query, key, value = (
            torch.arange(20 * count * size, device=device).mul(1.7 + turn).sin().view(1, 20, count, size).transpose(1, 2).to(dtype).requires_grad_()
            for turn, (count, size) in enumerate(((heads, width), (key_heads, width), (key_heads, value_width)))
        )
        found = []
        try:
            for attend in (packed.at_once, packed.one_by_one):
                seen = attend(query, key, value, scale)
                found.append([seen, *torch.autograd.grad(seen.float().square().sum(), (query, key, value))])
        except (RuntimeError, TypeError, ValueError, ImportError):
            return False
        return all(bool((one - other).abs().max() <= _AGREEMENT * other.abs().max()) for one, other in zip(*found, strict=True))


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    layout: Layout | None = None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What transformers calls in every layer.

    Raises:
        ModelError: with a layout, the layer wants more than scaled dot products: soft caps, sinks, a bias of positions.
    """
    if layout is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    for name in ("softcap", "s_aux", "position_bias"):
        if kwargs.get(name) is not None:
            raise ModelError(f"its attention has `{name}`, which is not done here; give a plain attention model")
    return layout.attend(module, query, key, value, scaling if scaling is not None else query.shape[-1] ** -0.5), None


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
