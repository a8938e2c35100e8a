"""How many values a forward pass of a language model keeps for each token, from the shapes of its modules.

A block is a module with linear layers: attention, or a feed-forward network. Its last linear layer reads what
the block has computed, and the others read the same input. For the backward pass autograd keeps:

* of a norm: its input and, if its weight learns, its normed input;
* of a linear layer that learns: its input, which layers with the same input share;
* of a block: the outputs of all linear layers but the last; and once more as many values as the last one
  reads (the output of attention, or of the activation before the gate), but not of a network without a gate.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers.pytorch_utils import Conv1D

from oat.models.causal_lm import CausalLM, number_in

_WIDE = 4
"""Bytes of a value in float32, in which norms compute."""
_HALF = 2


@dataclass(frozen=True)
class Activations:
    """Numbers of values for each token of a pass, in all layers together.

    Attributes:
        layers: number of layers.
        width: number of values of a token that go from layer to layer.
        norms: kept of norms.
        inputs: kept inputs of linear layers.
        casts: the same under autocast, which casts the input for each layer anew.
        products: kept of blocks.
        largest: the most that a block has at once without gradients.
        is_complete: False if the model has parts that this module does not know: experts, attention that its
            own code computes, or an activation of several operations.
    """

    layers: int
    width: int
    norms: int
    inputs: int
    casts: int
    products: int
    largest: int
    is_complete: bool

    def kept_bytes(self, itemsize: int, *, autocast: bool = False, checkpointing: bool = False) -> int:
        """Return the bytes that a token keeps for the backward pass.

        Args:
            itemsize: bytes of a value of the model.
            autocast: products are computed in bfloat16.
            checkpointing: each layer keeps only its input, and one layer is computed again at a time.
        """
        if autocast:
            kept = _WIDE * self.norms + _HALF * (self.casts + self.products)
        else:
            kept = _WIDE * self.norms + itemsize * (self.inputs + self.products)
        if checkpointing:
            return self.layers * self.width * itemsize + kept // max(self.layers, 1)
        return kept


def activations_of(lm: CausalLM) -> Activations:
    """Return the numbers of a model. A model without weights (`oat.models.outline`) suffices."""
    head = lm.module.get_output_embeddings()
    learned = {id(parameter) for parameter in lm.trainable().values()}
    width = head.in_features
    norms, inputs, casts, products, largest = width, 0, 0, 0, width
    for block in _blocks(lm.module, head):
        linears = [
            (layer, size) for layer in block.children() if layer is not head and (size := _size(layer))
        ]
        for number, norm in enumerate(_norms(block)):
            # a norm of queries or of keys is applied to each head
            of = linears[number][1][1] if number < len(linears) else 0
            times = max(1, of // norm.weight.numel()) if len(linears) > 1 else 1
            keeps_normed = not isinstance(norm, torch.nn.LayerNorm) and id(norm.weight) in learned
            norms += times * norm.weight.numel() * (1 + keeps_normed)
        if not linears:
            continue
        *first, (last, (last_in, _)) = linears
        outputs = sum(size[1] for _, size in first)
        learning = [size[0] for layer, size in first if _learns(layer, learned)]
        of_last = last_in if _learns(last, learned) else 0
        inputs += max(learning, default=0) + of_last
        casts += sum(learning) + of_last
        products += outputs + (0 if outputs == last_in else last_in)
        largest = max(largest, 2 * width + outputs + 2 * last_in)
    experts = [tuple(parameter.shape) for parameter in lm.module.parameters() if parameter.ndim > 2]
    chosen = number_in(lm, "num_experts_per_tok", "top_k") or 1
    products += sum(chosen * (shape[-1] + shape[-2]) for shape in experts)
    # this activation computes in several operations, of which each keeps its input
    has_parts = any(type(part).__name__ == "NewGELUActivation" for part in lm.module.modules())
    is_complete = lm.takes_layouts and not experts and not has_parts
    return Activations(lm.num_layers, width, norms, inputs, casts, products, largest, is_complete)


def _blocks(module: torch.nn.Module, head: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yield a module and those in it, without linear layers and what adapters have in them."""
    yield module
    for child in module.children():
        if child is not head and _size(child) is None:
            yield from _blocks(child, head)


def _norms(block: torch.nn.Module) -> list[Any]:
    return [
        child
        for child in block.children()
        if type(child).__name__.endswith("Norm") and isinstance(getattr(child, "weight", None), torch.Tensor)
    ]


def _size(layer: Any) -> tuple[int, int] | None:
    """Return the numbers of inputs and outputs of a linear layer, which may have an adapter; None if the
    module is no linear layer."""
    layer = getattr(layer, "base_layer", layer)
    if isinstance(layer, Conv1D):
        return layer.weight.shape[0], layer.weight.shape[1]
    if isinstance(layer, torch.nn.Linear):
        return layer.in_features, layer.out_features
    return None


def _learns(layer: torch.nn.Module, learned: set[int]) -> bool:
    return any(id(parameter) in learned for parameter in layer.parameters())
