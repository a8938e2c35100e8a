"""The outline of the policy: its sizes, which are checked before weights are loaded.

The checks get these numbers and not the model, so that a run keeps no model for them.
"""

from dataclasses import dataclass

import torch

from oat.build import models
from oat.engines.cache_trial import keys_of
from oat.engines.paged_cache import cache_dtype_on
from oat.engines.pages import PAGE
from oat.models.causal_lm import CausalLM


@dataclass(frozen=True)
class ModelOutline:
    """The sizes of a language model, which follow from its configuration.

    Attributes:
        device: the device to which the model will be loaded.
        weights: number of weights in all matrices and vectors.
        a_token: number of values that go into and come out of all matrices, per token.
        heads: number of attention heads in all layers together.
        keys: how many numbers the keys and values of one token have in all layers together.
        context_length: largest number of tokens in a sequence; None: no limit.
    """

    device: torch.device
    weights: int
    a_token: int
    heads: int
    keys: int
    context_length: int | None

    def page_bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes of a page of the engine's cache.

        Args:
            dtype: precision of the engine's weights.
        """
        return PAGE * self.keys * cache_dtype_on(self.device, dtype).itemsize


def outline_of(lm: CausalLM, profile: str) -> ModelOutline:
    """Return the sizes of a model. A model without weights (`oat.models.outline`) suffices.

    Args:
        profile: `compute.profile`, under which the model will be loaded.

    Raises:
        ModelError: the model's attention does not work with the engine's KV cache.
        ConfigError: see `device_of`.
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
