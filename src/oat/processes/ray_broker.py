"""The broker: the process through which a run uses a Ray cluster (`ray_cluster.py` says why).

It is a program of its own (`spawn.py`), and gets the requests of the run. When their connection is closed,
the broker leaves the cluster and ends.

Ray pickles the name of a class of ours, and bytes (as arrays of numpy, which the receiver reads in the
cluster's shared memory, without a copy). Values of models and users travel as bytes of `wire.py`,
and so do errors.
"""

import importlib
import logging
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np

from oat import wire
from oat.errors import ConfigError, LostError, OatError
from oat.processes.gpus import Places, ReservedGpus
from oat.processes.marks import processes
from oat.processes.pipe import Pipe
from oat.processes.ray_cluster import NO_RAY, no_cluster

_LOOPBACK = "127.0.0.1"
_ANSWERED = ("connect", "resources", "reserve", "hold", "start", "store_some")
"""The requests that are answered at once."""
_WATCH_S = 0.5
"""Seconds between two looks whether the parts of an own cluster are still there."""


class Broker:
    """Does what the run asks for.

    Args:
        pipe: where the requests come from.
        worker: the class of what answers calls in a process; its constructor gets the path of a log, and its
            method `call` the bytes of a call.
    """

    def __init__(self, pipe: Pipe, worker: type):
        self._pipe, self._lock, self._worker = pipe, threading.Lock(), worker
        self._ray: Any = None
        self._folder = ""
        self._processes: dict[int, Any] = {}
        self._shared: dict[int, Any] = {}
        self._gpus: dict[int, ReservedGpus] = {}
        self._leaving: dict[int, Callable[[], None]] = {}

    def serve(self) -> None:
        """Answer requests until the run closes its end."""
        try:
            while True:
                head, data, _ = self._pipe.receive()
                what, arguments = wire.decode(head)
                if what in _ANSWERED:
                    self._answer(what, *arguments)
                else:
                    sent = [] if data is None else [np.frombuffer(data, np.uint8)]
                    getattr(self, f"_{what}")(*arguments, *sent)
        except (EOFError, OSError):
            if self._ray is not None:
                self._ray.shutdown()
            if self._folder:
                shutil.rmtree(self._folder, ignore_errors=True)

    def _answer(self, what: str, number: int, *arguments: Any) -> None:
        try:
            self._reply(number, wire.encode(getattr(self, f"_{what}")(*arguments)))
        except OatError as error:
            self._reply(number, error)

    def _connect(self, address: str | None, folder: str) -> None:
        self._folder = folder
        # Ray lets everybody write into the folder that it is given; nobody else can enter the one around it
        self._ray = _connected(address, f"{folder}/ray")
        if address is None:
            threading.Thread(target=self._watch, args=[_parts()], daemon=True).start()

    def _resources(self) -> tuple[list[dict[str, float]], dict[str, float]]:
        nodes = [dict(node["Resources"]) for node in self._ray.nodes() if node["Alive"]]
        return nodes, dict(self._ray.available_resources())

    def _store_some(self) -> None:
        """Store a megabyte, which only a cluster does in which no part hangs."""
        data = np.zeros(2**20, np.uint8)
        self._ray.put(data)

    def _reserve(
        self, reservation: int, actors: Sequence[int], learner: int, cpus: float, learner_cpus: float
    ) -> None:
        self._gpus[reservation] = ReservedGpus(self._ray, actors, learner, cpus, learner_cpus)

    def _hold(self, reservation: int) -> str:
        return self._gpus[reservation].hold()

    def _release(self, reservation: int) -> None:
        self._gpus.pop(reservation).close()

    def _start(self, number: int, log: str, cpus: float, places: tuple[int, str] | None) -> None:
        worker = self._ray.remote(num_cpus=cpus, max_restarts=0, max_task_retries=0)(self._worker)
        if places is not None:
            reservation, whose = places
            gpus: Places = getattr(self._gpus[reservation], whose)
            place = gpus.take()
            worker = worker.options(**gpus.options(place))
            self._leaving[number] = partial(gpus.give_back, place)
        self._processes[number] = worker.remote(log)

    def _share(self, number: int, data: np.ndarray) -> None:
        self._shared[number] = self._ray.put(data)

    def _drop(self, number: int) -> None:
        del self._shared[number]

    def _call(self, number: int, process: int, shared: int | None, data: np.ndarray | None = None) -> None:
        sent = data if shared is None else self._shared[shared]

        def reply(future: "Future[bytes]") -> None:
            error = future.exception()
            self._reply(number, future.result() if error is None else _failed(error))

        if process not in self._processes:
            self._reply(number, LostError("it was ended"))
            return
        self._processes[process].call.remote(sent).future().add_done_callback(reply)

    def _kill(self, number: int) -> None:
        if number in self._processes:
            self._ray.kill(self._processes.pop(number))
            self._leaving.pop(number, lambda: None)()

    def _reply(self, number: int | None, reply: bytes | Exception) -> None:
        with self._lock:
            if isinstance(reply, Exception):
                self._pipe.send(wire.encode((number, type(reply).__name__, str(reply))))
            else:
                self._pipe.send(wire.encode((number, "", "")), [reply])

    def _watch(self, parts: dict[int, str]) -> None:
        """If a part of the cluster ends, say so, and end."""
        while True:
            time.sleep(_WATCH_S)
            for ended in parts.keys() - _parts().keys():
                self._reply(None, LostError(f"its process {parts[ended]} ended"))
                os._exit(1)


