"""The run's own side of a Ray cluster.

Ray itself works in a process beside this one, the broker (`ray_broker.py`). If a part of a cluster ends, Ray
may end every process that uses it, at once and without a message. So the run's own process does not use it:
if the broker ends, the run saves its state, and says what happened.

Calls and replies are bytes. A message to the broker is a head (`wire.py`), and the bytes of a call, if any.
A thread sends the messages: so an interrupted run leaves no message half sent, and nobody waits longer than
`compute.deadline_s` for a broker that hangs.

Checks of the place of a cluster, and the errors if there can be none.
"""

import math
import os
import re
import secrets
import shutil
import socket
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

from oat import errors, wire
from oat.errors import ActorError, ConfigError, LostError
from oat.files import for_sockets
from oat.processes.gpus import RESERVED_S, own_index
from oat.processes.guard import guard
from oat.processes.launcher import FEWER_CPUS, Pending
from oat.processes.pipe import Message
from oat.processes.spawn import Child

_CONNECT_S = 5.0
"""Longest time in seconds until a cluster answers at its address."""
_PORT = "RAY_GCS_SERVER_PORT"
"""The environment variable that fixes a port of a cluster which is started here."""
NO_RAY = "compute.runtime ray needs the package ray, which is not installed; pip install 'oat-align[ray]'"


def refuse_taken_port() -> None:
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


def refuse_silent(address: str) -> None:
    """Refuse an address at which nothing answers. Ray itself would try for minutes.

    Raises:
        ConfigError: it is no address, or nothing answers.
    """
    host, _, port = address.rpartition(":")
    if not (host and port.isdecimal() and 0 < int(port) < 2**16):
        raise _silent(address, "this is no address of the form host:port")
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT_S).close()
    except OSError as error:
        raise _silent(address, error) from None


def no_cluster(address: str | None, why: Exception | str) -> ConfigError:
    """Return the error that no cluster can be used.

    Args:
        address: at which something answers, as host:port; None: a cluster was to be started on this machine.
    """
    if address is None:
        return ConfigError(
            f"no Ray cluster can be started on this machine ({why}); mend this, or set compute.runtime to "
            "local"
        )
    return ConfigError(
        f"something answers at {address}, but no Ray cluster lets this process in ({why}); give the address "
        "with which the other machines joined the cluster, its token in RAY_AUTH_TOKEN, with "
        "RAY_AUTH_MODE=token, and install its version of Ray; or remove compute.address"
    )


def _silent(address: str, why: Exception | str) -> ConfigError:
    return ConfigError(
        f"no Ray cluster can be used at {address} ({why}); start one with `ray start --head`, and give its "
        "address as host:port; or remove compute.address"
    )


_START_S = 120.0
"""Longest time in seconds until a cluster, or a process of it, has started."""
_LEAST_SHARE = 1e-4
"""The smallest share of a logical CPU that Ray counts."""
_ALIVE_S = 5.0
"""Longest time in seconds until a cluster in which nothing hangs has stored some bytes."""
_END_S = 5.0
"""Longest time in seconds until the broker has left a cluster that goes on."""
_FREE_S = 10.0
"""Longest time in seconds until what an earlier run has left counts as free."""
_LOG = "cluster.log"
"""The file of what the broker prints."""
_TOKEN = secrets.token_hex(32)
"""The token of the clusters that this process starts."""
_SILENT = f"without a word, Ray ended, or has not answered for {_START_S:g} s"
"""What is said of a cluster that has not started, and has printed nothing."""
_HEAD = re.compile(r"^\[[^\]]*\] \S+:\d+: ")
"""How a line of Ray's log begins: the time, the processes, and the place in Ray's sources."""


