"""The outline of the policy: its sizes, which are checked before weights are loaded.

The checks get these numbers and not the model, so that a run keeps no model for them.
"""

from dataclasses import dataclass

import torch

from oat.assemble import models
from oat.engines.cache_trial import keys_of
from oat.engines.paged_cache import PAGE, cache_dtype_on
from oat.models.activations import Activations, activations_of
from oat.models.causal_lm import CausalLM, number_in
from oat.models.frozen import counted
from oat.models.outline_errors import NotOutlinedError


@dataclass(frozen=True)
class ModelOutline:
    """The sizes of a language model, which follow from its configuration.

    Attributes:
        device: the device to which the model will be loaded.
        weights: number of weights in all matrices and vectors.
        itemsize: bytes of a value of the model.
        bytes: bytes of all tensors.
        largest: bytes of the largest tensor.
        learned: bytes of those that learn.
        adapter: bytes of the adapter; 0 if there is none.
        head: bytes of the head; 0 if it is the embedding.
        vocabulary: number of logits of a token.
        is_in_files: True if the weights lie in pages of the model's files until they change.
        activations: what a pass keeps for each token.
        keys: how many numbers the keys and values of one token have in all layers together; None: unknown.
        context_length: largest number of tokens in a sequence; None: no limit.
        has_heads: False if its configuration names no attention heads.
        frozen: how many of its tensors are frozen (`model.frozen`), for people; empty if none is.
        unknown: why the outline does not tell whether the model will be refused when its weights are loaded;
            empty if it tells.
    """

    device: torch.device
    weights: int
    itemsize: int
    bytes: int
    largest: int
    learned: int
    adapter: int
    head: int
    vocabulary: int
    is_in_files: bool
    activations: Activations
    keys: int | None
    context_length: int | None
    has_heads: bool
    frozen: str = ""
    unknown: str = ""

    @property
    def tells_memory(self) -> bool:
        """True if the memory that the model takes in a step follows from these sizes."""
        return self.keys is not None and self.has_heads

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
    parameters = [*lm.module.parameters()]
    learned = lm.trainable()
    head = lm.module.get_output_embeddings()
    is_tied = getattr(head, "weight", None) is lm.module.get_input_embeddings().weight
    is_packed = any(not parameter.is_floating_point() for parameter in parameters)
    keys, unknown = None, lm.unknown
    try:
        keys = keys_of(lm)
    except NotOutlinedError as error:
        unknown = unknown or str(error)
    has_heads = number_in(lm, "num_attention_heads") > 0
    return ModelOutline(
        device=models.device_of(profile),
        weights=sum(parameter.numel() for parameter in parameters),
        itemsize=next(iter(parameters)).dtype.itemsize,
        bytes=sum(tensor.nbytes for tensor in lm.tensors().values()),
        largest=max(parameter.nbytes for parameter in parameters),
        learned=sum(parameter.nbytes for parameter in learned.values()),
        adapter=0 if lm.adapter is None else sum(parameter.nbytes for parameter in learned.values()),
        head=0 if is_tied else sum(parameter.nbytes for parameter in head.parameters()),
        vocabulary=lm.vocab_rows,
        is_in_files=lm.is_in_files and profile == "cpu" and not is_packed,
        activations=activations_of(lm),
        keys=keys,
        context_length=lm.context_length,
        has_heads=has_heads,
        frozen=counted(lm),
        unknown=unknown or ("" if has_heads else "its configuration names no attention heads"),
    )


def longest_sequence(lm: CausalLM | ModelOutline, prompt: int, response: int) -> int:
    """Return the number of tokens of a prompt and its response together, limited by the model's context
    length."""
    return prompt + response if lm.context_length is None else min(prompt + response, lm.context_length)
