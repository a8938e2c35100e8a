"""Calls of users' code. It raises what it likes, also what is no `Exception`, and may leave the process in
another state than it found it.

What it leaves is put back, with a warning: whatever the run computes or says afterwards depends on these.

* torch: whether gradients are recorded, default dtype and device, deterministic algorithms, precision of
  products, autocast, threads;
* the process: where lines go (`sys.stdout`, `sys.stderr`), the handlers of SIGTERM and Ctrl-C, and an alarm
  that is still to come.

What cannot be put back (inference mode, a closed stream) is an error. The generators of torch, numpy and
Python decide nothing in a run, and relative paths are not seen from the working directory (`files.py`), so
these may change.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from oat.errors import OatError, described, is_signal, warn

_replaced: list[Any] = []
"""Streams that stood in the place of ours: one that goes may close what it writes to."""
_FRESH = {"torch.set_grad_enabled": True, "torch.use_deterministic_algorithms": (False, False)}
"""What torch begins with, where it is imported by the code that is called."""


_OF_THE_THREAD = {
    "torch.inference_mode",
    "torch.set_grad_enabled",
    "torch.set_autocast_enabled",
    "torch.set_num_threads",
}
"""What is another in each thread, or is changed by the run's own; the rest is of the process."""
_lock = threading.RLock()
_under_way: "list[_Kept]" = []
"""Of calls that have not come back, of any thread. One that never does stays here, and changes nothing."""


def _begin_alone() -> None:
    """In a forked child, which has none of the other threads."""
    global _lock
    _lock = threading.RLock()
    _under_way.clear()


os.register_at_fork(after_in_child=_begin_alone)

Refuse = Callable[[str], OatError]
"""Makes an error from what code did, for example "raised ValueError: no number"."""
Place = Callable[[BaseException], str]
"""Where an error was raised, as the end of that."""


def guarded(name: str, refuse: Refuse, place: Place | None = None) -> AbstractContextManager[None, None]:
    """Within it a user's code runs. Errors of ours, and what people's signals raise, pass through.

    Args:
        name: of the code, in messages.

    Raises:
        OatError: what `refuse` makes: the code raised anything, or left a state that cannot be put back.
    """
    return _Guarded(refuse, place, name)


def raising(refuse: Refuse, place: Place | None = None) -> AbstractContextManager[None, None]:
    """As `guarded`, of what is raised alone."""
    return _Raising(refuse, place)


def restoring(name: str, refuse: Refuse) -> AbstractContextManager[None, None]:
    """As `guarded`, of what is left behind alone: what is raised passes through."""
    return _Restoring(refuse, None, name)


def bare(what: str) -> str:
    """What code did, where a sentence says already that it failed."""
    return what.removeprefix("raised ")


class _Raising(AbstractContextManager[None, None]):
    """No generator: `contextlib` takes a RuntimeError that a StopIteration led to for that StopIteration."""

    def __init__(self, refuse: Refuse, place: Place | None):
        self._refuse, self._place = refuse, place

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is not None and not isinstance(error, OatError) and not is_signal(error):
            raise self._refuse(
                f"raised {described(error)}{self._place(error) if self._place else ''}"
            ) from error


class _Guarded(_Raising):
    def __init__(self, refuse: Refuse, place: Place | None, name: str):
        super().__init__(refuse, place)
        self._name = name

    def __enter__(self) -> None:
        self._kept = _Kept()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self._kept.put_back(self._name)
        super().__exit__(kind, error, trace)
        if error is None and self._kept.lost:
            raise self._refuse(self._kept.lost)


class _Restoring(_Guarded):
    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        super().__exit__(None, None, None)


