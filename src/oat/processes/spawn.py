"""Starts a process that begins with nothing of this one: a new interpreter, alone in its group."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from oat.files import start
from oat.processes.guard import Guarded, guard
from oat.processes.link import Link, Take
from oat.processes.marks import VARIABLE, end_group, end_marked, end_session, new_mark

_STDERR = 2
_PACKAGE = str(Path(__file__).parents[2])


def on_one_thread(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment for a process that computes on one thread, finds the modules of `oat` first, and
    writes no bytecode."""
    one = {name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "PYTHONDONTWRITEBYTECODE")}
    return {**environment, **one, "PYTHONPATH": _PACKAGE}


class Child:
    """A process that this one has started.

    Args:
        target: the function that it calls, as `package.module:name`, with the connection and the order.
        order: plain data for the function.
        take: gets what it sends (`Link`).
        environment: its environment.
        output: the descriptor of a file to which it writes what it prints; None: this process's stderr.
        most: largest number of bytes in a message that it sends.
        has_session: True: it begins a session; False: it begins a group.
        lingers_s: time that it has to end by itself when this process has ended.
        folder: its own folder, which is removed after it.

    Attributes:
        link: the connection.
        mark: see `marks.py`.

    Raises:
        OSError: the system cannot start it.
    """

    def __init__(
        self,
        target: str,
        order: Mapping[str, Any],
        take: Take,
        *,
        environment: Mapping[str, str],
        output: int | None = None,
        most: int | None = None,
        has_session: bool = False,
        lingers_s: float = 0.0,
        folder: str | None = None,
    ):
        self.mark, self._has_session, self._folder = new_mark(), has_session, folder
        self._guarded: list[Guarded] = [("folder", folder)] if folder is not None else []
        ours, theirs = socket.socketpair()
        guard.hold(*self._guarded)
        try:
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "oat.processes.child", str(theirs.fileno())],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=_STDERR if output is None else output,
                    stderr=output,
                    env={**environment, VARIABLE: self.mark},
                    cwd=start(),
                    # Ctrl-C in a terminal reaches this process only
                    process_group=None if has_session else 0,
                    start_new_session=has_session,
                )
        except BaseException:
            ours.close()
            self._forget()
            raise
        later: list[Guarded] = [("session", self.number)] if has_session else []
        later += [("time", self.mark, self.number, lingers_s)] if lingers_s else []
        guard.add(*later)
        self._guarded += later
        self._code: int | None = None
        self.link = Link(ours, take, most)
        self.link.send(msgspec.msgpack.encode({"target": target, "path": sys.path, **order}))

    @property
    def number(self) -> int:
        return self._process.pid

    def end(self, patience_s: float = 0.0) -> int:
        """Kill the process and those that it has started, and wait until it has ended. In a forked child of
        the process that started it, do nothing.

        Args:
            patience_s: time for it to end by itself before it is killed.

        Returns:
            The exit code, or minus the number of the signal that ended it.
        """
        if self.link.is_anothers:
            return 0
        if self._code is None:
            self.ends_within(patience_s)
            # before `wait`: afterwards, a new group may have the same number
            (end_session if self._has_session else end_group)(self._process.pid)
            self._code = self._process.wait()
            end_marked(self.mark)
            self.link.close()
            self._forget()
        return self._code

    def _forget(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        guard.release(*self._guarded)

    def ends_within(self, seconds: float) -> bool:
        """Wait at most so long until the process has ended by itself, and return whether it has."""
        until = time.monotonic() + seconds
        while not (has_ended := self.has_ended) and time.monotonic() < until:
            time.sleep(0.002)
        return has_ended

    @property
    def has_ended(self) -> bool:
        """True if the process has ended; others that it started may go on."""
        if self._code is not None or self.link.is_anothers:
            return True
        return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def ending(code: int) -> str:
    """Return how a process has ended, as the end of a sentence."""
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"ended its process (exit code {code})"