def _connected(address: str | None, folder: str) -> ModuleType:
    """Connect to a cluster, and return the module of Ray.

    Args:
        address: of a running cluster; None: start one, with its files in `folder`.

    Raises:
        ConfigError: Ray is not installed, or no cluster can be used.
    """
    try:
        import ray
    except ImportError:
        raise ConfigError(NO_RAY) from None
    own: dict[str, Any] = {"include_dashboard": False, "_temp_dir": folder}
    try:
        ray.init(
            address=address or "local",
            logging_level=logging.ERROR,
            log_to_driver=False,
            **({} if address else own),
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise no_cluster(address, error) from None
    where = ray.util.get_node_ip_address()
    if address is None and where != _LOOPBACK:
        raise ConfigError(
            f"Ray listens on {where}, and the cluster of one run has to stay on {_LOOPBACK}; install the "
            "version of ray that this version of oat was tested with (constraints.txt)"
        )
    return ray


def _leave_folder() -> None:
    """Work in the root of the file system. Ray lets all processes look for modules in the broker's folder
    first, and a file of the user there may have the name of a module that they need."""
    places = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ["PYTHONPATH"] = os.pathsep.join(os.path.abspath(place) for place in places if place)
    os.chdir("/")


def _parts() -> dict[int, str]:
    """Return the living children of this process, which are the parts of its cluster: number and name."""
    return {each.number: each.name for each in processes() if each.parent == os.getpid()}


def _failed(error: BaseException) -> OatError:
    """Return the error of a call that a process has not answered: it has ended, or could not be made."""
    reason = str(error).strip().splitlines()[-1].split(". ")[0]
    if not getattr(error, "actor_init_failed", False):
        return LostError(reason)
    return ConfigError(
        f"a machine of the cluster cannot start a process of oat ({reason}); install the same versions of "
        "oat and its packages on every machine of the cluster"
    )


def serve(pipe: Pipe, order: Mapping[str, Any]) -> None:
    """Be the broker.

    Args:
        order: `worker` names the class of `Broker`, as `package.module:name`.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    module, _, name = order["worker"].partition(":")
    worker = getattr(importlib.import_module(module), name)
    _leave_folder()
    Broker(pipe, worker).serve()
