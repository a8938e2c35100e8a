"""Checks of the section `compute`: whether its GPUs and its processes suit each other."""

from collections.abc import Iterator

from oat.resolve.placement import placement_of
from oat.resolve.resolved import Resolved
from oat.types.part import Check


def gpus(resolved: Resolved) -> Iterator[Check]:
    compute = resolved.config.compute
    given, is_apart = compute.gpus is not None, compute.runtime != "local"
    yield Check(
        "compute.gpus",
        given and not is_apart,
        "a run in one process takes the first visible GPU; remove it, or set compute.runtime to processes",
    )
    yield Check(
        "compute.gpus",
        given and compute.profile == "cpu",
        "nothing computes on a GPU with compute.profile: cpu; set that to gpu, or remove compute.gpus",
    )
    yield Check(
        "compute.gpus",
        not given and is_apart and compute.profile == "gpu",
        "set it to the number of GPUs that the run uses, or compute.profile to cpu",
    )
    yield Check(
        "compute.collocate",
        compute.collocate and not given,
        "there are no GPUs that actors and learner could share; set compute.gpus, or remove it",
    )


def actors(resolved: Resolved) -> Iterator[Check]:
    """Check that there is an actor for each of the actors' GPUs, and none without one."""
    compute = resolved.config.compute
    placed = placement_of(compute)
    has = len(placed.actors) if placed else compute.actors
    yield Check(
        "compute.actors",
        compute.actors != has,
        f"compute.gpus {compute.gpus} has {has} for actors, one each; remove compute.actors, or set it to "
        f"{has}",
    )
    yield Check(
        "compute.standby",
        placed is not None and compute.standby,
        "every GPU has its actor, and none is left for a process that waits; remove it",
    )