class _Kept:
    """The state of the process as it is when this is made.

    Attributes:
        lost: what cannot be put back, known after `put_back`.
    """

    def __init__(self) -> None:
        self._is_main = threading.current_thread() is threading.main_thread()
        with _lock:
            self._streams = {name: getattr(sys, name) for name in ("stdout", "stderr")}
            self._torch = (
                {name: get() for name, (get, _) in self._settings().items()}
                if "torch" in sys.modules
                else None
            )
            _under_way.append(self)
        self._were_open = {
            name for name, stream in self._streams.items() if not getattr(stream, "closed", False)
        }
        self._handlers = (
            {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
            if self._is_main
            else {}
        )
        self._rings = self._is_main and _rings()
        self.lost = ""

    def put_back(self, name: str) -> None:
        """Where anything is another, it becomes what it was, and people are told which.

        Args:
            name: of the code that did it.
        """
        with _lock:
            if self in _under_way:
                _under_way.remove(self)
            changed = [*self._put_back_streams(), *self._put_back_handlers(), *self._put_back_torch()]
        if changed:
            warn(
                f"{name} changed {' and '.join(changed)} and left it so; it is put back after each call, "
                "since the run depends on it. Change it "
                "within a `with` block, or put it back at the end of the function"
            )

    def _put_back_streams(self) -> Iterator[str]:
        for name, stream in self._streams.items():
            if name in self._were_open and getattr(stream, "closed", False):
                self.lost = f"closed sys.{name}, where the run says what it does"
            elif (found := getattr(sys, name)) is not stream:
                _replaced.append(found)
                setattr(sys, name, stream)
                for other in _under_way:
                    if other._streams[name] is found:
                        other._streams[name] = stream
                yield f"sys.{name}"

    def _put_back_handlers(self) -> Iterator[str]:
        for number, handler in self._handlers.items():
            if signal.getsignal(number) is not handler and handler is not None:
                signal.signal(number, handler)
                yield f"the handler of {signal.Signals(number).name}"
        if self._is_main and _rings() and not self._rings:
            signal.setitimer(signal.ITIMER_REAL, 0)
            yield "the timer of SIGALRM"

    def _put_back_torch(self) -> Iterator[str]:
        if "torch" not in sys.modules:
            return
        before = _FRESH if self._torch is None else self._torch
        for setting, (get, put) in self._settings().items():
            if setting in before and (found := get()) != before[setting]:
                put(before[setting])
                self._tell_others(setting, found, before[setting])
                if get() == before[setting]:
                    yield setting
                else:
                    self.lost = f"left torch in another state ({setting}) that cannot be put back"

    def _tell_others(self, setting: str, left: Any, put_back: Any) -> None:
        """A call that began meanwhile took what this one had changed for what was there before, and would put
        that back."""
        for other in _under_way if setting not in _OF_THE_THREAD else ():
            if other._torch is not None and other._torch[setting] == left:
                other._torch[setting] = put_back

    def _settings(self) -> dict[str, tuple[Callable[[], Any], Callable[[Any], object]]]:
        """By the function that changes it, what reads a setting and what sets it. A thread of the user's has
        no say in the number of threads, which the run itself changes meanwhile."""
        torch: Any = sys.modules["torch"]

        def deterministic() -> tuple[bool, bool]:
            return (
                torch.are_deterministic_algorithms_enabled(),
                torch.is_deterministic_algorithms_warn_only_enabled(),
            )

        settings: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
            "torch.inference_mode": (torch.is_inference_mode_enabled, lambda before: None),
            "torch.set_grad_enabled": (torch.is_grad_enabled, torch.set_grad_enabled),
            "torch.set_default_dtype": (torch.get_default_dtype, torch.set_default_dtype),
            "torch.set_default_device": (
                torch.get_default_device,
                lambda before: torch.set_default_device(None if before.type == "cpu" else before),
            ),
            "torch.use_deterministic_algorithms": (
                deterministic,
                lambda before: torch.use_deterministic_algorithms(before[0], warn_only=before[1]),
            ),
            "torch.set_float32_matmul_precision": (
                torch.get_float32_matmul_precision,
                torch.set_float32_matmul_precision,
            ),
            "torch.set_autocast_enabled": (
                lambda: torch.is_autocast_enabled("cpu"),
                lambda before: torch.set_autocast_enabled("cpu", before),
            ),
        }
        if self._is_main:
            settings["torch.set_num_threads"] = torch.get_num_threads, torch.set_num_threads
        return settings


def _rings() -> bool:
    """Whether SIGALRM is still to come, whose handler may raise anywhere."""
    return signal.getitimer(signal.ITIMER_REAL)[0] > 0
