"""Two engines behind one: the slot `reference` has an engine of its own (`engine.own_reference`), with a KV
cache of its own. All other slots share the first engine. No weights are swapped."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from torch import Tensor

from oat.engines.torch import TorchEngine
from oat.types import Completion, Request, Work

APART = "reference"
"""The slot that has an engine of its own."""


class SplitEngine:
    """An engine that sends each call to one of two engines, by the slot.

    Args:
        main: serves every slot but `reference`.
        reference: serves the slot `reference`.
    """

    def __init__(self, main: TorchEngine, reference: TorchEngine):
        self.main = main
        self.reference = reference

    @property
    def threads(self) -> int | None:
        """Number of threads of the computation, the same for both engines."""
        return self.main.threads

    @threads.setter
    def threads(self, threads: int | None) -> None:
        self.main.threads = self.reference.threads = threads

    def generate(self, requests: Sequence[Request], slot: str) -> Iterator[Completion]:
        return self._of(slot).generate(requests, slot)

    def stream(self, request: Request, slot: str) -> Iterator[Completion]:
        return self._of(slot).stream(request, slot)

    def release(self, slot: str, keys: Sequence[int]) -> None:
        self._of(slot).release(slot, keys)

    def logps(self, sequences: Sequence[np.ndarray], slot: str) -> list[np.ndarray]:
        return self._of(slot).logps(sequences, slot)

    def load(self, slot: str, version: int, tensors: Mapping[str, Tensor]) -> None:
        self._of(slot).load(slot, version, tensors)

    def tensors(self, slot: str) -> dict[str, Tensor]:
        return self._of(slot).tensors(slot)

    def version(self, slot: str) -> int:
        return self._of(slot).version(slot)

    def work(self) -> Work:
        return self.main.work() + self.reference.work()

    def choose_threads(self, rows: int) -> None:
        """Measure the number of threads with the first engine, for both."""
        self.main.choose_threads(rows)
        self.threads = self.main.threads

    def _of(self, slot: str) -> TorchEngine:
        return self.reference if slot == APART else self.main
