"""The outline of the policy: its sizes, for what is checked before weights are loaded.

The checks get numbers alone: a model without weights that stayed alive would be state of the run that no
checkpoint can hold.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from oat.build import models
from oat.engines.decoding import blaming_model, cache_dtype_on
from oat.engines.paged_cache import PAGE
from oat.models.causal_lm import CausalLM


@dataclass(frozen=True)
class ModelOutline:
    """The sizes of a language model, which are known without its weights.

    Attributes:
        device: where it will be.
        weights: numbers in all its matrices.
        a_token: numbers that go into and come out of the matrices for one token.
        heads: attention heads of all layers.
        keys: numbers in the keys and values of one token, of all layers.
        context_length: most tokens of a sequence; None: no limit.
    """

    device: torch.device
    weights: int
    a_token: int
    heads: int
    keys: int
    context_length: int | None

    def page_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of a page of the engine's cache.

        Args:
            dtype: of the engine's weights.
        """
        return PAGE * self.keys * cache_dtype_on(self.device, dtype).itemsize


def outline_of(lm: CausalLM, profile: str) -> ModelOutline:
    """The outline of a model; quickest for one without weights (`oat.models.outline`).

    Args:
        profile: `compute.profile`, under which the model will be loaded.

    Raises:
        ModelError: its attention takes no layout.
        ConfigError: as `device_of`.
    """
    sizes = [parameter.shape for parameter in lm.module.parameters()]
    config = lm.module.config.get_text_config()
    return ModelOutline(
        device=models.device_of(profile),
        weights=sum(size.numel() for size in sizes),
        a_token=sum(sum(size[-2:]) for size in sizes),
        heads=config.num_attention_heads * config.num_hidden_layers,
        keys=keys_of(lm),
        context_length=lm.context_length,
    )


def keys_of(lm: CausalLM) -> int:
    """Count the numbers in the keys and values of one token, of all layers, by a pass over it.

    Raises:
        ModelError: as `outline_of`.
    """
    keys = _Keys()
    with torch.no_grad(), blaming_model(lm):
        one = torch.zeros(1, 1, dtype=torch.long, device=lm.device)
        lm.hidden(one, positions=one, layout=keys)
    return keys.numbers


class _Keys:
    """A layout that only counts the numbers in the keys and values of a pass."""

    def __init__(self) -> None:
        self.numbers = 0

    def attend(
        self, module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, scale: float
    ) -> Tensor:
        self.numbers += key.numel() + value.numel()
        return query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[3])
