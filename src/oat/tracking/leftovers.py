"""Processes that were started for a sink, by a variable of their environment that nothing else has: also
those that left its group or its session, and those whose parent has gone."""

import os
import signal
from contextlib import suppress
from pathlib import Path

VARIABLE = "OAT_SINK"


def marked(mark: str) -> list[int]:
    """The processes with this mark but for this one; none where the system has no /proc."""
    wanted = f"{VARIABLE}={mark}".encode()
    found = []
    for place in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # it has ended meanwhile, or is another user's
            if wanted in place.read_bytes().split(b"\0"):
                found.append(int(place.parent.name))
    return [process for process in found if process != os.getpid()]


def end_all_marked(mark: str) -> None:
    """Kill the processes with this mark but for this one."""
    for process in marked(mark):
        with suppress(ProcessLookupError, PermissionError):
            os.kill(process, signal.SIGKILL)
