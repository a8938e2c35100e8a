"""Finds and ends the processes that a process has started, and those that these have started. They have a
mark in an environment variable. The mark also identifies a process that has left its group or its session, or
has lost its parent."""

import os
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

VARIABLE = "OAT_PROCESS"
_PATIENCE_S = 5.0
_TICK_S, _LONG_TICK_S = 0.02, 0.2
_own: dict[int, str] = {}
_numbers = count()


class Seen(NamedTuple):
    """A living process: its number, its name, and the numbers of its parent, of its group and of its
    session."""

    number: int
    name: str
    parent: int
    group: int
    session: int


def own_mark() -> str:
    """Return the mark of this process: that of the process that started it, and a part of its own. The marks
    of all processes that it starts begin with it."""
    if os.getpid() not in _own:  # a forked child has another
        _own[os.getpid()] = "/".join(filter(None, (os.environ.get(VARIABLE), uuid4().hex)))
    return _own[os.getpid()]


def new_mark() -> str:
    """Return a mark for a process that this one starts."""
    return f"{own_mark()}/{next(_numbers)}"


def processes() -> Iterator[Seen]:
    """Yield the living processes of this machine. Without /proc, yield none."""
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            head, _, tail = (place / "stat").read_text().rpartition(")")
            state, parent, group, session, *_ = tail.split()
            if state not in "ZX":
                name = head.partition("(")[2]
                yield Seen(int(place.name), name, int(parent), int(group), int(session))


def marked(mark: str) -> dict[int, str]:
    """Return the living processes whose mark is `mark` or begins with it and a slash, except this process:
    the number of each, and its mark."""
    found = {}
    for process in processes():
        with suppress(OSError):  # it has ended, or is another user's
            for value in Path(f"/proc/{process.number}/environ").read_bytes().split(b"\0"):
                name, _, its = value.decode(errors="replace").partition("=")
                if name == VARIABLE and _is_below(its, mark):
                    found[process.number] = its
    return {number: its for number, its in found.items() if number != os.getpid()}


def end_marked(mark: str, times: Mapping[str, tuple[int, float]] | None = None) -> None:
    """Kill the processes that `marked` returns, also those that they start meanwhile.

    Args:
        times: for a mark, the number of its first process, and how many seconds the processes with this mark
            live on while the first one does.
    """
    begin = time.monotonic()
    times = times or {}
    until = begin + max((seconds for _, seconds in times.values()), default=0.0) + _PATIENCE_S
    while (found := marked(mark)) and (now := time.monotonic()) < until:
        living = [
            which for which, (first, seconds) in times.items() if first in found and now < begin + seconds
        ]
        over = [number for number, its in found.items() if not any(_is_below(its, which) for which in living)]
        for number in over:
            _kill(number)
        time.sleep(_TICK_S if over else _LONG_TICK_S)


def end_session(session: int) -> None:
    """Kill all processes of a session."""
    until = time.monotonic() + _PATIENCE_S
    while (found := [each for each in processes() if each.session == session]) and time.monotonic() < until:
        for process in found:
            _kill(process.number)
        time.sleep(_TICK_S)


def end_group(group: int) -> None:
    """Kill all processes of a group."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def _kill(number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.kill(number, signal.SIGKILL)


def _is_below(its: str, mark: str) -> bool:
    return f"{its}/".startswith(f"{mark}/")
