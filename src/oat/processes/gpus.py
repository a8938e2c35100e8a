"""GPUs of a Ray cluster that a run reserves: one for each actor, and one for the run's own process.

Ray gives GPUs to processes that it starts. The run's own process is none of them. So a process that does
nothing holds the GPU of the learner, and says which one Ray gave it. All GPUs are
one placement group, because only so an actor and the learner surely share a GPU, if they shall.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from threading import Lock
from types import ModuleType
from typing import Any

from oat.errors import ActorError, ConfigError

VISIBLE = "CUDA_VISIBLE_DEVICES"
NO_GPU = "every GPU of compute.gpus is in use, and no further process can be started"
RESERVED_S = 30.0
"""Longest time in seconds until a cluster has reserved GPUs that were free."""


class _Holder:
    """Holds a GPU for the run's own process."""

    def visible(self) -> str:
        return os.environ.get(VISIBLE, "")


class Places:
    """Places on reserved GPUs for processes of one kind. Each takes one.

    Args:
        strategy: function that returns Ray's name of a bundle of the reservation, by its number.
        shares: the part of its GPU that a process gets at a place, by the number of the bundle.
    """

    def __init__(self, strategy: Callable[[int], Any], shares: Mapping[int, float]):
        self._strategy, self._shares = strategy, shares
        self._lock, self._free = Lock(), list(shares)

    def take(self) -> int:
        """Take a place, and return its number.

        Raises:
            ActorError: every place is taken.
        """
        with self._lock:
            if not self._free:
                raise ActorError(NO_GPU)
            return self._free.pop(0)

    def give_back(self, place: int) -> None:
        """Free the place of a process that has ended."""
        with self._lock:
            self._free.append(place)

    def options(self, place: int) -> dict[str, Any]:
        """Return the options with which Ray starts a process at a place."""
        return {"num_gpus": self._shares[place], "scheduling_strategy": self._strategy(place)}


class ReservedGpus:
    """GPUs that a run has reserved. They are free again when they are closed, or when the run leaves the
    cluster.

    Args:
        ray: the module.
        actors: the GPU of each actor, by number.
        learner: the GPU of the learner, which is on the machine of the run's own process.
        cpus: logical CPUs that each actor takes.
        learner_cpus: logical CPUs that the learner takes; 0 if it is in the run's own process.

    Attributes:
        actors: the places of the actors.
        learner: the place of the learner.

    Raises:
        ConfigError: the cluster cannot reserve them together.
    """

    def __init__(
        self, ray: ModuleType, actors: Sequence[int], learner: int, cpus: float, learner_cpus: float
    ):
        self._ray = ray
        numbers = [learner, *(gpu for gpu in actors if gpu != learner)]
        bundles: list[dict[str, float]] = [
            {"GPU": 1.0, "CPU": cpus * (gpu in actors) + learner_cpus * (gpu == learner)} for gpu in numbers
        ]
        bundles[0][f"node:{_address(ray)}"] = 0.001
        self._group = ray.util.placement_group(bundles, strategy="PACK")
        if not self._group.wait(RESERVED_S):
            raise ConfigError(
                "the cluster cannot reserve the GPUs: one must be free on this machine, and each GPU of an "
                f"actor needs {cpus:g} free logical CPUs beside it, and that of the learner "
                f"{learner_cpus:g}; start the run on a machine with a free GPU, or lower compute.gpus, "
                "compute.actor_cpus or compute.learner_cpus"
            )
        shares = dict(zip(map(numbers.index, actors), shares_of(actors, learner), strict=True))
        strategy = partial(ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy, self._group)
        self.actors, self.learner = Places(strategy, shares), Places(strategy, {0: shares.get(0, 1.0)})

    def hold(self) -> str:
        """Hold the GPU of the learner for the run's own process, and return Ray's name of it.

        Raises:
            ActorError: the process that holds it has not started in time.
        """
        options = self.learner.options(self.learner.take())
        self._holder = self._ray.remote(num_cpus=0)(_Holder).options(**options).remote()
        try:
            visible: str = self._ray.get(self._holder.visible.remote(), timeout=RESERVED_S)
        except self._ray.exceptions.RayError as error:
            raise ActorError(f"the cluster gave this run's own process no GPU ({error})") from None
        return visible

    def close(self) -> None:
        """Give all GPUs back. Processes that use them are ended."""
        self._ray.util.remove_placement_group(self._group)


def shares_of(actors: Sequence[int], learner: int) -> list[float]:
    """Return the part of its GPU that each actor gets: a half of the learner's, and all of any other.

    Args:
        actors: the GPU of each actor, by number.
        learner: the GPU of the learner.
    """
    return [0.5 if gpu == learner else 1.0 for gpu in actors]


def seen_gpus() -> list[str]:
    """Return the GPUs that this process sees, as CUDA_VISIBLE_DEVICES names them."""
    import torch  # here, because a process that calls a small function does not need it

    named = os.environ.get(VISIBLE)
    count = torch.cuda.device_count()
    return [str(each) for each in range(count)] if named is None else named.split(",")[:count]


def own_index(given: str) -> int:
    """Return the index of a GPU among those that this process sees (its CUDA_VISIBLE_DEVICES).

    Args:
        given: the GPU as Ray names it, a number or an identifier.

    Raises:
        ConfigError: this process does not see the GPU.
    """
    visible = os.environ.get(VISIBLE)
    if visible is None and given.isdecimal():
        return int(given)
    seen = [name.strip() for name in (visible or "").split(",")]
    if not given or given not in seen:
        raise ConfigError(
            f"Ray gave this run's own process the GPU {given!r}, which it does not see ({VISIBLE} is "
            f"{visible or 'not set'}); start the cluster and the run with the same {VISIBLE}"
        )
    return seen.index(given)


def _address(ray: ModuleType) -> str:
    """Return the address by which the cluster knows the machine of this process."""
    own = ray.get_runtime_context().get_node_id()
    return next(str(node["NodeManagerAddress"]) for node in ray.nodes() if node["NodeID"] == own)
