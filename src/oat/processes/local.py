"""Processes of this machine that answer calls."""

import math
import mmap
import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from signal import SIGKILL
from threading import RLock, Thread
from typing import Any

from oat.errors import ConfigError, LostError
from oat.processes.forks import ForkServer
from oat.processes.gpus import VISIBLE, seen_gpus
from oat.processes.launcher import FEWER_CPUS, Pending
from oat.processes.pipe import Message, Pipe
from oat.processes.spawn import ending

_START_S = 120.0
"""Longest time in seconds until a process has started. Large imports take long."""
_CODE_S = 1.0
"""Longest time in seconds until it is known how a process has ended."""
_SHARED = b"shared"
"""The head of a message whose data is in a file of the memory."""


class Machine:
    """This machine, on which a run starts processes.

    Args:
        target: the function in which they answer calls, as `package.module:name` (`answer_calls`).
        modules: what they import.
        logs: folder with a file for each of them, of what it prints.
        deadline_s: longest time in seconds for a reply.
        cpus: number of logical CPUs that they share.
    """

    def __init__(self, target: str, modules: Sequence[str], logs: Path, deadline_s: float, cpus: float):
        self.deadline_s = deadline_s
        self._target, self._modules, self._logs, self._cpus = target, modules, logs, cpus
        self._lock, self._server = RLock(), self._new_server()
        self._taken: dict[LocalRemote, float] = {}

    def launcher(self, cpus: float, places: Sequence[Mapping[str, str]] | None = None) -> "LocalLauncher":
        """Return what starts processes of one kind.

        Args:
            cpus: logical CPUs that each of them takes.
            places: the environments of the places that they may have, one each; None: there are as many as
                the CPUs allow.
        """
        return LocalLauncher(self, cpus, places)

    def refuse_too_many(self, cpus: Sequence[float], whose: str) -> None:
        """Refuse more processes than there are free logical CPUs for.

        Args:
            cpus: logical CPUs of each process.
            whose: their parts, in words.

        Raises:
            ConfigError: there are too few.
        """
        if (need := math.fsum(cpus)) > self._cpus:
            raise ConfigError(
                f"{whose} need {need:g} logical CPUs, and this machine has {self._cpus:g}; {FEWER_CPUS}"
            )

    def reserve(
        self, gpus: int, actors: Sequence[int], learner: int, cpus: float, learner_cpus: float
    ) -> "LocalGpus":
        """Give the processes of a run the GPUs that this process sees.

        Args:
            gpus: number of GPUs that the run asks for, of which some may stay idle.
            actors, learner: the GPU of each actor, and that of the learner.

        Raises:
            ConfigError: there are too few.
        """
        if len(seen := seen_gpus()) < gpus:
            raise ConfigError(
                f"compute.gpus is {gpus}, and this process sees {len(seen)} GPUs; lower compute.gpus, or "
                "use a Ray cluster with more"
            )
        return LocalGpus([seen[gpu] for gpu in actors], learner, seen[learner])

    def start(self, name: str, cpus: float, environment: Mapping[str, str]) -> "LocalRemote":
        with self._lock:
            if not self._server.is_there:
                self._server.close()
                self._server = self._new_server()
            remote = LocalRemote(self, self._server, name, self._log(name), environment)
            self._taken[remote] = cpus
            return remote

    def room(self, cpus: float) -> int:
        """Return how many further processes with so many CPUs each have room."""
        with self._lock:
            return max(0, math.floor((self._cpus - math.fsum(self._taken.values())) / cpus + 1e-9))

    def give_back(self, remote: "LocalRemote") -> None:
        """Note that a process has ended."""
        with self._lock:
            self._taken.pop(remote, None)

    def doubt(self, server: ForkServer) -> None:
        """Use a server no more from which a process has not started in time."""
        server.is_there = False

    def close(self) -> None:
        """End all processes."""
        self._end_all()
        self._server.close()

    def _end_all(self) -> None:
        with self._lock:
            for remote in list(self._taken):
                remote.close()

    def _new_server(self) -> ForkServer:
        return ForkServer(self._modules, self._log("fork server"))

    def _log(self, name: str) -> str:
        return str(self._logs / f"{name.replace(' ', '-')}.log")


class LocalGpus:
    """The GPUs of a run.

    Attributes:
        actors: the places of the actors.
        learner: the place of the learner.
    """

    def __init__(self, actors: Sequence[str], number: int, learner: str):
        self.actors, self.learner = [{VISIBLE: gpu} for gpu in actors], [{VISIBLE: learner}]
        self._number = number

    def hold(self) -> int:
        """Return the index of the GPU of the learner among those that this process sees."""
        return self._number

    def close(self) -> None:
        """Do nothing."""


