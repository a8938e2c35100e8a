"""The outline of the policy: its sizes, which are checked before weights are loaded.

The checks get these numbers and not the model, so that a run keeps no model for them.
"""

from dataclasses import dataclass

import torch

from oat.assemble import models
from oat.engines.cache_trial import keys_of
from oat.engines.paged_cache import PAGE, cache_dtype_on
from oat.models.causal_lm import CausalLM, number_in
from oat.models.frozen import counted
from oat.models.outline_errors import NotOutlinedError


@dataclass(frozen=True)
class ModelOutline:
    """The sizes of a language model, which follow from its configuration.

    Attributes:
        device: the device to which the model will be loaded.
        weights: number of weights in all matrices and vectors.
        a_token: number of values that go into and come out of all matrices, per token.
        heads: number of attention heads in all layers together.
        keys: how many numbers the keys and values of one token have in all layers together; None: unknown.
        context_length: largest number of tokens in a sequence; None: no limit.
        frozen: how many of its tensors are frozen (`model.frozen`), for people; empty if none is.
        unknown: why the outline does not tell whether the model will be refused when its weights are loaded;
            empty if it tells.
    """

    device: torch.device
    weights: int
    a_token: int
    heads: int
    keys: int | None
    context_length: int | None
    frozen: str = ""
    unknown: str = ""

    @property
    def tells_memory(self) -> bool:
        """True if the memory that the model takes in a step follows from these sizes."""
        return self.keys is not None and self.heads > 0

    def page_bytes(self, dtype: torch.dtype) -> int | None:
        """Return the bytes of a page of the engine's cache; None if they are unknown.

        Args:
            dtype: precision of the engine's weights.
        """
        return None if self.keys is None else PAGE * self.keys * cache_dtype_on(self.device, dtype).itemsize


def outline_of(lm: CausalLM, profile: str) -> ModelOutline:
    """Return the sizes of a model. A model without weights (`oat.models.outline`) suffices.

    Args:
        profile: `compute.profile`, under which the model will be loaded.

    Raises:
        ModelError: the model's attention does not work with the engine's KV cache.
        ConfigError: see `device_of`.
    """
    sizes = [parameter.shape for parameter in lm.module.parameters()]
    keys, unknown = None, lm.unknown
    try:
        keys = keys_of(lm)
    except NotOutlinedError as error:
        unknown = unknown or str(error)
    heads = number_in(lm, "num_attention_heads") * number_in(lm, "num_hidden_layers")
    return ModelOutline(
        device=models.device_of(profile),
        weights=sum(size.numel() for size in sizes),
        a_token=sum(sum(size[-2:]) for size in sizes),
        heads=heads,
        keys=keys,
        context_length=lm.context_length,
        frozen=counted(lm),
        unknown=unknown or ("" if heads else "its configuration names no attention heads"),
    )


def longest_sequence(lm: CausalLM | ModelOutline, prompt: int, response: int) -> int:
    """Return the number of tokens of a prompt and its response together, limited by the model's context
    length."""
    return prompt + response if lm.context_length is None else min(prompt + response, lm.context_length)
