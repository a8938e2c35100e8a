"""The engine's protocol: token ids in, token ids out, from several sets of weights at once."""

import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from oat.types import Completion, Receipt, Request, Work

if TYPE_CHECKING:
    import torch


def checksum(tensor: "torch.Tensor") -> int:
    """CRC-32 of a tensor's bytes in row-major order; one flipped bit changes it."""
    import torch

    return zlib.crc32(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)


class Engine(Protocol):
    """Generates and scores with the weights of named slots: `sampler`, `policy` (for evaluation),
    `reference`."""

    def generate(self, requests: Sequence[Request], slot: str) -> Iterator[Completion]:
        """Completions as they finish, in any order, each with the index of its request."""

    def logps(self, sequences: Sequence[np.ndarray], slot: str) -> list[np.ndarray]:
        """Raw log-probabilities of every token but the first of each sequence: (T - 1,) float32 each."""

    def load(self, slot: str, version: int, tensors: "Mapping[str, torch.Tensor]") -> Receipt:
        """Give the slot these weights, drop every cached key and value of it, and read back the weights that
        it holds now."""

    def version(self, slot: str) -> int:
        """The version of the slot's weights."""

    def work(self) -> Work:
        """What `generate` has computed since this was first called."""
