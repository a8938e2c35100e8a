"""Ends what a process has started when this process has ended, even if it was killed.

The program: `python -P -m oat.processes.guard MARK PARENT`. When its standard input or the process PARENT
ends, it kills the processes with the mark. A line of the input is a list: a sign, and what the guard does
beside this. With a minus, the line takes this back.

    ["+", "session", 17]        end this session too
    ["+", "folder", "/tmp/a"]   remove this folder afterwards
    ["+", "time", "MARK", 17, 5]    let the processes with this mark live on while process 17 does, at most
                                    5 seconds
"""

import json
import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from threading import RLock
from typing import Any

from oat.processes.marks import VARIABLE, end_marked, end_session, own_mark

_WATCH_S = 0.5
"""Time in seconds between two looks whether the parent is there."""


Guarded = tuple[str | float, ...]
"""A line of the input, without its sign."""


class Guard:
    """The guard of this process. It lives as long as something holds it."""

    def __init__(self) -> None:
        self._lock = RLock()
        self._holders = 0
        self._program: subprocess.Popen[bytes] | None = None

    def hold(self, *what: Guarded) -> None:
        """Begin to guard. To be called before a process is started.

        Args:
            what: what the guard does beside killing the processes with the mark.
        """
        with self._lock:
            self._holders += 1
            if self._program is None:
                self._program = _started()
            self.add(*what)

    def add(self, *what: Guarded) -> None:
        """Guard this too."""
        self._say("+", what)

    def release(self, *what: Guarded) -> None:
        """Say that a process that was started has ended, with all that it started."""
        with self._lock:
            self._say("-", what)
            self._holders -= 1
            if not self._holders and self._program is not None:
                program, self._program = self._program, None
                program.kill()
                program.communicate()

    def let_go(self) -> None:
        """Forget in a forked child what is the parent's."""
        program = self._program
        self.__init__()  # type: ignore[misc]
        if program is not None and program.stdin is not None:
            with suppress(OSError):
                program.stdin.close()

    def _say(self, sign: str, what: Sequence[Guarded]) -> None:
        with self._lock:
            assert self._program is not None, "it is held"
            assert self._program.stdin is not None, "a pipe was asked for"
            with suppress(BrokenPipeError):  # somebody has killed it; processes end with their connections
                self._program.stdin.write("".join(json.dumps([sign, *each]) + "\n" for each in what).encode())
                self._program.stdin.flush()


guard = Guard()
os.register_at_fork(after_in_child=guard.let_go)


def _started() -> subprocess.Popen[bytes]:
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "oat.processes.guard", own_mark(), str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        env=environment,
        start_new_session=True,
    )


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    mark, parent = sys.argv[1], int(sys.argv[2])
    text = b""
    while said := _waited(parent):
        text += said
    left: list[list[Any]] = []
    for line in text.decode().splitlines():
        with suppress(ValueError):  # the parent was killed while it wrote the last line
            sign, *what = json.loads(line)
            left.append(what) if sign == "+" else left.remove(what)
    end_marked(mark, {which: (its[0], its[1]) for what, which, *its in left if what == "time"})
    for what, which, *_ in left:
        if what == "session":
            end_session(which)
        elif what == "folder":
            shutil.rmtree(which, ignore_errors=True)


def _waited(parent: int) -> bytes:
    """Wait for input, and return it; b"" if the input or the parent has ended. A forked child of the parent
    may keep the input open."""
    while True:
        is_there = os.getppid() == parent
        if select.select([0], [], [], _WATCH_S if is_there else 0.0)[0]:
            return os.read(0, 2**16)
        if not is_there:
            return b""


if __name__ == "__main__":
    main()
