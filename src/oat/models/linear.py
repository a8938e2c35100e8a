"""Linear layers of torch and transformers that compute with our matrix products (`functional/products.py`).

Loading a model changes the class of its linear layers to `Linear` or `Transposed`. Linear layers that PEFT
adds later stay torch's.
"""

import torch
from torch import Tensor
from transformers.pytorch_utils import Conv1D

from oat.functional.products import linear


def use_fast_matmul(model: torch.nn.Module) -> None:
    """Make the linear layers of a model compute with our matrix product `linear`. A layer whose class is a
    subclass of a linear layer stays as it is."""
    for layer in model.modules():
        if kind := {torch.nn.Linear: Linear, Conv1D: Transposed}.get(type(layer)):
            layer.__class__ = kind


class Linear(torch.nn.Linear):
    """torch's linear layer. Its weight is (outputs, inputs)."""

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)


class Transposed(Conv1D):  # type: ignore[misc]
    """The linear layer of GPT-2 and models like it. Its weight is (inputs, outputs)."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight.T, self.bias)
