"""The runtime `ray`: a cluster, and actors on it (`runtime/pool.py`).

Ray pickles the name of a class of ours, and bytes. Values of models and users travel as bytes of `wire.py`,
and so do errors. A cluster that is started here is one of this machine, and answers those who have its token.
"""

import logging
import os
import socket
from pathlib import Path
from types import ModuleType
from typing import Any

from oat.errors import ConfigError, LostError
from oat.runtime.crew import Pending
from oat.runtime.worker import Worker

_CONNECT_S = 5.0
"""Longest time in seconds until a cluster answers at its address."""


class RayRemote:
    """A process of the cluster (`crew.Remote`)."""

    def __init__(self, ray: ModuleType, handle: Any, name: str, deadline_s: float):
        self.name = name
        self._ray, self._handle, self._deadline_s = ray, handle, deadline_s

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


class Cluster:
    """A cluster that this process uses.

    Args:
        address: of a running cluster; None: a cluster is started on this machine.

    Raises:
        ConfigError: Ray is not installed, or no cluster answers at the address.
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

    def refuse_too_many(self, actors: int, cpus: float, clients: int, client_cpus: float) -> None:
        """Refuse more actors and oracle clients than the cluster has logical CPUs for.

        Args:
            cpus, client_cpus: of each actor, and of each client.

        Raises:
            ConfigError: it has too few.
        """
        has, need = self._ray.cluster_resources().get("CPU", 0.0), actors * cpus + clients * client_cpus
        if need > has:
            asking = f" and {clients} oracle clients of {client_cpus:g}" if clients else ""
            fields = "compute.oracle_clients, compute.oracle_cpus, " if clients else ""
            raise ConfigError(
                f"{actors} actors of {cpus:g} logical CPUs each{asking} need {need:g}, and the cluster has "
                f"{has:g}; lower {fields}compute.actors or compute.actor_cpus (a fraction shares a CPU)"
            )

    def launcher(self, cpus: float, deadline_s: float, logs: Path) -> "RayLauncher":
        """Return what starts processes on this cluster.

        Args:
            cpus: logical CPUs that each of them takes.
            deadline_s: longest time in seconds for a reply.
            logs: directory of a file for each process, with what it prints.
        """
        return RayLauncher(self._ray, cpus, deadline_s, logs)

    def close(self) -> None:
        self._ray.shutdown()


class RayLauncher:
    """Starts processes on a cluster (`crew.Launcher`); see `Cluster.launcher`."""

    def __init__(self, ray: ModuleType, cpus: float, deadline_s: float, logs: Path):
        self._ray, self._deadline_s, self._logs = ray, deadline_s, logs
        self._worker = ray.remote(num_cpus=cpus, max_restarts=0, max_task_retries=0)(Worker)

    def start(self, name: str) -> RayRemote:
        log = self._logs / f"{name.replace(' ', '-')}.log"
        return RayRemote(self._ray, self._worker.remote(str(log)), name, self._deadline_s)

    def shared(self, data: bytes) -> Any:
        return self._ray.put(data)


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
