"""The ring buffer of an ensemble: the features of the newest labelled pairs."""

from collections.abc import Mapping
from typing import Any

import torch

_LEAST = 256
"""Number of pairs that the memory first has room for. When it is full, it doubles, up to the capacity."""


class PairBuffer:
    """Holds the newest pairs, at most `capacity`. A new pair replaces the oldest one.

    Attributes:
        seen: number of pairs added so far.
    """

    def __init__(self, capacity: int):
        self.capacity = capacity
        self.seen = 0
        self._memory = torch.zeros(0)

    @property
    def size(self) -> int:
        """Number of pairs in the buffer."""
        return min(self.seen, self.capacity)

    @property
    def pairs(self) -> torch.Tensor:
        """The pairs, (size, 2, D): the features of the chosen and of the rejected response. Pair number i is
        at index i modulo the capacity. The tensor is the buffer's memory."""
        return self._memory[: self.size]

    def add(self, pairs_P2D: torch.Tensor) -> None:
        """Add P pairs."""
        self._reserve(min(self.seen + len(pairs_P2D), self.capacity), pairs_P2D)
        newest = pairs_P2D[-self.capacity :]
        first = self.seen + len(pairs_P2D) - len(newest)
        self._memory[torch.arange(first, first + len(newest)) % self.capacity] = newest
        self.seen += len(pairs_P2D)

    def _reserve(self, size: int, like: torch.Tensor) -> None:
        if len(self._memory) >= size:
            return
        room = min(max(size, 2 * len(self._memory), _LEAST), self.capacity)
        memory = like.new_zeros((room, *like.shape[1:]))
        memory[: self.size] = self.pairs if self.size else 0
        self._memory = memory

    @property
    def state(self) -> dict[str, Any]:
        return {"pairs": self.pairs, "seen": self.seen}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._memory, self.seen = state["pairs"].clone(), state["seen"]
