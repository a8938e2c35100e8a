"""The run's own side of a Ray cluster.

Ray itself works in a process beside this one, the broker (`runtime/ray.py`). If a part of a cluster ends, Ray
may end every process that uses it, at once and without a message. So the run's own process does not use it:
if the broker ends, the run saves its state, and says what happened.

Calls and replies are bytes. A message to the broker is a head (`wire.py`), and the bytes of a call, if any.
"""

import os
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

from oat import errors, wire
from oat.errors import ActorError, ConfigError, LostError
from oat.runtime import guard
from oat.runtime.crew import Pending
from oat.runtime.gpus import own_index
from oat.runtime.pipe import Pipe

_START_S = 120.0
"""Longest time in seconds until a cluster has started."""
_END_S = 5.0
"""Longest time in seconds until the broker has left a cluster that goes on."""
_CONNECT_S = 5.0
"""Longest time in seconds until a cluster answers at its address."""
_FREE_S = 10.0
"""Longest time in seconds until what an earlier run has left counts as free."""
_PORT = "RAY_GCS_SERVER_PORT"
"""The environment variable that fixes a port of a cluster which is started here."""
_TOKEN = secrets.token_hex(32)
"""The token of the clusters that this process starts."""
_SHORT = "/tmp"
"""Where the files of such a cluster lie. The names of Ray's sockets have no room for a long path."""


