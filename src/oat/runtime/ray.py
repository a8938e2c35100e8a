"""The runtime `ray`: a cluster, and actors on it (`runtime/pool.py`).

Ray pickles the name of a class of ours, and bytes. Values of models and users travel as bytes of `wire.py`,
and so do errors. A cluster that is started here is one of this machine, and answers those who have its token.
"""

import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

from oat.errors import ConfigError, LostError
from oat.runtime import guard
from oat.runtime.crew import Pending
from oat.runtime.worker import Worker

_MOST_WAITS = 1024
"""Most replies that are waited for at the same time."""
_TOKEN = secrets.token_hex(32)
"""The token of the clusters that this process starts."""
_SHORT = "/tmp"
"""Where the files of such a cluster lie. The names of Ray's sockets have no room for a long path."""
_LOOPBACK = "127.0.0.1"
_CONNECT_S = 5.0
"""Longest time in seconds until a cluster answers at its address."""


class RayRemote:
    """A process of the cluster (`crew.Remote`).

    Args:
        threads: where replies are waited for. If a signal comes while Ray waits on the main thread, Ray
            raises KeyboardInterrupt in the place of what our handler raises.
    """

    def __init__(
        self, ray: ModuleType, handle: Any, name: str, deadline_s: float, threads: ThreadPoolExecutor
    ):
        self.name, self._threads = name, threads
        self._ray, self._handle, self._deadline_s = ray, handle, deadline_s

    def call(self, what: str, data: Any) -> Pending:
        reference = self._handle.call.remote(data)

        def get() -> bytes:
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

        return lambda: self._threads.submit(get).result()

    def close(self) -> None:
        self._ray.kill(self._handle)


class Cluster:
    """A cluster that this process uses.

    A cluster that is started here is one of this machine, and answers those who have its token. When this
    process ends, even by a kill, nothing of it is left (`runtime/guard.py`).

    Args:
        address: of a running cluster; None: a cluster is started on this machine.

    Raises:
        ConfigError: Ray is not installed, or no cluster answers at the address.
    """

    def __init__(self, address: str | None):
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0" if address is None else "1"
        if address is None:
            os.environ["RAY_AUTH_MODE"] = "token"
            os.environ["RAY_AUTH_TOKEN"] = _TOKEN
        try:
            import ray
            from ray._private import ray_constants
        except ImportError:
            raise ConfigError(
                "compute.runtime ray needs the package ray, which is not installed; pip install "
                "'oat-align[ray]'"
            ) from None
        # without clusters of several machines, Ray uses the loopback interface only
        ray_constants.ENABLE_RAY_CLUSTER = address is not None
        self._ray: ModuleType = ray
        self._guard: subprocess.Popen[bytes] | None = None
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            if address is None:
                self._start_own()
            else:
                _refuse_silent(address)
                ray.init(address, logging_level=logging.ERROR, log_to_driver=False)
        except (ConnectionError, ValueError, RuntimeError) as error:
            self.close()
            raise _no_cluster(address or "this machine", error) from None
        except BaseException:
            self.close()
            raise
        finally:
            if threading.current_thread() is threading.main_thread():
                for number, handler in handlers.items():  # Ray sets its own
                    signal.signal(number, handler)

    def _start_own(self) -> None:
        folder = tempfile.mkdtemp(prefix="oat-ray-", dir=_SHORT if os.access(_SHORT, os.W_OK) else None)
        command = [sys.executable, "-I", guard.__file__, folder]
        self._guard = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
        self._ray.init(
            "local",
            include_dashboard=False,
            logging_level=logging.ERROR,
            log_to_driver=False,
            _temp_dir=folder,
        )
        where = self._ray.util.get_node_ip_address()
        if where != _LOOPBACK:
            raise ConfigError(
                f"Ray listens on {where}, and a cluster of one run has to stay on {_LOOPBACK}; install the "
                "version of ray that this version of oat was tested with (constraints.txt)"
            )

    def refuse_too_many(self, actors: int, cpus: float, others: float = 0.0) -> None:
        """Refuse more actors than the cluster has logical CPUs for.

        Args:
            cpus: logical CPUs of each actor.
            others: logical CPUs of the other processes.

        Raises:
            ConfigError: it has too few.
        """
        has = self._ray.cluster_resources().get("CPU", 0.0)
        needed = actors * cpus + others
        if needed > has:
            beside = f" and {others:g} beside them" if others else ""
            raise ConfigError(
                f"{actors} actors of {cpus:g} logical CPUs each{beside} need {needed:g}, and the cluster has "
                f"{has:g}; lower compute.actors or compute.actor_cpus (a fraction shares a CPU)"
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
        """Leave the cluster. If it was started here, end it."""
        self._ray.shutdown()
        if self._guard is not None:
            self._guard.communicate()


class RayLauncher:
    """Starts processes on a cluster (`crew.Launcher`); see `Cluster.launcher`."""

    def __init__(self, ray: ModuleType, cpus: float, deadline_s: float, logs: Path):
        self._ray, self._deadline_s, self._logs = ray, deadline_s, logs
        self._threads = ThreadPoolExecutor(_MOST_WAITS, "replies")
        self._worker = ray.remote(num_cpus=cpus, max_restarts=0, max_task_retries=0)(Worker)

    def start(self, name: str) -> RayRemote:
        log = self._logs / f"{name.replace(' ', '-')}.log"
        return RayRemote(self._ray, self._worker.remote(str(log)), name, self._deadline_s, self._threads)

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
