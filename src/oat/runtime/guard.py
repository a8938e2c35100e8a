"""Ends the processes of a cluster when the process that started it has ended, even if that was killed.

This file is run as a program of its own: `python guard.py FOLDER`. It waits until its standard input ends.
Then it kills every process but its parent that has a file in FOLDER open, as all processes of a cluster have,
and removes FOLDER.
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


def users(folder: str) -> Iterator[int]:
    """Yield the numbers of the processes that have a file in the folder open."""
    for place in Path("/proc").iterdir():
        if place.name.isdigit():
            with suppress(OSError):  # it has ended, or belongs to another user
                if any(_target(file).startswith(f"{folder}/") for file in (place / "fd").iterdir()):
                    yield int(place.name)


def _target(link: Path) -> str:
    try:
        return os.readlink(link)
    except OSError:
        return ""


def main() -> None:
    (folder,), parent = sys.argv[1:], os.getppid()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read()
    until = time.monotonic() + _PATIENCE_S
    while (found := set(users(folder)) - {parent}) and time.monotonic() < until:
        for process in found:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.05)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
