"""Contexts for calls of users' code. Users' code may raise any exception and may change the state of the
process.

The results and the output of a run depend on the following state. If a call has changed the state, it is put
back after the call, with a warning:

* torch: recording of gradients, default dtype and device, deterministic algorithms, precision of products,
  and autocast;
* process: the streams `sys.stdin`, `sys.stdout` and `sys.stderr`, also if they were closed, and their files;
* only for a call on the main thread: torch's number of threads, the handlers of SIGTERM and Ctrl-C, and a
  timer of SIGALRM that the call has set.

If the state cannot be put back (inference mode, a closed stream that has no file), the call is an error. In a
call, `os._exit` raises SystemExit (`leaving.py`), and programs that ask for the size of the terminal get one
size in every terminal, since a text that is cut or folded there would differ. A call may change the
random generators of torch, numpy and Python, because no result of a run depends on them. It may also change
the working directory, because relative paths do not start there (`files.py`).
"""

import os
import signal
import sys
import sysconfig
import threading
import traceback
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from oat.errors import OatError, described, is_signal, warn
from oat.plugins.leaving import hold
from oat.plugins.streams import NAMES, StandardStreams, is_closed

_replaced: list[Any] = []
"""Streams with which users' code has replaced standard streams. They are kept, because a stream that is
deleted may close the file to which it writes."""
_TERMINAL = {"COLUMNS": "80", "LINES": "24", "POLARS_TABLE_WIDTH": "100"}
"""Variables with the size of the terminal in calls. Python, pandas and rich heed the first two. The last is
for polars, which asks the terminal itself unless the user has chosen a width."""
_before: dict[str, str | None] = {}
"""Their values outside calls."""
_FRESH = {"torch.set_grad_enabled": True, "torch.use_deterministic_algorithms": (False, False)}
"""Settings of torch directly after its import. They are put back if a call imports torch for the first
time."""


_OF_THE_THREAD = {
    "torch.inference_mode",
    "torch.set_grad_enabled",
    "torch.set_autocast_enabled",
    "torch.set_num_threads",
}
"""Settings of torch that each thread has for itself, or that the run's own threads change. All threads share
the other settings. If a user's code changes a shared setting, a call of users' code that begins afterwards
stores the changed value, to put it back at its end. `_tell_others` corrects the stored value."""
_lock = threading.RLock()
_under_way: "list[_Kept]" = []
"""States kept for the calls in progress, in all threads. The state of a call that never returns stays here
and has no effect."""


def _begin_alone() -> None:
    """Empty the list of calls in progress. This runs in a forked child, which does not have the parent's
    other threads."""
    global _lock
    _lock = threading.RLock()
    for kept in _under_way:
        kept.files.drop()
    _under_way.clear()


os.register_at_fork(after_in_child=_begin_alone)

Refuse = Callable[[str], OatError]
"""Type of a function that makes an error from a description of the failure, such as "raised ValueError: no
number"."""
_INSTALLED = (
    *(f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib", "purelib", "platlib", "scripts")),
    f"{Path(__file__).parent.parent}/",
)


def guarded(name: str, refuse: Refuse, own: str | None = None) -> AbstractContextManager[None, None]:
    """A context in which a user's code runs. It puts back the state of the process, and turns exceptions of
    the code into an `OatError`. Two kinds of exceptions pass through unchanged: `OatError`, and exceptions
    that come from a signal such as Ctrl-C. The description of an exception ends with its place in the user's
    files (`last_place`), such as " (line 7 of rewards.py)".

    Args:
        name: name of the code, for messages.
        refuse: makes the error.
        own: a file that counts as the user's even if it is installed; None: there is none.

    Raises:
        OatError: the code raised another exception, or left a state that cannot be put back. `refuse` makes
            the error.
    """
    return _Guarded(refuse, own, name)


def raising(refuse: Refuse) -> AbstractContextManager[None, None]:
    """A context that turns exceptions into errors as `guarded` does. Unlike `guarded`, it does not put back
    the state of the process."""
    return _Raising(refuse, None)


def restoring(name: str, refuse: Refuse) -> AbstractContextManager[None, None]:
    """A context that puts back the state of the process as `guarded` does. Exceptions pass unchanged."""
    return _Restoring(refuse, None, name)


async def _wait(result: Awaitable[Any]) -> Any:
    return await result


def awaited(result: Awaitable[Any]) -> Any:
    """Return the result of an awaitable. If an event loop already runs in this thread, as in a notebook,
    wait in another thread."""
    import asyncio  # here, since every command would wait for it

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(_wait(result))
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, _wait(result)).result()


def last_place(error: BaseException, is_own: Callable[[str], bool]) -> str | None:
    """Return the place of the innermost frame of an error's traceback that is in a user's file, such as "line
    7 of file.py"; None if there is no such frame.

    Args:
        is_own: returns True if a file, given by its path, is the user's.
    """
    frames = traceback.walk_tb(error.__traceback__)
    places = [(line, frame.f_code.co_filename) for frame, line in frames]
    line, file = next(((line, file) for line, file in reversed(places) if is_own(file)), (0, None))
    return f"line {line} of {Path(file).name}" if file is not None else None