class LocalLauncher:
    """Starts processes of one kind on this machine (`launcher.Launcher`); see `Machine.launcher`."""

    def __init__(self, machine: Machine, cpus: float, places: Sequence[Mapping[str, str]] | None):
        self._machine, self._cpus, self._places = machine, cpus, places
        self._used: dict[int, LocalRemote] = {}

    def start(self, name: str) -> "LocalRemote":
        if self._places is None:
            return self._machine.start(name, self._cpus, {})
        free = [
            each for each in range(len(self._places)) if each not in self._used or self._used[each].is_closed
        ]
        place = free[0] if free else 0
        self._used[place] = self._machine.start(name, self._cpus, self._places[place])
        return self._used[place]

    @property
    def room(self) -> int:
        return 1 if self._places is not None else self._machine.room(self._cpus)

    def shared(self, parts: Sequence[bytes | memoryview]) -> "Shared":
        return Shared(parts)


class Shared:
    """A call in a file of the memory, which several processes map. It goes when nobody has it any more."""

    def __init__(self, parts: Sequence[bytes | memoryview]):
        self.descriptor = os.memfd_create("oat")
        for part in parts:
            view = memoryview(part).cast("B")
            while view:
                view = view[os.write(self.descriptor, view) :]

    def __del__(self) -> None:
        os.close(self.descriptor)


class LocalRemote:
    """A process of this machine (`launcher.Remote`)."""

    def __init__(
        self, machine: Machine, server: ForkServer, name: str, log: str, environment: Mapping[str, str]
    ):
        self.name = name
        self._machine, self._server = machine, server
        self._lock = RLock()
        self._waiting: deque[Future[memoryview]] = deque()
        self._lost: str | None = None
        self.is_closed = False
        self._process = server.fork(machine._target, {}, self._take, log=log, environment=environment)

    @property
    def number(self) -> int | None:
        """The number of the process, when it has begun; None if it never will."""
        return self._process.number()

    def call(self, what: str, data: Any) -> Pending:
        future = Future[memoryview]()
        with self._lock:
            if self._lost is not None:
                future.set_exception(LostError(self._lost))
            else:
                self._waiting.append(future)
                if isinstance(data, Shared):
                    sent = self._process.link.send(_SHARED, descriptors=[data.descriptor])
                    sent.add_done_callback(lambda _, kept=data: None)  # type: ignore[misc]
                else:
                    self._process.link.send(b"", [data])
        seconds, named = self._machine.deadline_s, " (compute.deadline_s)"
        if what == "prepare" and seconds > _START_S:
            seconds, named = _START_S, ", since it has not started"

        def wait() -> memoryview:
            try:
                return future.result(seconds)
            except FutureTimeoutError:
                if not self._process.has_begun:
                    self._machine.doubt(self._server)
                raise LostError(
                    f"{self.name} has not answered the call `{what}` within {seconds:g} s{named}"
                ) from None
            except LostError as lost:
                raise LostError(f"{self.name} has ended in the call `{what}` ({lost})") from None

        return wait

    def close(self) -> None:
        self.is_closed = True
        self._process.end()
        self._machine.give_back(self)

    def _take(self, message: Message | None) -> None:
        if message is not None:
            assert message.data is not None, "a reply has data"
            with self._lock:
                self._waiting.popleft().set_result(message.data)
            return
        code = self._process.code(_CODE_S)
        with self._lock:
            self._lost = "it has ended, nobody knows how" if code is None else f"it {ending(code)}"
            while self._waiting:
                self._waiting.popleft().set_exception(LostError(self._lost))


def answer_calls(pipe: Pipe, answer: Callable[[memoryview], Sequence[bytes | memoryview]]) -> None:
    """Answer calls until this process is killed. It kills itself and its group when the connection ends, also
    in the middle of a call.

    Args:
        answer: function from the bytes of a call to the parts of its reply.
    """
    calls = SimpleQueue[memoryview]()
    Thread(target=_hear, args=(pipe, calls), daemon=True).start()
    while True:
        reply = answer(calls.get())
        with suppress(OSError):
            pipe.send(b"", reply)


def _hear(pipe: Pipe, calls: "SimpleQueue[memoryview]") -> None:
    with suppress(EOFError, OSError):
        while True:
            message = pipe.receive()
            if bytes(message.head) != _SHARED:
                assert message.data is not None, "a call has data"
                calls.put(message.data)
                continue
            (descriptor,) = message.descriptors
            calls.put(memoryview(mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)))
            os.close(descriptor)
    os.killpg(0, SIGKILL)
