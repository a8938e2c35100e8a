"""Finds and kills processes that a sink has started, by a variable in their environment that no others have:
also those that left its process group or session, and those whose parent has gone."""

import os
import signal
from contextlib import suppress
from pathlib import Path

VARIABLE = "OAT_SINK"


def marked(mark: str) -> list[int]:
    """The processes with this mark, without this one; none if the system has no /proc."""
    wanted = f"{VARIABLE}={mark}".encode()
    found = []
    for place in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # it has ended meanwhile, or is another user's
            if wanted in place.read_bytes().split(b"\0"):
                found.append(int(place.parent.name))
    return [process for process in found if process != os.getpid()]


def end_all_marked(mark: str) -> None:
    """Kill the processes with this mark, except this one."""
    for process in marked(mark):
        with suppress(ProcessLookupError, PermissionError):
            os.kill(process, signal.SIGKILL)
