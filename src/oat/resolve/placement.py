"""Who uses which GPU of a cluster (`compute.gpus`)."""

from collections.abc import Iterator
from dataclasses import dataclass

from oat.config.compute_settings import ComputeConfig
from oat.errors import plural


@dataclass(frozen=True)
class Placement:
    """The GPUs of a run, with numbers from 0. Ray decides which GPU of which machine has a number.

    Attributes:
        actors: the GPU of each actor.
        learner: the GPU of the run's own process, where the learner is.
        idle: the GPUs that nobody uses, since there is one learner.
    """

    actors: tuple[int, ...]
    learner: int
    idle: tuple[int, ...]

    @property
    def is_shared(self) -> bool:
        """True if an actor and the learner use the same GPU."""
        return self.learner in self.actors


def placement(gpus: int, *, collocate: bool) -> Placement:
    """Say who uses which GPU.

    With `collocate`, actors and learner may use all GPUs. Otherwise actors have the first half and the
    learner the second; of an odd number, both may use the one in the middle. Each GPU of the actors has one
    actor. The learner is one process. It takes the first of its GPUs that has no actor, or its first if all
    have one.

    Args:
        gpus: number of GPUs, at least 1.
        collocate: `compute.collocate`.
    """
    half = gpus // 2
    actors = range(gpus) if collocate else range(gpus - half)
    learners = range(gpus) if collocate else range(half, gpus)
    learner = next((gpu for gpu in learners if gpu not in actors), learners[0])
    return Placement(tuple(actors), learner, tuple({*range(gpus)} - {*actors, learner}))


def placement_of(compute: ComputeConfig) -> Placement | None:
    """Return who uses which GPU of the cluster; None if the run uses none of a cluster."""
    return placement(compute.gpus, collocate=compute.collocate) if compute.gpus else None


def placement_notes(compute: ComputeConfig) -> Iterator[str]:
    """Yield sentences for people about GPUs that are shared, or that nobody uses."""
    placed = placement_of(compute)
    if placed is None:
        return
    if placed.is_shared and not compute.collocate:
        yield (
            f"compute.gpus is {compute.gpus}: the learner and actor {placed.actors.index(placed.learner)} "
            "share a GPU, and the memory of both must fit"
        )
    if placed.idle:
        yield (
            f"compute.gpus is {compute.gpus}, of which {plural(len(placed.idle), 'GPU')} "
            f"{'stays' if len(placed.idle) == 1 else 'stay'} idle and are left to others: the learner is "
            "one process; with compute.collocate: true, every GPU has an actor"
        )