class Cluster:
    """A cluster that this process uses.

    A cluster that is started here is one of this machine, listens on its loopback interface, and answers
    those who have its token. When this process ends, even by a kill, nothing of it is left
    (`runtime/guard.py`).

    Args:
        address: of a running cluster, as host:port; None: a cluster is started on this machine.
        logs: directory of a file for the broker, and of one for each process, with what they print.

    Raises:
        ConfigError: Ray is not installed, no cluster can be used there, or a port is taken that the
            environment fixes.
    """

    def __init__(self, address: str | None, logs: Path):
        if address is not None:
            _refuse_silent(address)
        else:
            _refuse_taken_port()
        self._logs, self._numbers, self._lock = logs, count(), threading.Lock()
        self._waiting: dict[int, Future[memoryview]] = {}
        self._dropped: deque[int] = deque()
        self._end: str | None = None
        self._guard: subprocess.Popen[bytes] | None = None
        folder = ""
        if address is None:
            folder = tempfile.mkdtemp(prefix="oat-ray-", dir=_SHORT if os.access(_SHORT, os.W_OK) else None)
            command = [sys.executable, "-I", guard.__file__, folder]
            self._guard = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._broker = self._started(theirs.fileno(), is_own=address is None)
        if self._guard is not None and self._guard.stdin is not None:
            self._guard.stdin.write(str(self._broker.pid).encode())
            self._guard.stdin.flush()
        self._pipe = Pipe(self._socket.dup())
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        try:
            self.ask("connect", address, folder)
        except BaseException:
            self.close()
            raise

    def refuse_too_many(self, actors: int, cpus: float, others: Mapping[str, float]) -> None:
        """Refuse more processes than the cluster has free logical CPUs for.

        Args:
            cpus: logical CPUs of each actor.
            others: those of further processes together, by what they are called.

        Raises:
            ConfigError: it has too few, or others use them.
        """
        needed = actors * cpus + sum(others.values())
        parts = [f"{actors} actors of {cpus:g} logical CPUs each"]
        parts += [f"{number:g} for {name}" for name, number in others.items() if number]
        way = "lower their number, or the CPUs of each (compute.actor_cpus; a fraction shares one)"
        self._refuse_missing("CPU", needed, f"{', and '.join(parts)} need {needed:g}", way)

    def reserve(self, gpus: int, actors: Sequence[int], learner: int, cpus: float) -> "Reservation":
        """Reserve the GPUs of a run.

        Args:
            gpus: number of GPUs that the run asks for, of which some may stay idle.
            actors, learner, cpus: see `gpus.ReservedGpus`.

        Raises:
            ConfigError: the cluster has too few, others use them, or `ReservedGpus` refuses.
        """
        used = len({*actors, learner})
        way = "lower compute.gpus, or give compute.address a cluster with more"
        self._refuse_missing("GPU", gpus, f"compute.gpus is {gpus}", way, used)
        number = next(self._numbers)
        self.ask("reserve", number, list(actors), learner, cpus)
        return Reservation(self, number)

    def launcher(
        self, cpus: float, deadline_s: float, places: tuple[int, str] | None = None
    ) -> "RayLauncher":
        """Return what starts processes on this cluster.

        Args:
            cpus: logical CPUs that each of them takes.
            deadline_s: longest time in seconds for a reply.
            places: on GPUs, one for each of them; None: they get no GPU.
        """
        return RayLauncher(self, cpus, deadline_s, places)

    def start(self, name: str, cpus: float, places: tuple[int, str] | None) -> int:
        """Start a process, and return its number.

        Raises:
            ActorError: every GPU has a process.
        """
        number = next(self._numbers)
        log = self._logs / f"{name.replace(' ', '-')}.log"
        self.ask("start", number, str(log), cpus, places)
        return number

    def call(self, process: int, data: "bytes | Shared") -> "Future[memoryview]":
        """Send a call to a process. The future has the reply, or a LostError if the process has ended.

        Raises:
            ActorError: the cluster has ended.
        """
        if isinstance(data, Shared):
            return self._sent("call", process, data.number)
        return self._sent("call", process, None, data=[data])

    def share(self, parts: Sequence[bytes | memoryview]) -> "Shared":
        """Store a call in the cluster, to send it to several processes."""
        number = next(self._numbers)
        self.send("share", number, data=parts)
        return Shared(self._dropped, number)

    def send(self, what: str, *arguments: Any, data: Sequence[bytes | memoryview] | None = None) -> None:
        """Send the broker a request that has no reply.

        Raises:
            ActorError: the cluster has ended.
        """
        with self._lock:
            if self._end is not None:
                raise ActorError(self._end)
            try:
                while self._dropped:
                    self._pipe.send(wire.encode(("drop", (self._dropped.popleft(),))))
                self._pipe.send(wire.encode((what, arguments)), data)
            except OSError:
                raise ActorError(self._ended("its broker ended")) from None

    def close(self) -> None:
        """Leave the cluster. If it was started here, end it."""
        with self._lock:
            self._end = self._end or "the run has left its cluster"
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._reader.join()
        self._pipe.close()
        self._socket.close()
        if self._guard is None:
            with suppress(subprocess.TimeoutExpired):
                self._broker.wait(_END_S)
        self._broker.kill()
        self._broker.wait()
        if self._guard is not None:
            self._guard.communicate()

    def _started(self, descriptor: int, *, is_own: bool) -> subprocess.Popen[bytes]:
        """Start the broker, which reads requests from a descriptor."""
        with (self._logs / "cluster.log").open("ab") as log:
            environment = {
                "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
                "RAY_USAGE_STATS_ENABLED": "0",
                # after this time without its head, a process of Ray ends itself
                "RAY_gcs_rpc_server_reconnect_timeout_s": "5",
                **os.environ,
                # without clusters of several machines, Ray listens on the loopback interface only
                "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0" if is_own else "1",
            }
            if is_own:
                environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": _TOKEN}
            return subprocess.Popen(
                [sys.executable, "-m", "oat.runtime.ray", str(descriptor)],
                pass_fds=[descriptor],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=environment,
            )

    def ask(self, what: str, *arguments: Any) -> Any:
        """Return the broker's answer to a request.

        Raises:
            OatError: the broker raised one, or the cluster has ended.
        """
        try:
            return wire.decode(self._sent(what, *arguments).result(_START_S))
        except FutureTimeoutError:
            raise ActorError(f"the cluster has not answered `{what}` within {_START_S:g} s") from None

    def _refuse_missing(
        self, what: str, asked: float, need: str, way: str, used: float | None = None
    ) -> None:
        """Refuse to ask for more of a resource than the cluster has, or to use more than is free.

        Args:
            what: Ray's name of the resource.
            used: how much will be used of what is asked for; None: all.
        """
        used, until = asked if used is None else used, time.monotonic() + _FREE_S
        while True:
            total, free = (found.get(what, 0.0) for found in self.ask("resources"))
            if asked > total:
                raise ConfigError(f"{need}, and the cluster has {total:g} {what}s; {way}")
            if used <= free:
                return
            if time.monotonic() > until:
                raise ConfigError(
                    f"{need}, and of the {total:g} {what}s of the cluster {free:g} are free; wait until "
                    f"others have ended, or {way}"
                )
            time.sleep(0.2)

    def _sent(
        self, what: str, *arguments: Any, data: Sequence[bytes | memoryview] | None = None
    ) -> "Future[memoryview]":
        number, future = next(self._numbers), Future[memoryview]()
        self._waiting[number] = future
        self.send(what, number, *arguments, data=data)
        return future

    def _read(self) -> None:
        """Take replies from the broker until it ends."""
        with suppress(EOFError, OSError):
            while True:
                head, data = self._pipe.receive()
                number, error, text = wire.decode(head)
                if number is None:
                    self._ended(text)
                    break
                future = self._waiting.pop(number)
                if data is None:
                    future.set_exception(getattr(errors, error)(text))
                else:
                    future.set_result(data)
        reason = self._ended("its broker ended")
        while self._waiting:
            self._waiting.popitem()[1].set_exception(ActorError(reason))

    def _ended(self, reason: str) -> str:
        if self._end is None:
            self._end = (
                f"the Ray cluster of this run has ended: {reason} ({self._logs / 'cluster.log'}); the run "
                "continues with the same command"
            )
        return self._end


