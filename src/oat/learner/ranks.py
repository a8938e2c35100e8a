"""The processes that learn together, each with a shard of every model: the ranks. A run has one, which has
all of every model.

What is measured, timed or drawn on one rank would part it from the others, which then wait for it without
end. So rank 0 decides it, and the others follow.
"""

from collections.abc import Callable
from typing import Protocol, TypeVar

T = TypeVar("T")


class Ranks(Protocol):
    """The ranks, as one of them sees them. All of them call the same methods in the same order."""

    def agreed(self, decide: Callable[[], T]) -> T:
        """Return on every rank what `decide` returns on rank 0, where alone it is called. It returns plain
        data."""

    def joined(self, value: T) -> list[T]:
        """Return the plain data of each rank, in the order of the ranks."""


class Alone:
    """The one rank of a run whose models are whole."""

    def agreed(self, decide: Callable[[], T]) -> T:
        return decide()

    def joined(self, value: T) -> list[T]:
        return [value]


ALONE = Alone()
