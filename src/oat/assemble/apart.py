"""Processes beside a run's own that work for it: of this machine, or of a Ray cluster (`compute.runtime`)."""

import importlib.util
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from oat.assemble.actor_side import SLOTS, ActorPlan, ActorSide
from oat.assemble.engine import given_threads
from oat.assemble.learner_side import LearnerPlan
from oat.assemble.models import shared_slots
from oat.assemble.oracle_side import BOX, OraclePlan, client_oracles, plan_of
from oat.assemble.run_directory import RunDirectory
from oat.assemble.run_inputs import RunInputs
from oat.assemble.same_inputs import inputs_sent
from oat.config.compute_settings import ComputeConfig
from oat.config.load import dump
from oat.config.part_names import REGISTRIES
from oat.config.settings import Component, Config, GoldConfig, OracleConfig
from oat.config.stored import stored_config
from oat.errors import ConfigError, plural
from oat.files import start
from oat.oracles.base import Oracle
from oat.plugins.loading import own_files, travelling
from oat.processes.launcher import FEWER_CPUS, Place
from oat.processes.local import Machine
from oat.processes.ray_cluster import NO_RAY, Cluster
from oat.resolve.placement import placement_of
from oat.resolve.resolved import Resolved
from oat.runtime.clients import Clients
from oat.runtime.pool import ActorPool
from oat.runtime.wanted import Wanted
from oat.runtime.worker import SERVE, WORKER
from oat.runtime.worker_group import RestartState, WorkerGroup
from oat.types import ENSEMBLE

LOGS = "logs"
"""The folder of a run directory in which each process has a file of what it prints."""
_ACTOR = "oat.assemble.actor_side:ActorWorker"
_LEARNER = "oat.assemble.learner_side:LearnerWorker"
_IMPORTED = (
    "oat.runtime.worker",
    "oat.assemble.actor_side",
    "oat.assemble.learner_side",
    "oat.assemble.oracle_side",
)
"""What processes of this machine have imported when they start."""


@dataclass(frozen=True, eq=False)
class Processes:
    """The processes of a run.

    Attributes:
        actors: those that sample.
        learner: the one that learns, alone in its crew; None: the run's own process learns.
        clients: those that ask the oracles; None: the run's own process asks them.
        wanted: returns how many actors there shall be; None: as many as there are.
        closing: functions that `close` calls.
    """

    place: Place
    actors: WorkerGroup
    learner: WorkerGroup | None = None
    clients: Clients | None = None
    wanted: Callable[[], int] | None = None
    closing: list[Callable[[], None]] = field(default_factory=list)

    @property
    def crews(self) -> list[WorkerGroup]:
        """All crews."""
        asking = None if self.clients is None else self.clients.crew
        return [crew for crew in (self.actors, self.learner, asking) if crew is not None]

    def side(self, resolved: Resolved) -> ActorSide:
        """Return the sides of all actors as one, when they are made.

        Raises:
            OatError: a side cannot be made.
        """
        self.actors.ready()
        pool = ActorPool(self.actors, shared_slots(resolved.config), self.wanted)
        self.closing.append(pool.close)
        inboxes = {slot: pool.inbox(slot) for slot in {*SLOTS, *({ENSEMBLE} & resolved.explorer.needs)}}
        return ActorSide(pool, given_threads(resolved), inboxes, pool.versions)

    def close(self) -> None:
        """End them all."""
        if self.clients is not None:
            self.clients.close()
        self.actors.close()
        if self.learner is not None:
            self.learner.close()
        for close in self.closing:
            close()
        self.place.close()