class Reservation:
    """GPUs that a run has reserved (`gpus.ReservedGpus`).

    Attributes:
        actors: the places of the actors.
        learner: the place of the learner.
    """

    def __init__(self, cluster: Cluster, number: int):
        self._cluster, self._number = cluster, number
        self.actors, self.learner = (number, "actors"), (number, "learner")

    def hold(self) -> int:
        """Hold the GPU of the learner for this process, and return its index among those that this process
        sees.

        Raises:
            ConfigError: this process does not see it.
        """
        return own_index(self._cluster.ask("hold", self._number))

    def close(self) -> None:
        """Give all GPUs back. Processes that use them are ended."""
        with suppress(ActorError):
            self._cluster.send("release", self._number)


class Shared:
    """A call that is stored in the cluster, until this object is deleted and the run sends its next request.

    Args:
        dropped: where the number is noted then. Objects may be deleted at any moment, also within a request.
    """

    def __init__(self, dropped: deque[int], number: int):
        self._dropped, self.number = dropped, number

    def __del__(self) -> None:
        self._dropped.append(self.number)


class RayRemote:
    """A process of a cluster (`crew.Remote`)."""

    def __init__(self, cluster: Cluster, name: str, number: int, deadline_s: float):
        self.name, self._number = name, number
        self._cluster, self._deadline_s = cluster, deadline_s

    def call(self, what: str, data: Any) -> Pending:
        future = self._cluster.call(self._number, data)

        def wait() -> memoryview:
            try:
                return future.result(self._deadline_s)
            except FutureTimeoutError:
                raise LostError(
                    f"{self.name} has not answered the call `{what}` within {self._deadline_s:g} s "
                    "(compute.deadline_s)"
                ) from None
            except LostError as lost:
                raise LostError(f"{self.name} has ended in the call `{what}` ({lost})") from None

        return wait

    def close(self) -> None:
        with suppress(ActorError):
            self._cluster.send("kill", self._number)


class RayLauncher:
    """Starts processes on a cluster (`crew.Launcher`); see `Cluster.launcher`."""

    def __init__(self, cluster: Cluster, cpus: float, deadline_s: float, places: tuple[int, str] | None):
        self._cluster, self._deadline_s = cluster, deadline_s
        self._cpus, self._places = cpus, places

    def start(self, name: str) -> RayRemote:
        number = self._cluster.start(name, self._cpus, self._places)
        return RayRemote(self._cluster, name, number, self._deadline_s)

    def shared(self, parts: Sequence[bytes | memoryview]) -> Shared:
        return self._cluster.share(parts)


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
        raise no_cluster(address, error) from None


def no_cluster(where: str, error: Exception) -> ConfigError:
    """Return the error that no cluster can be used."""
    return ConfigError(
        f"no Ray cluster can be used at {where} ({error}); start one with `ray start --head`, give its "
        "address as host:port and its token in RAY_AUTH_TOKEN, or remove compute.address"
    )