def is_installed(file: str) -> bool:
    """Return True if a file belongs to Python, to an installed package, or to `oat`."""
    return file.startswith(_INSTALLED) or "/site-packages/" in file or "/dist-packages/" in file


def bare(what: str) -> str:
    """Return a description of a failure without the word "raised" at its beginning, for a sentence that
    already says that the code failed."""
    return what.removeprefix("raised ")


def _off_the_main_thread(error: BaseException | None) -> str:
    """Return a hint if the error comes from a use of `signal` in a thread other than the main one, which
    Python refuses; otherwise ""."""
    if threading.current_thread() is threading.main_thread():
        return ""
    while error is not None and "main thread" not in described(error):
        error = error.__cause__ or error.__context__
    if error is None:
        return ""
    return (
        "; this call runs off the main thread, as all `async` code does, and `signal` works on the main "
        "thread only: limit the time by asyncio.wait_for, or write a plain `def`"
    )


class _Raising(AbstractContextManager[None, None]):
    """A context that turns an exception of users' code into the error that `refuse` makes. It is a class
    because of StopIteration: if `refuse` makes a RuntimeError, a context made by `contextlib.contextmanager`
    would let the StopIteration pass unchanged."""

    def __init__(self, refuse: Refuse, own: str | None):
        self._refuse, self._own = refuse, own

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is not None and not isinstance(error, OatError) and not is_signal(error):
            place = last_place(error, self._is_own)
            where = f" ({place})" if place else ""
            raise self._refuse(f"raised {described(error)}{where}{_off_the_main_thread(error)}") from error

    def _is_own(self, file: str) -> bool:
        return file == self._own or not (file.startswith("<") or is_installed(file))


class _Guarded(_Raising):
    def __init__(self, refuse: Refuse, own: str | None, name: str):
        super().__init__(refuse, own)
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
    """The state of the process when this object is made.

    Attributes:
        lost: description of a change that `put_back` could not put back; "" if there is none.
    """

    def __init__(self) -> None:
        self._is_main = threading.current_thread() is threading.main_thread()
        hold(lambda: _under_way, is_installed)
        with _lock:
            self._streams = {name: getattr(sys, name) for name in NAMES}
            self.files = StandardStreams(self._is_main and not _under_way)
            self._torch = (
                {name: get() for name, (get, _) in self._settings().items()}
                if "torch" in sys.modules
                else None
            )
            if not _under_way:
                _before.update({name: os.environ.get(name) for name in _TERMINAL})
                chosen = {name: os.environ[name] for name in ("POLARS_TABLE_WIDTH",) if name in os.environ}
                os.environ.update(_TERMINAL | chosen)
            _under_way.append(self)
        self._handlers = (
            {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
            if self._is_main
            else {}
        )
        self._rings = self._is_main and _rings()
        self.lost = ""

    def put_back(self, name: str) -> None:
        """Put back the state that has changed, and warn of the changes.

        Args:
            name: name of the code that made the changes.
        """
        with _lock:
            if self in _under_way:
                _under_way.remove(self)
                _put_back_terminal()
            changed = [*self._put_back_streams(), *self._put_back_handlers(), *self._put_back_torch()]
        if changed:
            warn(
                f"{name} changed {' and '.join(changed)} and left it so; it is put back after each call, "
                "since the run depends on it. Change it "
                "within a `with` block, or put it back at the end of the function"
            )

    def _put_back_streams(self) -> Iterator[str]:
        yield from self.files.mended()
        for name, stream in self._streams.items():
            if name in self.files.were_open and is_closed(stream):
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
        """Prevent other calls in progress from restoring a setting that this call has changed. A call that
        began after the change has stored `left`, to restore it at its end; it gets `put_back` instead.

        Args:
            left: value of the setting at the end of this call.
            put_back: value of the setting before this call.
        """
        for other in _under_way if setting not in _OF_THE_THREAD else ():
            if other._torch is not None and other._torch[setting] == left:
                other._torch[setting] = put_back

    def _settings(self) -> dict[str, tuple[Callable[[], Any], Callable[[Any], object]]]:
        """Return two functions for each setting of torch: the first reads the setting, the second sets it.
        For inference mode, which cannot be set, the second function does nothing. The keys are the names of
        torch's functions. For a call on the main thread, torch's number of threads is included. For another
        call it is left out, since the run may change this number during the call."""
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


def _put_back_terminal() -> None:
    """Put back the size of the terminal, if no call is in progress."""
    for name, before in _before.items() if not _under_way else ():
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before


def _rings() -> bool:
    """Return True if a timer of SIGALRM is running. The handler of this signal may raise at any place."""
    return signal.getitimer(signal.ITIMER_REAL)[0] > 0
