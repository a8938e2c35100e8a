"""Runs on real Ray clusters: kills of their processes at planned calls, and what a cluster leaves behind."""

import os
import shutil
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from planned_kills import Kill

from oat.processes import ray_cluster as cluster
from oat.processes.ray_cluster import RayRemote

MARK = "OAT_TEST_CLUSTER"
"""An environment variable that the processes of a cluster inherit from a test."""
BROKER = "the broker"
_START_S = 60.0


class RayStrikes:
    """Strikes processes of the Ray clusters that this process uses, at planned calls. It also knows what
    these clusters leave behind.

    Args:
        folder: of a test; tells its processes from others.

    Attributes:
        kills: the strikes that are still to come.
        killed: those whose call came.
        hits: how many of them met a process that was there.
        calls: number of calls so far, by name.
        struck_at: the time of the last strike.
        doing: what else is done at a call, by its name and number.
    """

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, deadline_s: float = 60.0):
        self.deadline_s, self._folder = deadline_s, folder
        self.kills: list[Kill] = []
        self.killed: list[Kill] = []
        self.calls: Counter[str] = Counter()
        self.hits = 0
        self.struck_at = 0.0
        self.temporary = Path(tempfile.mkdtemp(prefix="t", dir="/tmp"))
        monkeypatch.setattr(cluster, "for_sockets", lambda: str(self.temporary))
        monkeypatch.setenv(MARK, str(folder))
        self.doing: dict[tuple[str, int], Callable[[], None]] = {}
        call = RayRemote.call

        def planned(remote: RayRemote, what: str, data: Any) -> Any:
            self._before(remote.name, what)
            return call(remote, what, data)

        monkeypatch.setattr(RayRemote, "call", planned)

    def plan(self, kills: Sequence[Kill]) -> None:
        """Plan strikes of the next run."""
        self.kills, self.killed, self.calls, self.doing = list(kills), [], Counter(), {}
        self.hits = 0

    def left(self) -> list[int]:
        """Return the processes of clusters that are still there."""
        return [process for process in marked(str(self._folder)) if process != os.getpid()]

    def files_left(self) -> list[str]:
        """Return the temporary files of clusters that are still there."""
        return [place.name for place in self.temporary.iterdir()]

    def close(self) -> None:
        for process in self.left():
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        shutil.rmtree(self.temporary, ignore_errors=True)

    def _before(self, name: str, what: str) -> None:
        for kill in [each for each in self.kills if (each.what, each.number) == (what, self.calls[what])]:
            self.kills.remove(kill)
            self.killed.append(kill)
            striker = threading.Thread(target=self._strike, args=[name, kill])
            striker.start()
            if kill.after_s == 0.0 and what not in ("prepare", "make"):
                striker.join()
        if do := self.doing.pop((what, self.calls[what]), None):
            do()
            self.struck_at = time.monotonic()
        self.calls[what] += 1

    def worker(self, name: str) -> int | None:
        """Return the process of an actor, a learner or a client, which writes into a file of its name; None
        if it has not opened this file yet."""
        for process in self.left():
            with suppress(OSError):
                if os.readlink(f"/proc/{process}/fd/1").endswith(f"/logs/{name.replace(' ', '-')}.log"):
                    return process
        return None

    def _strike(self, name: str, kill: Kill) -> None:
        time.sleep(kill.after_s)
        until = time.monotonic() + _START_S
        while (process := self.worker(name)) is None and time.monotonic() < until:
            time.sleep(0.02)
        if process is not None:
            with suppress(ProcessLookupError):
                os.kill(process, kill.signal)
                self.hits += 1
            self.struck_at = time.monotonic()


def marked(mark: str) -> Iterator[int]:
    """Yield the living processes that have inherited a mark from a test."""
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            state = (place / "stat").read_text().rpartition(")")[2].split()[0]
            if state not in "ZX" and f"{MARK}={mark}\0".encode() in (place / "environ").read_bytes():
                yield int(place.name)


def part(strikes: RayStrikes, name: str) -> int:
    """Return a part of a cluster: the broker, or a process by the end of its command or by its program, such
    as raylet."""
    for process in strikes.left():
        words = Path(f"/proc/{process}/cmdline").read_text().split("\0")
        if name in words or Path(words[0]).name == name:
            return process
        # the kit starts the broker, whose command does not name it; what it starts does not write here
        is_of_kit = Path(words[0]).name.startswith("python") and "oat.processes.child" in words
        if name == BROKER and is_of_kit and os.readlink(f"/proc/{process}/fd/1").endswith("/cluster.log"):
            return process
    raise AssertionError(f"no process {name}")


@pytest.fixture
def strikes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RayStrikes]:
    """Strikes of the clusters of one test."""
    made = RayStrikes(tmp_path, monkeypatch, deadline_s=20.0)
    yield made
    made.close()


def gone(found: Any, seconds: float) -> bool:
    """Return True if `found()` gets empty within so many seconds."""
    until = time.monotonic() + seconds
    while (has := found()) and time.monotonic() < until:
        time.sleep(0.05)
    return not has
