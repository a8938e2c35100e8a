"""The runtime `ray`: a cluster, and actors on it (`runtime/pool.py`).

Ray pickles the name of a class of ours, and bytes. Values of models and users travel as bytes of `wire.py`,
and so do errors. A cluster that is started here is one of this machine, and answers those who have its token.
"""

import logging
import os
import socket
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from oat.errors import ConfigError, LostError
from oat.runtime.crew import Pending
from oat.runtime.gpus import Places, ReservedGpus
from oat.runtime.worker import Worker

_CONNECT_S = 5.0
"""Longest time in seconds until a cluster answers at its address."""
_FREE_S = 10.0
"""Longest time in seconds until what an earlier run has left counts as free."""
_PORT = "RAY_GCS_SERVER_PORT"
"""The environment variable that fixes a port of a cluster which is started here."""


class RayRemote:
    """A process of the cluster (`crew.Remote`).

    Args:
        closed: function that is called when the process was ended.
    """

    def __init__(
        self,
        ray: ModuleType,
        handle: Any,
        name: str,
        deadline_s: float,
        closed: Callable[[], None] | None = None,
    ):
        self.name = name
        self._ray, self._handle, self._deadline_s = ray, handle, deadline_s
        self._closed = closed

    def call(self, what: str, data: Any) -> Pending:
        reference = self._handle.call.remote(data)

        def wait() -> bytes:
            try:
                reply: bytes = self._ray.get(reference, timeout=self._deadline_s)
            except self._ray.exceptions.GetTimeoutError:
                raise LostError(
                    f"{self.name} has not answered the call `{what}` within {self._deadline_s:g} s "
                    "(compute.deadline_s)"
                ) from None
            except self._ray.exceptions.RayError as error:
                reason = str(error).strip().splitlines()[-1].split(". ")[0]
                raise LostError(f"{self.name} has ended in the call `{what}` ({reason})") from None
            return reply

        return wait

    def close(self) -> None:
        self._ray.kill(self._handle)
        if self._closed is not None:
            self._closed()


class Cluster:
    """A cluster that this process uses.

    Args:
        address: of a running cluster; None: a cluster is started on this machine.

    Raises:
        ConfigError: Ray is not installed, no cluster answers at the address, or a port is taken that the
            environment fixes.
    """

    def __init__(self, address: str | None):
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        if address is None:
            os.environ["RAY_AUTH_MODE"] = "token"
        try:
            import ray
        except ImportError:
            raise ConfigError(
                "compute.runtime ray needs the package ray, which is not installed; pip install "
                "'oat-align[ray]'"
            ) from None
        self._ray: ModuleType = ray
        if address is not None:
            _refuse_silent(address)
        else:
            _refuse_taken_port()
        own: dict[str, Any] = {"include_dashboard": False, "_node_ip_address": "127.0.0.1"}
        try:
            ray.init(
                address=address or "local",
                logging_level=logging.ERROR,
                log_to_driver=False,
                **({} if address else own),
            )
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise _no_cluster(address or "this machine", error) from None

    def refuse_too_many(self, actors: int, cpus: float) -> None:
        """Refuse more actors than the cluster has free logical CPUs for.

        Raises:
            ConfigError: it has too few, or others use them.
        """
        need = f"{actors} actors of {cpus:g} logical CPUs each need {actors * cpus:g}"
        way = "lower compute.actors or compute.actor_cpus (a fraction shares a CPU)"
        self._refuse_missing("CPU", actors * cpus, need, way)

    def reserve(self, gpus: int, actors: Sequence[int], learner: int, cpus: float) -> ReservedGpus:
        """Reserve the GPUs of a run.

        Args:
            gpus: number of GPUs that the run asks for, of which some may stay idle.
            actors, learner, cpus: see `ReservedGpus`.

        Raises:
            ConfigError: the cluster has too few, others use them, or `ReservedGpus` refuses.
        """
        used = len({*actors, learner})
        way = "lower compute.gpus, or give compute.address a cluster with more"
        self._refuse_missing("GPU", gpus, f"compute.gpus is {gpus}", way, used)
        return ReservedGpus(self._ray, actors, learner, cpus)

    def _refuse_missing(
        self, what: str, asked: float, need: str, way: str, used: float | None = None
    ) -> None:
        """Refuse to ask for more of a resource than the cluster has, or to use more than is free.

        Args:
            what: Ray's name of the resource.
            used: how much will be used of what is asked for; None: all.
        """
        has = self._ray.cluster_resources().get(what, 0.0)
        if asked > has:
            raise ConfigError(f"{need}, and the cluster has {has:g} {what}s; {way}")
        used, until = asked if used is None else used, time.monotonic() + _FREE_S
        while used > (free := self._ray.available_resources().get(what, 0.0)):
            if time.monotonic() > until:
                raise ConfigError(
                    f"{need}, and of the {has:g} {what}s of the cluster {free:g} are free; wait until others "
                    f"have ended, or {way}"
                )
            time.sleep(0.2)

    def launcher(
        self, cpus: float, deadline_s: float, logs: Path, places: Places | None = None
    ) -> "RayLauncher":
        """Return what starts processes on this cluster.

        Args:
            cpus: logical CPUs that each of them takes.
            deadline_s: longest time in seconds for a reply.
            logs: directory of a file for each process, with what it prints.
            places: on GPUs, one for each of them; None: they get no GPU.
        """
        return RayLauncher(self._ray, cpus, deadline_s, logs, places)

    def close(self) -> None:
        self._ray.shutdown()


class RayLauncher:
    """Starts processes on a cluster (`crew.Launcher`); see `Cluster.launcher`."""

    def __init__(self, ray: ModuleType, cpus: float, deadline_s: float, logs: Path, places: Places | None):
        self._ray, self._deadline_s, self._logs, self._places = ray, deadline_s, logs, places
        self._worker = ray.remote(num_cpus=cpus, max_restarts=0, max_task_retries=0)(Worker)

    def start(self, name: str) -> RayRemote:
        log = str(self._logs / f"{name.replace(' ', '-')}.log")
        if self._places is None:
            return RayRemote(self._ray, self._worker.remote(log), name, self._deadline_s)
        place = self._places.take()
        handle = self._worker.options(**self._places.options(place)).remote(log)
        closed = partial(self._places.give_back, place)
        return RayRemote(self._ray, handle, name, self._deadline_s, closed)

    def shared(self, data: bytes) -> Any:
        return self._ray.put(data)


def _refuse_taken_port() -> None:
    """Refuse to start a cluster at a port that is taken. Ray itself would try for 40 seconds. Unless the
    environment fixes one, Ray takes ports that are free.

    Raises:
        ConfigError: the port is no number, or another process has it.
    """
    port = os.environ.get(_PORT)
    if not port:
        return
    try:
        with socket.socket() as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            tried.bind(("", int(port)))
    except (OSError, ValueError, OverflowError) as error:
        raise ConfigError(
            f"the environment variable {_PORT} is {port}, and no cluster can be started at this port "
            f"({error}); end the process that has it, or remove the variable: Ray then takes a free port"
        ) from None


def _refuse_silent(address: str) -> None:
    """Refuse an address at which nothing answers. Ray itself would try for minutes.

    Raises:
        ConfigError: there is no such address, or nothing answers.
    """
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT_S).close()
    except (OSError, ValueError) as error:
        raise _no_cluster(address, error) from None


def _no_cluster(where: str, error: Exception) -> ConfigError:
    return ConfigError(
        f"no Ray cluster can be used at {where} ({error}); start one with `ray start --head`, give its "
        "address as host:port, or remove compute.address"
    )
