"""Finds and kills the processes that a sink has started. They have a mark in an environment variable. The
mark also identifies a process that has left the sink's process group or session, or has lost its parent."""

import os
import signal
from contextlib import suppress
from pathlib import Path

VARIABLE = "OAT_SINK"


def marked(mark: str) -> list[int]:
    """Return the ids of the processes that have `mark` in the environment variable `VARIABLE`, except the id
    of the calling process. If the system has no /proc, return an empty list."""
    wanted = f"{VARIABLE}={mark}".encode()
    found = []
    for place in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # the process has ended, or is another user's
            if wanted in place.read_bytes().split(b"\0"):
                found.append(int(place.parent.name))
    return [process for process in found if process != os.getpid()]


def end_all_marked(mark: str) -> None:
    """Kill the processes that `marked` returns."""
    for process in marked(mark):
        with suppress(ProcessLookupError, PermissionError):
            os.kill(process, signal.SIGKILL)
