"""The trial of a model with the engine's KV cache, and the size of its cached keys and values.

The work of the engine `torch` that takes most memory beside its cache, for a model without weights.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import numpy as np
import torch
from torch import Tensor

from oat.engines.cached_attention import Filling, Step
from oat.engines.paged_cache import PAGE, PagedCache, cache_dtype
from oat.errors import ModelError
from oat.models.attention import Packed, pack
from oat.models.causal_lm import CausalLM
from oat.models.compatibility import LIBRARY_ERRORS, computation_of
from oat.models.outline_errors import NotOutlinedError, ShapesOnly, outlining

_TOLERANCE, _TOLERANCE_HALF = 1e-4, 5e-2
_page_bytes: dict[str, int] = {}
"""The bytes of a page for models that decode rightly with the cache, by `computation_of`. Both are properties
of their code, so a process finds them once."""


@torch.inference_mode()
def page_bytes_of(lm: CausalLM) -> int:
    """Return the bytes of a page of the KV cache, over all layers. A model with weights also runs with the
    cache, on a row of 9 tokens and a row of 1 token; its logits must be those of full passes.

    An outline has no values to compare. If it does not tell the size of its keys either, the result is the
    smallest size, with which an engine can be made.

    Raises:
        ModelError: the logits differ, or the model cannot run with the cache.
    """
    if not lm.has_weights:
        try:
            return PAGE * keys_of(lm) * cache_dtype(lm).itemsize
        except NotOutlinedError:
            return PAGE * cache_dtype(lm).itemsize
    computation = computation_of(lm)
    if computation in _page_bytes:
        return _page_bytes[computation]
    ids = np.arange(PAGE + 2) % lm.vocab_rows
    lengths, rows = np.array([PAGE + 1, 1]), np.arange(2)
    cache = PagedCache(lengths + 1, readers=1, pages=8, dtype=cache_dtype(lm))
    with blaming_model(lm):
        for row in rows:
            cache.admit([int(row)], int(lengths[row]))
            ids_1T, positions_1T, spans = pack([ids[: lengths[row]]], lm.device)
            sources = np.arange(lengths[row])
            places = cache.places(np.full(lengths[row], row), sources, sources, lm.device)
            lm.hidden(ids_1T, positions=positions_1T, layout=Filling(cache, Packed(spans), places))
        cache.extend(rows)
        next_R1, positions_R1 = (
            torch.from_numpy(values)[:, None].to(lm.device)
            for values in (ids[lengths].astype(np.int64), lengths)
        )
        cached_RV = lm.head(
            lm.hidden(next_R1, positions=positions_R1, layout=Step(cache, rows, lm.device))[:, 0]
        )
    whole = [torch.from_numpy(ids[: length + 1].astype(np.int64))[None].to(lm.device) for length in lengths]
    with lm.without_adapter():
        plain_RV = torch.stack([lm.module(input_ids=row).logits[0, -1] for row in whole])
        alone_RV = torch.stack([lm.module(input_ids=row[:, -1:]).logits[0, -1] for row in whole])
    scale = plain_RV.abs().max().clamp(min=1.0)
    difference = ((cached_RV - plain_RV).abs().max() / scale).item()
    tolerance = _TOLERANCE if plain_RV.dtype == torch.float32 else _TOLERANCE_HALF
    if not difference <= tolerance:
        raise ModelError(
            f"a `{lm.model_type}` gives other logits with this engine's cache than without it (relative "
            f"difference {difference:.3g}); give a plain attention model"
        )
    # with weights of 0, say, any cache would do
    if (alone_RV - plain_RV).abs().max() / scale > 10 * tolerance:
        _page_bytes[computation] = cache.page_bytes
    return cache.page_bytes


def keys_of(lm: CausalLM) -> int:
    """Return the number of elements that the keys and values of one token have in all layers together. They
    are counted in a forward pass over two tokens of an outline.

    Raises:
        NotOutlinedError: the pass fails; or tokens also reach each other beside our attention, by attention
            that the model's own code computes, by recurrences or by convolutions. Then only the trial with
            weights tells whether the cache can be used.
        ModelError: our attention refuses the model's.
    """
    if "keys" in lm.counted:
        return lm.counted["keys"]
    keys = _Keys()
    has_experts = any(parameter.ndim > 2 for parameter in lm.module.parameters())
    with torch.no_grad(), outlining(), ShapesOnly() if has_experts else nullcontext():
        # two tokens, since a mask of one token shows nothing
        two = torch.zeros(1, 2, dtype=torch.long, device=lm.device)
        lm.hidden(two, positions=two, layout=keys)
        layers = lm.num_layers
    if not keys.numbers or len(keys.modules) < layers:
        raise NotOutlinedError(
            f"{len(keys.modules)} of its {layers} layers attend by code that can be replaced"
        )
    if len(set(map(id, keys.modules))) < len(keys.modules):
        raise NotOutlinedError("a layer attends twice")
    if any(isinstance(module, torch.nn.Conv1d) for module in lm.module.base_model.modules()):
        raise NotOutlinedError("it has convolutions over tokens")
    lm.counted["keys"] = keys.numbers // 2
    return lm.counted["keys"]


class _Keys:
    """An attention layout that computes nothing. It returns zeros, and counts the numbers in the keys and
    values that it gets."""

    def __init__(self) -> None:
        self.numbers = 0
        self.modules: list[torch.nn.Module] = []

    def attend(
        self, module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, scale: float
    ) -> Tensor:
        self.modules.append(module)
        self.numbers += key.numel() + value.numel()
        return query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[3])


@contextmanager
def blaming_model(lm: CausalLM) -> Iterator[None]:
    """A context in which errors of a model's code become a `ModelError`. In it the model runs with a layout,
    such as `cached_attention.Step`, which takes the place of the model's own attention."""
    try:
        yield
    except LIBRARY_ERRORS as error:
        raise ModelError(
            f"a `{lm.model_type}` cannot be decoded with this engine's cache ({error}); give a plain "
            "attention model"
        ) from error
