"""Helpers for tests of the transfer of weights."""

from typing import Any

import torch

from oat.engines.base import checksum
from oat.engines.torch import TorchEngine


class Source:
    """The part of a learner that `Weights` uses."""

    def __init__(self, lm: Any):
        self.lm = lm

    def tensors(self, model: str) -> dict[str, torch.Tensor]:
        return {name: tensor.detach() for name, tensor in self.lm.tensors().items()}

    def version(self, model: str) -> int:
        return 0

    def trainable(self, model: str) -> list[str]:
        return list(self.lm.trainable())

    def move(self) -> None:
        with torch.no_grad():
            for tensor in self.lm.tensors().values():
                tensor += 0.25


def held(engine: TorchEngine, slot: str) -> dict[str, int]:
    return {name: checksum(tensor) for name, tensor in engine._slots[slot].tensors().items()}


def turn_bit(tensor: torch.Tensor, place: int, bit: int) -> None:
    view = tensor.detach().view(-1).view(torch.uint8)
    view[place] ^= 1 << bit