class Cluster:
    """A cluster that this process uses.

    A cluster that is started here is one of this machine, listens on its loopback interface, and answers
    those who have its token. When this process ends, even by a kill, nothing of it is left
    (`guard.py`).

    Args:
        address: of a running cluster, as host:port; None: a cluster is started on this machine.
        logs: directory of a file for the broker, and of one for each process, with what they print.
        deadline_s: longest time in seconds for a reply.
        worker: the class of what answers calls in a process (`Broker`), as `package.module:name`.

    Raises:
        ConfigError: Ray is not installed, no cluster can be used there, or a port is taken that the
            environment fixes.
    """

    def __init__(self, address: str | None, logs: Path, deadline_s: float, worker: str):
        if address is not None:
            refuse_silent(address)
        else:
            refuse_taken_port()
        self._logs, self._numbers, self.deadline_s = logs, count(), deadline_s
        self._waiting: dict[int, Future[memoryview]] = {}
        self._dropped: deque[int] = deque()
        self._end: str | None = None
        self._is_closed = False
        self._is_own, self._folder = address is None, ""
        if address is None:
            self._folder = tempfile.mkdtemp(prefix="oat-ray-", dir=for_sockets())
            guard.hold(("folder", self._folder))
        self._broker = self._started(worker)
        try:
            self.ask("connect", address, self._folder, within_s=_START_S)
        except ActorError:
            self.close()
            raise no_cluster(address, self._last_words()) from None
        except BaseException:
            self.close()
            raise

    def refuse_too_many(self, cpus: Sequence[float], whose: str) -> None:
        """Refuse more processes than the cluster has free logical CPUs for.

        Args:
            cpus: logical CPUs of each process.
            whose: their parts, in words.

        Raises:
            ConfigError: it has too few, or its machines are too small, or others use them.
        """
        all_cpus = math.fsum(cpus)
        need = f"{whose} need {all_cpus:g} logical CPUs"
        self._refuse_missing("CPU", all_cpus, need, FEWER_CPUS)
        for least in {*cpus}:
            room, large = self.places(least), sum(each >= least for each in cpus)
            if large > room:
                raise ConfigError(
                    f"{need}, and {room} of the {large} processes with {least:g} or more have room on the "
                    f"machines of the cluster, since each runs on one of them; {FEWER_CPUS}"
                )

    def places(self, cpus: float) -> int:
        """Return for how many processes with so many logical CPUs each the machines have room if nothing
        else uses them."""
        nodes, _ = self.ask("resources")
        return sum(int((node.get("CPU", 0.0) + _LEAST_SHARE) / cpus) for node in nodes)

    def reserve(
        self, gpus: int, actors: Sequence[int], learner: int, cpus: float, learner_cpus: float
    ) -> "Reservation":
        """Reserve the GPUs of a run.

        Args:
            gpus: number of GPUs that the run asks for, of which some may stay idle.
            actors, learner, cpus, learner_cpus: see `gpus.ReservedGpus`.

        Raises:
            ConfigError: the cluster has too few, others use them, or `ReservedGpus` refuses.
        """
        used = len({*actors, learner})
        way = "lower compute.gpus, or give compute.address a cluster with more"
        self._refuse_missing("GPU", gpus, f"compute.gpus is {gpus}", way, used)
        number = next(self._numbers)
        arguments = list(actors), learner, cpus, learner_cpus
        self.ask("reserve", number, *arguments, within_s=RESERVED_S + _ALIVE_S)
        return Reservation(self, number)

    def launcher(self, cpus: float, places: tuple[int, str] | None = None) -> "RayLauncher":
        """Return what starts processes on this cluster.

        Args:
            cpus: logical CPUs that each of them takes.
            places: on GPUs, one for each of them; None: they get no GPU.
        """
        return RayLauncher(self, cpus, places)

    def start(self, name: str, cpus: float, places: tuple[int, str] | None) -> int:
        """Start a process, and return its number.

        Raises:
            ActorError: every GPU has a process.
        """
        number = next(self._numbers)
        self.ask("start", number, str(self._logs / f"{name.replace(' ', '-')}.log"), cpus, places)
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
        """Send the broker a request that has no reply. If it has data, return when these are sent.

        Raises:
            ActorError: the cluster has ended, or the broker has not taken the data in time.
        """
        if self._end is not None:
            raise ActorError(self._end)
        while self._dropped:
            self._broker.link.send(wire.encode(("drop", (self._dropped.popleft(),))))
        sent = self._broker.link.send(wire.encode((what, arguments)), data)
        if data is None:
            return
        try:
            sent.result(self.deadline_s)
        except FutureTimeoutError:
            raise ActorError(
                self._ended(f"its broker has taken no data for {self.deadline_s:g} s (compute.deadline_s)")
            ) from None
        except OSError:
            raise ActorError(self._ended("its broker ended")) from None

    def refuse_hanging(self) -> None:
        """Refuse a cluster of which the broker, or another part, hangs.

        Raises:
            ActorError: it has not stored some bytes within `_ALIVE_S` seconds.
        """
        self.ask("store_some", within_s=_ALIVE_S)

    def close(self) -> None:
        """Leave the cluster. If it was started here, end it. A second call does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        self._end = self._end or "the run has left its cluster"
        if not self._is_own:
            self._broker.link.close(_END_S)
        self._broker.end(0.0 if self._is_own else _END_S)
        if self._is_own:
            shutil.rmtree(self._folder, ignore_errors=True)
            guard.release(("folder", self._folder))

    def _started(self, worker: str) -> Child:
        """Start the broker."""
        with (self._logs / _LOG).open("ab") as log:
            self._begin_of_log = log.tell()
            environment = {
                "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
                "RAY_USAGE_STATS_ENABLED": "0",
                # after this time without its head, a process of Ray ends itself
                "RAY_gcs_rpc_server_reconnect_timeout_s": "5",
                **os.environ,
                # without clusters of several machines, Ray listens on the loopback interface only
                "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0" if self._is_own else "1",
            }
            if self._is_own:
                environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": _TOKEN}
            return Child(
                "oat.processes.ray_broker:serve",
                {"worker": worker},
                self._take,
                environment=environment,
                output=log.fileno(),
                has_session=True,
            )

    def ask(self, what: str, *arguments: Any, within_s: float | None = None) -> Any:
        """Return the broker's answer to a request.

        Args:
            within_s: longest time in seconds for the answer; None: `compute.deadline_s`.

        Raises:
            OatError: the broker raised one, or the cluster has ended, or has not answered in time.
        """
        seconds, named = (self.deadline_s, " (compute.deadline_s)") if within_s is None else (within_s, "")
        try:
            return wire.decode(self._sent(what, *arguments).result(seconds))
        except FutureTimeoutError:
            raise ActorError(
                self._ended(f"a part of it hangs, and has not answered `{what}` for {seconds:g} s{named}")
            ) from None

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
            nodes, all_free = self.ask("resources")
            total, free = sum(node.get(what, 0.0) for node in nodes), all_free.get(what, 0.0)
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

    def _take(self, message: Message | None) -> None:
        """Take a reply of the broker."""
        if message is not None:
            number, error, text = wire.decode(message.head)
            if number is None:
                self._ended(text)
                return
            future = self._waiting.pop(number)
            if message.data is None:
                future.set_exception(getattr(errors, error)(text))
            else:
                future.set_result(message.data)
            return
        reason = self._ended("its broker ended")
        while self._waiting:
            self._waiting.popitem()[1].set_exception(ActorError(reason))

    def _last_words(self) -> str:
        """Return the last line that the broker has printed, without the head of a line of Ray's log."""
        with (self._logs / _LOG).open("rb") as log:
            log.seek(self._begin_of_log)
            lines = log.read().decode(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), _SILENT)
        return _HEAD.sub("", last)

    def _ended(self, reason: str) -> str:
        if self._end is None:
            self._end = (
                f"the Ray cluster of this run has ended: {reason} ({self._logs / _LOG}); the run "
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
            ActorError: Ray did not give it in time.
        """
        return own_index(self._cluster.ask("hold", self._number, within_s=RESERVED_S + _ALIVE_S))

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
    """A process of a cluster (`launcher.Remote`)."""

    def __init__(self, cluster: Cluster, name: str, number: int, deadline_s: float):
        self.name, self._number = name, number
        self._cluster, self._deadline_s = cluster, deadline_s

    def call(self, what: str, data: Any) -> Pending:
        future = self._cluster.call(self._number, data)
        seconds, named = self._deadline_s, " (compute.deadline_s)"
        if what == "prepare" and seconds > _START_S:
            seconds, named = _START_S, ", since it has not started"
        if what == "prepare":
            named += "; perhaps no machine of the cluster has enough free logical CPUs for it"

        def wait() -> memoryview:
            try:
                return future.result(seconds)
            except FutureTimeoutError:
                self._cluster.refuse_hanging()
                raise LostError(
                    f"{self.name} has not answered the call `{what}` within {seconds:g} s{named}"
                ) from None
            except LostError as lost:
                raise LostError(f"{self.name} has ended in the call `{what}` ({lost})") from None

        return wait

    def close(self) -> None:
        with suppress(ActorError):
            self._cluster.send("kill", self._number)


class RayLauncher:
    """Starts processes on a cluster (`launcher.Launcher`); see `Cluster.launcher`."""

    def __init__(self, cluster: Cluster, cpus: float, places: tuple[int, str] | None):
        self._cluster, self._cpus, self._places = cluster, cpus, places

    def start(self, name: str) -> RayRemote:
        number = self._cluster.start(name, self._cpus, self._places)
        return RayRemote(self._cluster, name, number, self._cluster.deadline_s)

    @property
    def room(self) -> int:
        if self._places is not None:  # in the reservation
            return 1
        _, free = self._cluster.ask("resources")
        if not self._cluster.places(self._cpus):
            return 0
        return int((free.get("CPU", 0.0) + _LEAST_SHARE) / self._cpus)

    def shared(self, parts: Sequence[bytes | memoryview]) -> Shared:
        return self._cluster.share(parts)
