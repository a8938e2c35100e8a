"""Calls of users' code. It may raise anything, also what is no `Exception`, and may leave the process in
another state than before.

After each call the following is put back, with a warning, since what the run computes and prints depends on
it:

* torch: whether gradients are recorded, default dtype and device, deterministic algorithms, precision of
  products, autocast, threads;
* the process: where lines go (`sys.stdout`, `sys.stderr`), the handlers of SIGTERM and Ctrl-C, and an alarm
  that is still to come.

A state that cannot be put back (inference mode, a closed stream) is an error. The random generators of torch,
numpy and Python may change, since they decide nothing in a run, and so may the working directory, since
relative paths do not start there (`files.py`).
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
"""Streams that users' code put in the place of ours. They are kept, since a stream that is deleted may close
what it writes to."""
_FRESH = {"torch.set_grad_enabled": True, "torch.use_deterministic_algorithms": (False, False)}
"""The state with which torch begins, for a call that imports torch."""


_OF_THE_THREAD = {
    "torch.inference_mode",
    "torch.set_grad_enabled",
    "torch.set_autocast_enabled",
    "torch.set_num_threads",
}
"""Settings that each thread has for itself, or that the run's own threads change. The others belong to the
process."""
_lock = threading.RLock()
_under_way: "list[_Kept]" = []
"""The states kept for calls that have not returned, of all threads. A call that never returns stays here, and
changes nothing."""


def _begin_alone() -> None:
    """Begin with no calls in a forked child, which has none of the other threads."""
    global _lock
    _lock = threading.RLock()
    _under_way.clear()


os.register_at_fork(after_in_child=_begin_alone)

Refuse = Callable[[str], OatError]
"""Makes an error from what the code did, for example "raised ValueError: no number"."""
Place = Callable[[BaseException], str]
"""Gives the place where an error was raised, to end that text."""


def guarded(name: str, refuse: Refuse, place: Place | None = None) -> AbstractContextManager[None, None]:
    """A context in which a user's code runs. Errors of ours, and exceptions of people's signals, pass
    through.

    Args:
        name: of the code, for messages.

    Raises:
        OatError: made by `refuse`: the code raised anything else, or left a state that cannot be put back.
    """
    return _Guarded(refuse, place, name)


def raising(refuse: Refuse, place: Place | None = None) -> AbstractContextManager[None, None]:
    """A context as `guarded` that handles only what is raised; the state of the process is not looked at."""
    return _Raising(refuse, place)


def restoring(name: str, refuse: Refuse) -> AbstractContextManager[None, None]:
    """A context as `guarded` that handles only the state of the process; what is raised passes through."""
    return _Restoring(refuse, None, name)


def bare(what: str) -> str:
    """The text of what code did, for a sentence that says already that it failed."""
    return what.removeprefix("raised ")


class _Raising(AbstractContextManager[None, None]):
    """A class and no generator: `contextlib` takes a RuntimeError that was raised from a StopIteration for
    that StopIteration."""

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
    """The state of the process at the moment when this is made.

    Attributes:
        lost: the change that cannot be put back, in words; "" if there is none. `put_back` sets it.
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
        """Put back everything that has changed, and warn of it.

        Args:
            name: of the code that changed it.
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
        """Correct the states kept for calls that began meanwhile. They hold what this call had changed, and
        would put that back."""
        for other in _under_way if setting not in _OF_THE_THREAD else ():
            if other._torch is not None and other._torch[setting] == left:
                other._torch[setting] = put_back

    def _settings(self) -> dict[str, tuple[Callable[[], Any], Callable[[Any], object]]]:
        """The functions that read and set each setting, by the name of torch's function. The number of
        threads is only among them on the main thread, since the run itself changes it meanwhile."""
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
    """True if SIGALRM is still to come; its handler may raise anywhere."""
    return signal.getitimer(signal.ITIMER_REAL)[0] > 0
