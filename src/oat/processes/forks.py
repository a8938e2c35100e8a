"""Processes that are forked from one that has imported what they need: they start at once, and share its
memory."""

import os
import socket
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from itertools import count
from threading import RLock
from typing import Any

import msgspec

from oat.files import start
from oat.processes.guard import guard
from oat.processes.link import Link, Take
from oat.processes.marks import end_group, end_marked, new_mark
from oat.processes.pipe import Message
from oat.processes.spawn import Child, on_one_thread

_PATIENCE_S = 5.0
"""Longest time in seconds that a server has to end a process, before this process does."""


class ForkServer:
    """A process that forks others.

    Args:
        modules: what it imports first.
        log: path of a file for what it prints; "": where this process prints.

    Attributes:
        hangs: True once it has not ended a process in time. It is waited for no more.
    """

    def __init__(self, modules: Sequence[str], log: str = ""):
        self.hangs = False
        self._lock, self._numbers = RLock(), count()
        self._forked: dict[int, Forked] = {}
        order = {"modules": list(modules), "log": log}
        self._child = Child(
            "oat.processes.fork_server:serve", order, self._take, environment=on_one_thread(os.environ)
        )
        self.is_there = True

    def fork(
        self,
        target: str,
        order: Mapping[str, Any],
        take: Take,
        *,
        log: str = "",
        environment: Mapping[str, str] | None = None,
    ) -> "Forked":
        """Return a new process, at once.

        Args:
            target, order, take: see `Child`.
            log: path of a file to whose end it writes what it prints; "": where the server does.
            environment: variables that it has beside those of the server.
        """
        ours, theirs = socket.socketpair()
        with self._lock:
            number = next(self._numbers)
            forked = self._forked[number] = Forked(self, number, Link(ours, take))
            if not self.is_there:
                forked.ended(None)
        request = {
            **order,
            "what": "fork",
            "number": number,
            "target": target,
            "mark": forked.mark,
            "log": log,
            "environment": dict(environment or {}),
            "path": sys.path,
            "folder": str(start()),
        }
        sent = self._child.link.send(msgspec.msgpack.encode(request), descriptors=[theirs.fileno()])
        sent.add_done_callback(lambda _: theirs.close())
        return forked

    def ask_to_end(self, number: int) -> None:
        """Let the server kill a process and its group."""
        self._child.link.send(msgspec.msgpack.encode({"what": "end", "number": number}))

    def close(self) -> None:
        """End the server, and the processes that it has forked and that have not ended."""
        for forked in list(self._forked.values()):
            forked.end()
        self._child.end()

    def _take(self, message: Message | None) -> None:
        """Take what the server says of a process."""
        if message is None:
            with self._lock:
                self.is_there = False
                left = list(self._forked.values())
            for forked in left:
                forked.ended(None)
            return
        said = msgspec.msgpack.decode(message.head)
        forked = self._forked[said["number"]]
        if "process" in said:
            forked.began(said["process"])
        else:
            forked.ended(said["code"])
            self._forked.pop(said["number"], None)


class Forked:
    """A process that a server has forked.

    Attributes:
        link: the connection.
        mark: see `marks.py`.
    """

    def __init__(self, server: ForkServer, number: int, link: Link):
        guard.hold()
        self.link, self.mark = link, new_mark()
        self._server, self._number = server, number
        self._process: Future[int | None] = Future()
        self._code: Future[int | None] = Future()
        self._lock, self._is_over = RLock(), False

    def began(self, process: int) -> None:
        """Note the number of the process, which is also that of its group."""
        self._process.set_result(process)

    def ended(self, code: int | None) -> None:
        """Note that the process has ended, or that its server has, and nobody knows (None)."""
        if not self._code.done():
            self._code.set_result(code)

    @property
    def has_begun(self) -> bool:
        """True if the server has made the process."""
        return self._process.done()

    def number(self, within_s: float | None = None) -> int | None:
        """Wait until the process has begun, and return its number; None if it never will."""
        wait([self._process, self._code], within_s, FIRST_COMPLETED)
        return self._process.result() if self._process.done() else None

    def code(self, within_s: float) -> int | None:
        """Return the exit code, or minus the number of the signal that ended the process; None if it is not
        known within this time."""
        with suppress(FutureTimeoutError):
            return self._code.result(within_s)
        return None

    def end(self) -> None:
        """Kill the process and those that it has started, and wait until they have ended."""
        with self._lock:
            if self._is_over or self.link.is_anothers:
                return
            self._is_over = True
        self._server.ask_to_end(self._number)
        self.link.close()
        if self.code(0.0 if self._server.hangs else _PATIENCE_S) is None:
            self._server.hangs = True  # or it has ended
            if self._process.done() and (number := self._process.result()):
                end_group(number)
        end_marked(self.mark)
        guard.release()
