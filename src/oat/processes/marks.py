"""Finds and ends the processes that a process has started, and those that these have started. They have a
mark in an environment variable. The mark also identifies a process that has left its group or its session, or
has lost its parent."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

VARIABLE = "OAT_PROCESS"
_PATIENCE_S = 5.0
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


def marked(mark: str) -> list[int]:
    """Return the numbers of the living processes whose mark is `mark` or begins with it and a slash, except
    this process."""
    found = []
    for process in processes():
        with suppress(OSError):  # it has ended, or is another user's
            for value in Path(f"/proc/{process.number}/environ").read_bytes().split(b"\0"):
                name, _, its = value.decode(errors="replace").partition("=")
                if name == VARIABLE and f"{its}/".startswith(f"{mark}/"):
                    found.append(process.number)
    return [number for number in found if number != os.getpid()]


def end_marked(mark: str) -> None:
    """Kill the processes that `marked` returns, also those that they start meanwhile."""
    _end(lambda: marked(mark))


def end_session(session: int) -> None:
    """Kill all processes of a session."""
    _end(lambda: [each.number for each in processes() if each.session == session])


def end_group(group: int) -> None:
    """Kill all processes of a group."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def _end(found: Callable[[], list[int]]) -> None:
    until = time.monotonic() + _PATIENCE_S
    while (numbers := found()) and time.monotonic() < until:
        for number in numbers:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(number, signal.SIGKILL)
        time.sleep(0.01)
