"""A run that is asked to end before its end: by SIGTERM, or by Ctrl-C.

While a step samples and waits for answers, and while an evaluation does, the first signal ends it at once:
nothing moves there that a checkpoint holds, and what was asked and answered is in the ledger. A step that has
begun to learn learns to its end first. A second Ctrl-C ends the process where it stands, as a kill would, but
for a checkpoint that is being written; that costs the work since the last one, and no answer. Another SIGTERM
changes nothing, since whoever ends processes may send several.
"""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from oat.errors import Again, Interrupted


class Interruption:
    """What a run knows of signals; nothing, unless they are `heard`."""

    def __init__(self) -> None:
        self._asked: int | None = None
        self._at_once = False

    @contextmanager
    def heard(self) -> Iterator[None]:
        """Within it signals are the run's; only the main thread can hear them."""
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
        """As SIGTERM would."""
        self._ask(signal.SIGTERM)

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Within it a signal, also one that came before, ends the run.

        Raises:
            Interrupted: at any place within.
        """
        self._at_once = True
        try:
            self.check_interrupt()
            yield
        finally:
            self._at_once = False

    def check_interrupt(self) -> None:
        """Raise again what somebody's code may have caught.

        Raises:
            Interrupted: a signal is to end the run here.
        """
        if self._asked is not None and self._at_once:
            raise Interrupted(self._asked)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() == self._process:
            self._ask(number)
        # a process that a user's code has forked, such as a worker of `multiprocessing`, which SIGTERM is to
        # end
        else:
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
