"""Processes of this machine that are struck at planned calls. They are those of the product; only their fork
server is shared by the runs of a test process."""

import atexit
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oat.processes.forks import ForkServer
from oat.processes.local import LocalGpus, LocalRemote, Machine
from oat.processes.pipe import Pipe
from oat.runtime import worker

_END_S = 30.0
_servers: dict[int, ForkServer] = {}
"""The fork server of this process, by its number: a forked child has none."""


@dataclass(frozen=True)
class Kill:
    """A kill of the process that gets a call.

    Attributes:
        what: name of the call.
        number: how many calls of this name come before it, to all processes.
        after_s: seconds from the call to the kill; 0: the process is killed before it gets the call.
        signal: what it gets; SIGSTOP makes it hang.
    """

    what: str
    number: int
    after_s: float = 0.0
    signal: int = signal.SIGKILL


class StruckMachine:
    """Makes the machine of each run (`oat.processes.local.Machine`), and strikes its processes.

    Args:
        kills: the strikes.
        deadline_s: longest time in seconds for a reply.
        cpus: number of logical CPUs that the machine then has.
        most: most processes that it has room for at the same time.
        has_gpus: each process has a pretended GPU.

    Attributes:
        calls: number of calls so far, by name.
        killed: the kills whose call came.
        hits: how many of them met a process that was there.
        struck_at: the time of the last one.
        remotes: all processes so far.
    """

    def __init__(
        self,
        kills: Sequence[Kill] = (),
        *,
        deadline_s: float = 60.0,
        cpus: float = 8.0,
        most: int = 100,
        has_gpus: bool = False,
    ):
        self.has_gpus, self.most = has_gpus, most
        self.kills, self.deadline_s, self.cpus = list(kills), deadline_s, cpus
        self.calls: Counter[str] = Counter()
        self.killed: list[Kill] = []
        self.hits = 0
        self.struck_at = 0.0
        self.remotes: list[LocalRemote] = []

    def __call__(self, target: str, modules: Sequence[str], logs: Path, *_: float) -> Machine:
        if self.has_gpus:
            target = f"{__name__}:serve_with_gpu"
        return _Struck(self, target, modules, logs, self.deadline_s, self.cpus)

    def machine(self, logs: Path) -> Machine:
        """Return a machine without a run."""
        return self(worker.SERVE, [worker.__name__], logs)

    def before_call(self, remote: LocalRemote, what: str) -> None:
        """Strike a process that is about to get a call, if this is planned."""
        for kill in [each for each in self.kills if (each.what, each.number) == (what, self.calls[what])]:
            self.kills.remove(kill)
            self.killed.append(kill)
            if kill.after_s == 0.0:
                self._strike(remote, kill)
            else:
                threading.Timer(kill.after_s, self._strike, [remote, kill]).start()
            self.struck_at = time.monotonic()
        self.calls[what] += 1

    def left(self) -> list[int]:
        """Return the processes that are still there."""
        return [number for remote in self.remotes if (number := remote.number) and is_alive(number)]

    def _strike(self, remote: LocalRemote, kill: Kill) -> None:
        number = remote.number
        self.hits += number is not None and is_alive(number)
        with suppress(ProcessLookupError):
            os.kill(number or 0, kill.signal)
        until = time.monotonic() + _END_S
        while kill.signal == signal.SIGKILL and is_alive(number or 0) and time.monotonic() < until:
            time.sleep(0.002)


class _Struck(Machine):
    def __init__(self, plan: StruckMachine, *arguments: Any):
        self._plan = plan
        super().__init__(*arguments)

    def start(self, name: str, cpus: float, environment: Mapping[str, str]) -> LocalRemote:
        remote = super().start(name, cpus, environment)
        call = remote.call

        def planned(what: str, data: Any) -> Any:
            self._plan.before_call(remote, what)
            return call(what, data)

        remote.call = planned  # type: ignore[method-assign]
        self._plan.remotes.append(remote)
        return remote

    def room(self, cpus: float) -> int:
        return min(super().room(cpus), self._plan.most - len(self._plan.left()))

    def reserve(self, gpus: int, actors: Sequence[int], learner: int, *cpus: float) -> LocalGpus:
        assert self._plan.has_gpus
        return LocalGpus([str(gpu) for gpu in actors], 0, str(learner))

    def close(self) -> None:
        self._end_all()

    def _new_server(self) -> ForkServer:
        server = _servers.get(os.getpid())
        if server is None or not server.is_there:
            server = _servers[os.getpid()] = ForkServer(self._modules)
            atexit.register(server.close)
        return server


def is_alive(number: int) -> bool:
    """Return True if a process is there, and has not ended."""
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def serve_with_gpu(pipe: Pipe, order: Mapping[str, Any]) -> None:
    """Work for a run in a process with a pretended GPU."""
    from pretended import pretended_gpu

    with pretended_gpu():
        worker.serve(pipe, order)


def drawn_kills(seed: str, calls: Counter[str], count: int) -> list[Kill]:
    """Return kills at random calls of a run that made these calls, of every kind in turn. Every second one
    comes a little after its call."""
    draw, names = random.Random(seed), sorted(calls)
    draw.shuffle(names)
    kinds = [names[number % len(names)] for number in range(count)]
    return [
        Kill(kind, draw.randrange(calls[kind]), draw.random() * 0.02 * (number % 2))
        for number, kind in enumerate(kinds)
    ]
