"""Helpers for tests of the transfer of weights."""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch

from oat.engines.torch import TorchEngine
from oat.protocols import Learner
from oat.runtime.transfer import buckets, checksums
from oat.types import Bucket


class Source:
    """The part of a learner that `Weights` uses."""

    def __init__(self, lm: Any):
        self.lm = lm

    def sizes(self, model: str) -> list[tuple[str, int]]:
        return [(name, tensor.nbytes) for name, tensor in self.lm.tensors().items()]

    def named_tensors(
        self, model: str, names: Collection[str] | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self.lm.tensors().items():
            if names is None or name in names:
                yield name, tensor.detach()

    def version(self, model: str) -> int:
        return 0

    def trainable(self, model: str) -> list[str]:
        return list(self.lm.trainable())

    @torch.no_grad()
    def load_weights(self, model: str, tensors: Mapping[str, torch.Tensor]) -> None:
        for name, parameter in self.lm.trainable().items():
            parameter.copy_(tensors[name])

    def move(self) -> None:
        with torch.no_grad():
            for tensor in self.lm.tensors().values():
                tensor += 0.25


def weights_of(learner: Learner | Source, model: str = "policy") -> dict[str, torch.Tensor]:
    """Return the weights of a learner's model, by name."""
    return dict(learner.named_tensors(model))


def in_buckets(slot: str, version: int, tensors: Mapping[str, torch.Tensor], most_bytes: int) -> list[Bucket]:
    """Return tensors in buckets."""
    sizes = [(name, tensor.nbytes) for name, tensor in tensors.items()]

    def take(names: Collection[str]) -> list[tuple[str, torch.Tensor]]:
        return [(name, tensors[name]) for name in names]

    return [*buckets(slot, version, sizes, take, most_bytes)]


def held(engine: TorchEngine, slot: str) -> dict[str, int]:
    return checksums(engine.tensors(slot))


def turn_bit(tensor: torch.Tensor, place: int, bit: int) -> None:
    view = tensor.detach().view(-1).view(torch.uint8)
    view[place] ^= 1 << bit
