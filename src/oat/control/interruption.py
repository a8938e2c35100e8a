"""SIGTERM and Ctrl-C ask a run to end early.

While a step or an evaluation samples and waits for answers, the first signal ends the run at once. No weights
change in that time, and the ledger keeps every question and answer that it has recorded. But the prompt
cursor and the collector's count of due questions do change. So the loop saves the states from before the
interrupted part. If an evaluation was interrupted, the checkpoint also has the metrics of its row so far. The
next process first evaluates again and completes that row.

A step that has begun to learn completes its update before the run ends.

A second Ctrl-C ends the process where it is, as a kill would, except that a checkpoint being written is
completed. The work since the last checkpoint is lost, but no recorded answer is. A second SIGTERM changes
nothing, since a process manager may send several.
"""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from oat.errors import Again, Interrupted


class Interruption:
    """A request to end the run. Signals make a request only within `heard`."""

    def __init__(self) -> None:
        self._asked: int | None = None
        self._at_once = False

    @contextmanager
    def heard(self) -> Iterator[None]:
        """Handle signals within this context. On a thread other than the main one it does nothing."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        self._process, self._before = (
            os.getpid(),
            {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)},
        )
        for number in self._before:
            signal.signal(number, self._hear)
        try:
            yield
        finally:
            for number, handler in self._before.items():
                signal.signal(number, handler)

    def ask(self) -> None:
        """Ask the run to end, as SIGTERM does."""
        self._ask(signal.SIGTERM)

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Let a signal end the run at once within this context. A signal that came before the context ends
        the run at its beginning.

        Raises:
            Interrupted: a signal came. It is raised where the code within the context is at that moment.
        """
        self._at_once = True
        try:
            self.check_interrupt()
            yield
        finally:
            self._at_once = False

    def check_interrupt(self) -> None:
        """Raise `Interrupted` within `at_once` if the run was asked to end. User code may have caught the
        first one.

        Raises:
            Interrupted: a signal or a callback has asked the run to end.
        """
        if self._asked is not None and self._at_once:
            raise Interrupted(self._asked)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() == self._process:
            self._ask(number)
        else:  # a process forked by user code, such as a worker of `multiprocessing`; SIGTERM has to end it
            signal.signal(number, self._before[signal.Signals(number)])
            signal.raise_signal(number)

    def _ask(self, number: int) -> None:
        if self._asked is not None:
            if number == signal.SIGINT:
                raise Again
            return
        self._asked = number
        if self._at_once:
            raise Interrupted(number)
