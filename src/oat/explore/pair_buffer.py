"""The ring buffer of an ensemble: the features of the newest labelled pairs. It also keeps the ids of their
responses, if their features can be computed again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from oat.lazy import lazily

if TYPE_CHECKING:
    import torch
else:
    torch = lazily("torch")


_LEAST = 256
"""Number of pairs that the memory first has room for. When it is full, it doubles, up to the capacity. So the
number of pairs alone decides how large it is, also after a restart."""


class Sampled(NamedTuple):
    """A response whose features the policy gave.

    Attributes:
        prompt, response: int32 ids.
    """

    prompt: np.ndarray
    response: np.ndarray


class PairBuffer:
    """Holds the newest pairs, at most `capacity`. A new pair replaces the oldest one.

    Attributes:
        seen: number of pairs added so far.
        responses: the chosen and the rejected response of pairs, by their index in `pairs`; of pairs that
            were added with them.
        versions: the version of the policy's weights that gave these pairs' features, by the same index.
    """

    def __init__(self, capacity: int):
        self.capacity = capacity
        self.seen = 0
        self._memory = torch.zeros(0)
        self.responses: dict[int, tuple[Sampled, Sampled]] = {}
        self.versions: dict[int, int] = {}

    @property
    def size(self) -> int:
        """Number of pairs in the buffer."""
        return min(self.seen, self.capacity)

    @property
    def pairs(self) -> torch.Tensor:
        """The pairs, (size, 2, D): the features of the chosen and of the rejected response. Pair number i is
        at index i modulo the capacity. The tensor is the buffer's memory."""
        return self._memory[: self.size]

    def add(
        self,
        pairs_P2D: torch.Tensor,
        responses: Sequence[tuple[Sampled, Sampled]] = (),
        versions: Sequence[int] = (),
    ) -> None:
        """Add P pairs.

        Args:
            responses, versions: of all pairs, or of none; see the class.
        """
        if not len(pairs_P2D):
            return
        self._reserve(min(self.seen + len(pairs_P2D), self.capacity), pairs_P2D)
        newest = pairs_P2D[-self.capacity :]
        first = self.seen + len(pairs_P2D) - len(newest)
        places = [number % self.capacity for number in range(first, first + len(newest))]
        self._memory[torch.tensor(places)] = newest
        self.seen += len(pairs_P2D)
        for place in places:
            self.responses.pop(place, None)
            self.versions.pop(place, None)
        if responses:
            self.responses |= zip(places, responses[-len(places) :], strict=True)
            self.versions |= zip(places, versions[-len(places) :], strict=True)

    def refresh(self, places: Sequence[int], pairs_P2D: torch.Tensor, version: int) -> None:
        """Replace the features of pairs.

        Args:
            places: their indices in `pairs`.
            version: of the weights that gave the new features.
        """
        self._memory[torch.tensor(places)] = pairs_P2D.to(self._memory.dtype)
        self.versions |= dict.fromkeys(places, version)

    def _reserve(self, size: int, like: torch.Tensor) -> None:
        if len(self._memory) >= size:
            return
        room = _LEAST
        while room < size:
            room *= 2
        room = min(room, self.capacity)
        memory = like.new_zeros((room, *like.shape[1:]))
        memory[: self.size] = self.pairs if self.size else 0
        self._memory = memory

    @property
    def state(self) -> dict[str, Any]:
        """The pairs, and the number of pairs added so far. If pairs were added with responses: also, for each
        of these pairs, its index in `pairs` and its version; and the ids of both prompts and responses, one
        after another, with their lengths."""
        state = {"pairs": self.pairs, "seen": self.seen}
        if not self.responses:
            return state
        flat = [ids for pair in self.responses.values() for one in pair for ids in one]
        return state | {
            "places": torch.tensor([*self.responses]),
            "versions": torch.tensor([*self.versions.values()]),
            "lengths": torch.tensor([len(ids) for ids in flat]),
            "ids": torch.from_numpy(np.concatenate(flat)),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned. The capacity must be that of the buffer which returned it."""
        pairs = state["pairs"]
        self._memory, self.seen = torch.zeros(0), 0
        self._reserve(len(pairs), pairs)
        self._memory[: len(pairs)] = pairs
        self.seen = state["seen"]
        self.responses, self.versions = {}, {}
        if "ids" not in state:
            return
        bounds = np.cumsum(state["lengths"].numpy())[:-1]
        parts = [ids.copy() for ids in np.split(state["ids"].numpy(), bounds)]
        for number, place in enumerate(state["places"].tolist()):
            chosen_prompt, chosen, rejected_prompt, rejected = parts[4 * number : 4 * number + 4]
            self.responses[place] = Sampled(chosen_prompt, chosen), Sampled(rejected_prompt, rejected)
        self.versions = dict(zip(self.responses, state["versions"].tolist(), strict=True))
