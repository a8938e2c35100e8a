"""Ends the processes of a cluster when the process that started it has ended, even if that was killed.

This file is run as a program of its own: `python guard.py FOLDER`. Its standard input has the number of a
session. When the input ends, it kills every process of this session, and removes FOLDER.
"""

import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_PATIENCE_S = 5.0


def members(session: int) -> Iterator[int]:
    """Yield the numbers of the living processes of a session."""
    for place in Path("/proc").iterdir():
        if place.name.isdigit():
            with suppress(OSError):  # it has ended
                state, _, _, its, *_ = (place / "stat").read_text().rpartition(")")[2].split()
                if int(its) == session and state not in "ZX":
                    yield int(place.name)


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    session = sys.stdin.read()
    until = time.monotonic() + _PATIENCE_S
    while session and (found := list(members(int(session)))) and time.monotonic() < until:
        for process in found:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.02)
    shutil.rmtree(sys.argv[1], ignore_errors=True)


if __name__ == "__main__":
    main()