def start_processes(
    resolved: Resolved, run_inputs: RunInputs, home: RunDirectory, sampling: ActorPlan, learning: LearnerPlan
) -> Processes | None:
    """Start the processes of a run, and let them begin to make their sides. Return None if the run has no
    processes beside its own.

    When this function returns, every process was found fit for the run, and the models are still to be
    loaded, here and there.

    Args:
        sampling, learning: the plans of the sides. Their configuration is replaced by one that travels, and
            their inputs are filled in.

    Raises:
        ConfigError: Ray is not installed; no cluster can be used, or it has too few CPUs or GPUs; a process
            has other versions of packages than this one; a part of the user cannot be found where it is
            needed.
    """
    compute = resolved.config.compute
    if compute.runtime == "local":
        return None
    config, parts = _as_sent(resolved)
    oracles = plan_of(resolved, config, run_inputs) if compute.oracle_clients else None
    logs = (home.directory / LOGS).resolve()
    logs.mkdir(exist_ok=True)
    with resolved.error_context("compute.address" if compute.address else "compute.runtime"):
        place = _place(compute, logs)
    try:
        hired = _hired(resolved, home, place, parts, oracles)
        with resolved.error_context("compute.runtime"):
            for crew in hired.crews:
                crew.ready()
        sent, inputs = dump(_without_oracles(config)), inputs_sent(resolved, run_inputs.inputs)
        hired.actors.make(_ACTOR, replace(sampling, config=sent, inputs=inputs).encoded)
        if hired.learner is not None:
            hired.learner.make(_LEARNER, replace(learning, config=sent, inputs=inputs).encoded)
        if hired.clients is not None and oracles is not None:
            hired.clients.crew.make(BOX, oracles.encoded)
    except BaseException:
        place.close()
        raise
    return hired


def _place(compute: ComputeConfig, logs: Path) -> Place:
    """Return where the processes are started.

    Raises:
        ConfigError: see `Cluster`.
    """
    if compute.runtime == "ray":
        return Cluster(compute.address, logs, compute.deadline_s, WORKER)
    return Machine(SERVE, _IMPORTED, logs, compute.deadline_s, cpus_here())


def _hired(
    resolved: Resolved,
    home: RunDirectory,
    place: Place,
    parts: list[str],
    oracles: OraclePlan | None,
) -> Processes:
    """Reserve GPUs, and start the processes."""
    compute, gpus = resolved.config.compute, None
    is_apart = compute.learner == "actor"
    with resolved.error_context("compute.actors"):
        place.refuse_too_many(*cpus_of(compute))
    if (placed := placement_of(compute)) is not None and compute.gpus is not None:
        with resolved.error_context("compute.gpus"):
            learner_cpus = compute.learner_cpus if is_apart else 0.0
            cpus = compute.actor_cpus, learner_cpus
            gpus = place.reserve(compute.gpus, placed.actors, placed.learner, *cpus)
            if not is_apart:
                torch.cuda.set_device(gpus.hold())
    life = home.life or RestartState(compute.max_restarts)
    restarts, files = life.restarts, life.files
    files.take("the run's own process", own_files(start()))
    sampling = place.launcher(compute.actor_cpus, gpus.actors if gpus else None)
    actors = WorkerGroup(
        sampling, restarts, "actor", compute.actors, compute.standby, parts=parts, files=files
    )
    learner = clients = None
    if is_apart:
        learning = place.launcher(compute.learner_cpus, gpus.learner if gpus else None)
        learner = WorkerGroup(learning, restarts, "learner", 1, parts=parts, files=files)
    if oracles is not None:
        asking = place.launcher(compute.oracle_cpus)
        needed = [*parts, *oracles.parts]
        clients = Clients(
            WorkerGroup(asking, restarts, "oracle client", compute.oracle_clients, parts=needed, files=files)
        )
    is_new = restarts.count == 0
    wanted = Wanted(home.directory, compute.actors, is_new=is_new) if gpus is None else None
    return Processes(place, actors, learner, clients, wanted, [gpus.close] if gpus else [])


def cpus_of(compute: ComputeConfig) -> tuple[list[float], str]:
    """Return how many logical CPUs of the cluster each process of a run takes, and the processes in words."""
    kinds = _kinds(compute)
    named = ", ".join(f"{plural(count, what)} at {cpus:g}" for count, what, cpus in kinds)
    return [cpus for count, _, cpus in kinds for _ in range(count)], named


def cpus_here() -> int:
    """Return the number of logical CPUs of this machine."""
    return os.cpu_count() or 1


def process_notes(config: Config) -> Iterator[str]:
    """Yield a sentence for people about the processes beside the run's own."""
    if config.compute.runtime != "local":
        named = ", ".join(plural(count, what) for count, what, _ in _kinds(config.compute))
        logs = Path(config.run_dir) / LOGS
        yield f"{named} on {cluster_of(config.compute)}; what each of them prints is in {logs}"


def cluster_of(compute: ComputeConfig) -> str:
    """Return where the processes of a run are, in words."""
    if compute.runtime == "processes":
        return "this machine"
    return f"the Ray cluster {compute.address}" if compute.address else "a Ray cluster"


