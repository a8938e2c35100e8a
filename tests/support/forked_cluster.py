"""A cluster whose processes come from a fork server. They start at once, and are real: they can be killed. A
test can plan kills by the call."""

import multiprocessing
import os
import random
import signal
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from oat.errors import LostError

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["oat.assemble.actor_side", "oat.assemble.run"])


def start_fork_server() -> None:
    """Start the fork server if it does not run yet, for forked children too (`share_fork_server`).

    The path of its socket has to be short (107 bytes on Linux), and the temporary folder may have a long
    name."""
    usual = tempfile.gettempdir()
    tempfile.tempdir = usual if len(usual) < 60 else "/tmp"
    try:
        forkserver._forkserver.ensure_running()  # type: ignore[attr-defined]
    finally:
        tempfile.tempdir = usual


def share_fork_server() -> None:
    """Let a forked child use the fork server of its parent, for which only the parent can wait."""
    forkserver._forkserver.ensure_running = lambda: None  # type: ignore[attr-defined]


def _work(pipe: Connection, log: str, has_gpu: bool) -> None:
    import torch
    from pretended import pretended_gpu

    from oat.runtime.worker import Worker

    torch.set_num_threads(1)
    with pretended_gpu() if has_gpu else nullcontext():
        worker = Worker(log)
        while True:
            try:
                data = pipe.recv_bytes()
            except EOFError:
                return
            pipe.send_bytes(worker.call(data))


class ForkedRemote:
    """A process that a fork server made (`crew.Remote`)."""

    def __init__(self, cluster: "ForkedCluster", name: str, log: str):
        self.name, self._cluster = name, cluster
        self._pipe, other = _CONTEXT.Pipe()
        start_fork_server()
        self.process = _CONTEXT.Process(target=_work, args=(other, log, cluster.has_gpus), daemon=True)
        self.process.start()
        other.close()
        self._replies: deque[bytes] = deque()
        self._sent = self._taken = 0
        self._lock = threading.Lock()

    def call(self, what: str, data: Any) -> Callable[[], bytes]:
        self._cluster.before_call(self, what)
        with suppress(OSError):  # the wait for the reply says so
            self._pipe.send_bytes(data)
        place, self._sent = self._sent, self._sent + 1

        def wait() -> bytes:
            with self._lock:
                assert place >= self._taken, "replies are awaited in the order of the calls"
                while self._taken <= place:
                    reply = self._received(what)
                    self._taken += 1
                return reply

        return wait

    def _received(self, what: str) -> bytes:
        until = time.monotonic() + self._cluster.deadline_s
        try:
            while not self._pipe.poll(0.05):
                if time.monotonic() > until:
                    raise LostError(
                        f"{self.name} has not answered the call `{what}` within {self._cluster.deadline_s} s"
                    )
                if not self.process.is_alive() and not self._pipe.poll(0):
                    raise EOFError
            return self._pipe.recv_bytes()
        except (EOFError, OSError):
            raise LostError(f"{self.name} has ended in the call `{what}` (killed)") from None

    def signal(self, number: int) -> None:
        self._cluster.hits += self.process.is_alive()
        with suppress(ProcessLookupError):
            os.kill(self.process.pid or 0, number)
        if number == signal.SIGKILL:
            self.process.join()

    def close(self) -> None:
        self.process.kill()
        self.process.join()


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


class ForkedGpus:
    """Stands for `oat.processes.ray_cluster.Reservation`."""

    actors = learner = None

    def hold(self) -> int:
        return 0

    def close(self) -> None:
        """Do nothing."""


class ForkedCluster:
    """Stands for `oat.processes.ray_cluster.Cluster`.

    Args:
        most: most processes that it has room for at the same time.
        has_gpus: each process has a pretended GPU.

    Attributes:
        calls: number of calls so far, by name.
        killed: the kills whose call came.
        hits: how many of them met a process that was there.
        struck_at: the time of the last one.
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
        self.remotes: list[ForkedRemote] = []
        self._logs: Path | None = None

    def __call__(self, address: str | None, logs: Path, deadline_s: float) -> "ForkedCluster":
        self._logs = logs
        return self

    def refuse_too_many(self, cpus: Sequence[float], whose: str) -> None:
        assert sum(cpus) <= self.cpus, whose

    def reserve(
        self, gpus: int, actors: Sequence[int], learner: int, cpus: float, learner_cpus: float
    ) -> "ForkedGpus":
        assert self.has_gpus
        return ForkedGpus()

    def launcher(self, cpus: float, places: None = None) -> "ForkedCluster":
        return self

    @property
    def room(self) -> int:
        return self.most - len(self.left())

    def start(self, name: str) -> ForkedRemote:
        log = "" if self._logs is None else str(self._logs / f"{name.replace(' ', '-')}.log")
        remote = ForkedRemote(self, name, log)
        self.remotes.append(remote)
        return remote

    def shared(self, parts: Sequence[bytes | memoryview]) -> bytes:
        return b"".join(parts)

    def before_call(self, remote: ForkedRemote, what: str) -> None:
        for kill in [each for each in self.kills if (each.what, each.number) == (what, self.calls[what])]:
            self.kills.remove(kill)
            self.killed.append(kill)
            self.struck_at = time.monotonic()
            if kill.after_s == 0.0:
                remote.signal(kill.signal)
            else:
                threading.Timer(kill.after_s, remote.signal, [kill.signal]).start()
        self.calls[what] += 1

    def left(self) -> list[int]:
        """Return the processes that are still there."""
        return [remote.process.pid or 0 for remote in self.remotes if remote.process.is_alive()]

    def close(self) -> None:
        for remote in self.remotes:
            if remote.process.is_alive():
                remote.close()


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
