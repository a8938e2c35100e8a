"""Processes of a Ray cluster that work for a run (`compute.runtime: ray`)."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from oat.build.actor_side import SLOTS, ActorPlan, ActorSide
from oat.build.engine import given_threads
from oat.build.models import shared_slots
from oat.build.oracle_side import BOX, client_oracles, plan_of
from oat.build.parts import REGISTRIES
from oat.build.resolved import Resolved
from oat.build.run_inputs import RunInputs
from oat.config.load import to_yaml
from oat.config.settings import Component, Config, GoldConfig, OracleConfig
from oat.oracles.base import Oracle
from oat.plugins.loading import travelling
from oat.runtime.clients import Clients
from oat.runtime.crew import Crew, Restarts
from oat.runtime.pool import ActorPool
from oat.runtime.ray import Cluster, RayLauncher
from oat.seeds import Seeds
from oat.types import ENSEMBLE

LOGS = "logs"
"""The folder of a run directory in which each process has a file of what it prints."""
_ACTOR = "oat.build.actor_side:ActorWorker"


@dataclass(frozen=True, eq=False)
class Processes:
    """The processes of a run.

    Attributes:
        actors: those that sample.
        clients: those that ask the oracles; None: the run's own process asks them.
        closing: functions that `close` calls.
    """

    cluster: Cluster
    launcher: RayLauncher
    actors: Crew
    clients: Clients | None
    closing: list[Callable[[], None]] = field(default_factory=list)

    def close(self) -> None:
        """End them all."""
        if self.clients is not None:
            self.clients.close()
        self.actors.close()
        for close in self.closing:
            close()
        self.cluster.close()


def hire_processes(
    resolved: Resolved, run_inputs: RunInputs, directory: Path, seeds: Seeds
) -> Processes | None:
    """Start the processes of a run, and let them begin to make their sides. Return None if the run has no
    processes beside its own.

    When this function returns, every process was found fit for the run, and the models are still to be
    loaded, here and there.

    Raises:
        ConfigError: Ray is not installed; no cluster can be used, or it has too few CPUs; a process has other
            versions of packages than this one; a part of the user cannot be found where it is needed.
    """
    compute = resolved.config.compute
    if compute.runtime == "local":
        return None
    config, parts = _as_sent(resolved)
    plan = ActorPlan(to_yaml(_without_oracles(config)), seeds.first, run_inputs.has_character_steps)
    oracles = plan_of(resolved, config, run_inputs) if compute.oracle_clients else None
    (directory / LOGS).mkdir(exist_ok=True)
    with resolved.blame("compute.address" if compute.address else "compute.runtime"):
        cluster = Cluster(compute.address)
    try:
        asking = compute.oracle_clients, compute.oracle_cpus
        with resolved.blame("compute.actors"):
            cluster.refuse_too_many(compute.actors + compute.standby, compute.actor_cpus, *asking)
        logs = (directory / LOGS).resolve()
        launcher = cluster.launcher(compute.actor_cpus, compute.deadline_s, logs)
        restarts = Restarts(compute.max_restarts)
        actors = Crew(launcher, restarts, "actor", compute.actors, compute.standby, parts)
        crews, clients = [(actors, _ACTOR, plan.encoded)], None
        if oracles is not None:
            place, needed = cluster.launcher(compute.oracle_cpus, compute.deadline_s, logs), oracles.parts
            crew = Crew(place, restarts, "oracle client", compute.oracle_clients, parts=[*parts, *needed])
            crews.append((crew, BOX, oracles.encoded))
            clients = Clients(crew)
        with resolved.blame("compute.runtime"):
            for each, *_ in crews:
                each.ready()
        for each, box, encoded in crews:
            each.make(box, encoded)
    except BaseException:
        cluster.close()
        raise
    return Processes(cluster, launcher, actors, clients)


def side_of(processes: Processes, resolved: Resolved) -> ActorSide:
    """Return the sides of all actors as one, when they are made.

    Raises:
        OatError: a side cannot be made.
    """
    processes.actors.ready()
    pool = ActorPool(processes.actors, processes.launcher, shared_slots(resolved.config))
    processes.closing.append(pool.close)
    slots = {*SLOTS, *({ENSEMBLE} & resolved.explorer.needs)}
    return ActorSide(pool, given_threads(resolved), {slot: pool.inbox(slot) for slot in slots}, pool.versions)


def oracles_of(processes: Processes, run_inputs: RunInputs) -> dict[str, Oracle]:
    """Return the oracles that clients ask, by address, when the clients have made them.

    Raises:
        OatError: an oracle cannot be made there.
    """
    if processes.clients is None:
        return {}
    processes.clients.begin()
    return client_oracles(processes.clients, run_inputs)


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
    with resolved.blame(field):
        name = travelling(name)
    parts.append(name)
    return replace(part, name=name) if isinstance(part, Component) else name


def _without_options(oracle: Any) -> Any:
    is_given = isinstance(oracle, Component | OracleConfig | GoldConfig) and oracle.name.startswith("python:")
    return replace(oracle, options={}) if is_given else oracle