def _kinds(compute: ComputeConfig) -> list[tuple[int, str, float]]:
    """Return, for each kind of process beside the run's own, how many there are, its name, and the logical
    CPUs of each."""
    kinds = [
        (compute.actors, "actor", compute.actor_cpus),
        (compute.standby, "standby", compute.actor_cpus),
        (compute.oracle_clients, "oracle client", compute.oracle_cpus),
        (int(compute.learner == "actor"), "learner", compute.learner_cpus),
    ]
    return [kind for kind in kinds if kind[0]]


def refuse_without_cluster(resolved: Resolved) -> None:
    """Refuse a run with a cluster of its own, if this machine clearly cannot start it. `Cluster` refuses the
    rest.

    Raises:
        ConfigError: Ray is not installed, or the machine has too few logical CPUs.
    """
    compute = resolved.config.compute
    if compute.runtime == "local":
        return
    with resolved.error_context("compute.runtime"):
        if compute.runtime == "ray" and importlib.util.find_spec("ray") is None:
            raise ConfigError(NO_RAY)
    (each, whose), has = cpus_of(compute), cpus_here()
    cpus = math.fsum(each)
    with resolved.error_context("compute.actors"):
        if compute.address is None and cpus > has:
            raise ConfigError(f"{whose} need {cpus:g} logical CPUs, and this machine has {has}; {FEWER_CPUS}")


def oracles_of(processes: Processes, run_inputs: RunInputs) -> dict[str, Oracle]:
    """Return the oracles that clients ask, by address, when the clients have made them.

    Raises:
        OatError: an oracle cannot be made there.
    """
    if processes.clients is None:
        return {}
    processes.clients.begin()
    return client_oracles(processes.clients, run_inputs)


def first_actors(directory: Path) -> int:
    """Return the number of actors with which a run begins.

    Args:
        directory: of a run whose number of actors may change while it works.

    Raises:
        ConfigError: there is no run, or the number of its actors cannot change.
    """
    if not (directory / "config.yaml").exists():
        raise ConfigError(f"{directory} holds no run; give the directory of one (run_dir)")
    compute = stored_config(directory)[0].compute
    if compute.runtime == "local" or compute.gpus is not None:
        why = "samples in its own process" if compute.runtime == "local" else "has an actor on each GPU"
        raise ConfigError(f"{directory}: this run {why}, so their number cannot change while it works")
    return compute.actors


def _as_sent(resolved: Resolved) -> tuple[Config, list[str]]:
    """Return the configuration as it is sent to other processes, and the names of the user's parts that these
    need. Objects that were given from Python are named by their modules, but not the oracles.

    Raises:
        ConfigError: an object has no module from which another process could import it.
    """
    config, parts = resolved.config, list[str]()
    sections = {name: _named(getattr(config, name), f"{name}.name", resolved, parts) for name in REGISTRIES}
    config = replace(config, **sections)
    sampling = config.sampling
    environment = _named(sampling.environment, "sampling.environment", resolved, parts)
    return replace(config, sampling=replace(sampling, environment=environment)), parts


def _without_oracles(config: Config) -> Config:
    """Return the configuration for a process that asks no oracle. If an oracle was given from Python, its
    options, which only its object can explain, are left out."""
    config, evaluation = replace(config, oracle=_without_options(config.oracle)), config.evaluation
    if evaluation is not None:
        oracle, gold = _without_options(evaluation.oracle), _without_options(evaluation.gold)
        config = replace(config, evaluation=replace(evaluation, oracle=oracle, gold=gold))
    return config


def _named(part: Any, field: str, resolved: Resolved, parts: list[str]) -> Any:
    """Return a section, or the name of a part, with a name by which other processes find it. Add the name of
    a user's part to `parts`."""
    name = part.name if isinstance(part, Component) else part
    if name is None or ":" not in name:
        return part
    with resolved.error_context(field):
        name = travelling(name)
    parts.append(name)
    return replace(part, name=name) if isinstance(part, Component) else name


def _without_options(oracle: Any) -> Any:
    is_given = isinstance(oracle, Component | OracleConfig | GoldConfig) and oracle.name.startswith("python:")
    return replace(oracle, options={}) if is_given else oracle
