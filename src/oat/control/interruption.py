"""SIGTERM and Ctrl-C ask a run to end early.

* While a step samples or waits for answers, and during an evaluation, the first signal ends the run at once.
  No recorded question or answer is lost. The loop saves the other states as they were before the sampling or
  the evaluation.
* If an evaluation was interrupted, the checkpoint also has the known metrics of its row. The next process
  evaluates again and completes the row.
* If a step has begun to learn, it completes its update before the run ends.
* A second Ctrl-C ends the process at once. A checkpoint that is being written is still completed. The work
  since the last checkpoint is lost, but recorded answers are not.
* A second SIGTERM changes nothing, because a process manager may send several.
"""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from oat.errors import Again, Interrupted


class Interruption:
    """A request to end the run. Signals make such a request only within the context `heard`."""

    def __init__(self) -> None:
        self._asked: int | None = None
        self._at_once = False

    @contextmanager
    def heard(self) -> Iterator[None]:
        """Handle SIGTERM and Ctrl-C within this context. On any thread except the main one, do nothing."""
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
        """Let a signal end the run at once within this context. If a signal came earlier, the run ends when
        the context begins.

        Raises:
            Interrupted: a signal came. The error is raised at the place where the code is at that moment.
        """
        self._at_once = True
        try:
            self.check_interrupt()
            yield
        finally:
            self._at_once = False

    def check_interrupt(self) -> None:
        """If the run was asked to end and the context `at_once` is open, raise `Interrupted`. This
        may be the second time, because user code may have caught the first `Interrupted`.

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
