"""The runtime `ray`: a cluster, and actors on it (`runtime/pool.py`).

Ray pickles the name of a class of ours and bytes; values of models and users travel as bytes of `wire.py`. A
cluster that is started here is reached with a token only.
"""

import logging
import os
from types import ModuleType
from typing import Any

from oat.errors import ConfigError
from oat.plugins.loading import load_symbol
from oat.runtime.pool import Pending


class _Worker:
    """Runs in a process of its own.

    Args:
        symbol: the class that answers, as `package.module:Name`.
        plan: its argument.
    """

    def __init__(self, symbol: str, plan: bytes):
        self._worker = load_symbol(symbol)(plan)

    def call(self, data: bytes) -> bytes:
        reply: bytes = self._worker.call(data)
        return reply

    def close(self) -> None:
        self._worker.close()


class RayRemote:
    """An actor on the cluster (`pool.Remote`)."""

    def __init__(self, ray: ModuleType, handle: Any, name: str):
        self.name = name
        self._ray, self._handle = ray, handle

    def call(self, data: bytes) -> Pending:
        reference = self._handle.call.remote(data)

        def wait() -> bytes:
            reply: bytes = self._ray.get(reference)
            return reply

        return wait

    def close(self) -> None:
        self._ray.kill(self._handle)


def start_actors(
    symbol: str, plan: bytes, count: int, cpus: float, address: str | None
) -> tuple[list[RayRemote], "Cluster"]:
    """Start actors on a cluster.

    Args:
        symbol: the class that each actor makes, as `package.module:Name`.
        plan: the argument of this class.
        cpus: logical CPUs of an actor.
        address: of a running cluster; None: a cluster is started on this machine.

    Raises:
        ConfigError: Ray is not installed.
    """
    cluster = Cluster(address)
    remote = cluster.ray.remote(num_cpus=cpus, max_restarts=0, max_task_retries=0)(_Worker)
    names = [f"actor {number}" for number in range(count)]
    actors = [RayRemote(cluster.ray, remote.remote(symbol, plan), name) for name in names]
    return actors, cluster


class Cluster:
    """A cluster that this process uses."""

    def __init__(self, address: str | None):
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        try:
            import ray
        except ImportError:
            raise ConfigError(
                "compute.runtime ray needs the package ray, which is not installed; pip install "
                "'oat-align[ray]'"
            ) from None
        self.ray: ModuleType = ray
        options: dict[str, Any] = {"include_dashboard": False, "_node_ip_address": "127.0.0.1"}
        ray.init(
            address=address or "local",
            logging_level=logging.ERROR,
            log_to_driver=False,
            **({} if address else options),
        )

    def close(self) -> None:
        self.ray.shutdown()
