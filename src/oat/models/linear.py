"""Linear layers of a model that compute with our products (`functional/products.py`); nothing else of them
changes.

A layer changes its class when the model is loaded. What PEFT adds stays torch's.
"""

import torch
from torch import Tensor
from transformers.pytorch_utils import Conv1D

from oat.functional.products import linear


def use_fast_matmul(model: torch.nn.Module) -> None:
    """Let every linear layer of a model that is plainly one compute with `linear`."""
    for layer in model.modules():
        if kind := {torch.nn.Linear: Linear, Conv1D: Transposed}.get(type(layer)):
            layer.__class__ = kind


class Linear(torch.nn.Linear):
    """torch's."""

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)


class Transposed(Conv1D):  # type: ignore[misc]
    """That of GPT-2 and its kin, whose weight is (I, O)."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight.T, self.bias)
