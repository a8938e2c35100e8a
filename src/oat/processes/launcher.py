"""What starts processes that answer calls, and how a run calls them."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

FEWER_CPUS = (
    "lower their number, or the CPUs of each (compute.actor_cpus, compute.learner_cpus, compute.oracle_cpus; "
    "a fraction shares one)"
)
"""What to do about too few logical CPUs."""

Pending = Callable[[], bytes | memoryview]
"""Waits for the reply to a call, and returns it."""


class Remote(Protocol):
    """A process of its own, which answers one call after another.

    Attributes:
        name: for messages.
    """

    name: str

    def call(self, what: str, data: Any) -> Pending:
        """Send a call, and return at once. The wait for its reply raises `LostError` if the process has
        ended, or if it has not replied in time.

        Args:
            what: the name of the call, for messages.
            data: the bytes of the call, or a handle of them (`Launcher.shared`).
        """

    def close(self) -> None:
        """End the process."""


class Launcher(Protocol):
    """Starts processes."""

    def start(self, name: str) -> Remote:
        """Start a process, and return at once."""

    @property
    def room(self) -> int:
        """How many further processes can start now."""

    def shared(self, parts: Sequence[bytes | memoryview]) -> Any:
        """Return a handle of a call that is sent to several processes. The parts of the call may change when
        this function has returned."""


class Gpus(Protocol):
    """GPUs that a run has reserved.

    Attributes:
        actors, learner: the places of the actors, and of the learner (`Place.launcher`).
    """

    @property
    def actors(self) -> Any: ...

    @property
    def learner(self) -> Any: ...

    def hold(self) -> int:
        """Hold the GPU of the learner for this process, and return its index among those that this process
        sees."""

    def close(self) -> None:
        """Give all GPUs back."""


class Place(Protocol):
    """Where a run starts processes."""

    def refuse_too_many(self, cpus: Sequence[float], whose: str) -> None:
        """Refuse more processes than there are free logical CPUs for.

        Args:
            cpus: logical CPUs of each process.
            whose: their parts, in words.

        Raises:
            ConfigError: there are too few.
        """

    def reserve(
        self, gpus: int, actors: Sequence[int], learner: int, cpus: float, learner_cpus: float
    ) -> Gpus:
        """Reserve the GPUs of a run.

        Args:
            gpus: number of GPUs that the run asks for, of which some may stay idle.
            actors: the GPU of each actor, by number.
            learner: the GPU of the learner.
            cpus, learner_cpus: logical CPUs that each actor and the learner take.

        Raises:
            ConfigError: there are too few.
        """

    def launcher(self, cpus: float, places: Any = None) -> Launcher:
        """Return what starts processes of one kind.

        Args:
            cpus: logical CPUs that each of them takes.
            places: on GPUs, one for each of them (`Gpus`); None: they get no GPU.
        """

    def close(self) -> None:
        """End all processes."""
