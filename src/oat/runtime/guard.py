"""Ends the processes of a cluster when the process that started it has ended, even if that was killed.

This file is run as a program of its own: `python guard.py FOLDER PARENT`. Its standard input has a line with
the number of a session. When the input or the process PARENT ends, it kills every process of this session,
and removes FOLDER.
"""

import os
import select
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_PATIENCE_S = 5.0
_WATCH_S = 0.5
"""Time in seconds between two looks whether the parent is there."""


class Process(NamedTuple):
    """A living process: its number, its name, and the numbers of its parent and of its session."""

    number: int
    name: str
    parent: int
    session: int


def processes() -> Iterator[Process]:
    """Yield the living processes of this machine."""
    for place in Path("/proc").iterdir():
        if place.name.isdigit():
            with suppress(OSError):  # it has ended
                head, _, tail = (place / "stat").read_text().rpartition(")")
                state, parent, _, session, *_ = tail.split()
                if state not in "ZX":
                    name = head.partition("(")[2]
                    yield Process(int(place.name), name, int(parent), int(session))


def _waited(parent: int) -> bytes:
    """Wait for input, and return it; b"" if the input or the parent has ended. A forked child of the parent
    may keep the input open."""
    while True:
        is_there = os.getppid() == parent
        if select.select([0], [], [], _WATCH_S if is_there else 0.0)[0]:
            return os.read(0, 100)
        if not is_there:
            return b""


def end(session: int) -> None:
    """Kill all processes of a session, within `_PATIENCE_S` seconds."""
    until = time.monotonic() + _PATIENCE_S
    while time.monotonic() < until:
        found = [process.number for process in processes() if process.session == session]
        if not found:
            break
        for process in found:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.02)


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    folder, parent = sys.argv[1], int(sys.argv[2])
    if session := _waited(parent):
        _waited(parent)
        end(int(session))
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
