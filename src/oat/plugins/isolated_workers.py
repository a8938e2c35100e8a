"""Workers: processes that call code which may hang, crash or fill the memory. If this happens, the worker is
killed, and another worker takes its place.

A worker is a new interpreter. It is not forked from this process, because it must not inherit the process's
threads and models. The head of `plugins/isolated_side.py` gives a worker's limits. SECURITY.md says which
attacks these limits do not stop.
"""

import os
import signal
import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import msgspec

from oat.errors import ConfigError, OracleError
from oat.processes.pipe import Message
from oat.processes.spawn import Child, ending, on_one_thread

_START_S = 120.0
"""Seconds within which a started worker must be ready. Large imports take long."""
_GRACE = 1.5
"""If a call has not ended after this multiple of `timeout_s`, plus 0.1 s, its worker is killed."""
_MAX_BYTES = 64 * 2**20
"""Largest number of bytes in an answer."""
_EXIT_S = 1.0
"""Time in seconds that a worker whose connection has ended may take to end."""
_SENT_S = 1.0
"""Time in seconds until it is known that a message to it was not sent."""
_NO_ANSWER = "answered what is no answer"
_PASSED_ON = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "LD_LIBRARY_PATH")
"""The environment variables that a confined worker inherits. Others may hold secrets."""


class Outcome(NamedTuple):
    """The outcome of a call.

    Attributes:
        value: the returned value; None if the call failed.
        failure: reason of the failure, as the end of a sentence such as "ran past 5 s"; "" if the call
            returned.
    """

    value: Any
    failure: str = ""


def check_limits(**limits: float) -> None:
    """Refuse limits of workers (`workers`, `timeout_s`, `memory_gb`) that are not numbers above 0.

    Raises:
        ConfigError: a limit is not a number above 0.
    """
    for name, number in limits.items():
        if isinstance(number, bool) or not isinstance(number, int | float) or not 0 < number < 1e6:
            raise ConfigError(
                f"`{name}` of an oracle that runs in workers must be a number above 0, not {number!r}; "
                "correct it"
            )


class Workers:
    """Processes that call one function. Each process makes one call at a time.

    Args:
        target: `path/to/file.py:Name` or `package.module:Name` of a factory. Each worker loads the factory
            and calls it once; the factory returns the function.
        arguments: the arguments of the factory; plain data.
        count: largest number of workers at a time. The first worker starts immediately; a further worker
            starts when a call has to wait.
        timeout_s: largest duration of a call, in seconds. A longer call fails.
        memory_gb: memory that a worker may address, in 10^9 bytes, shared libraries included.
        is_confined: True makes workers that cannot write files or start processes, get no keys from the
            environment and, if the system allows it, have no network. This suits only the package's own code.

    Attributes:
        about: the attribute `about` of the function, as plain data; None if there is none.

    Raises:
        ConfigError: the function cannot be made, or a number is not above 0.
    """

    def __init__(
        self,
        target: str,
        arguments: Sequence[Any] = (),
        *,
        count: int = 1,
        timeout_s: float = 5.0,
        memory_gb: float = 4.0,
        is_confined: bool = False,
    ):
        check_limits(workers=count, timeout_s=timeout_s, memory_gb=memory_gb)
        self.target = target
        self.count = int(count)
        self.timeout_s = float(timeout_s)
        self._order = {
            "factory": target,
            "arguments": list(arguments),
            "timeout_s": self.timeout_s,
            "memory_gb": float(memory_gb),
        }
        self._order["is_confined"] = is_confined
        self._waiting: deque[tuple[str, bytes]] = deque()
        self._done: list[tuple[str, Outcome]] = []
        self._arrived = SimpleQueue[tuple[_Worker, Message | None]]()
        self._workers: list[_Worker] = []
        self._end = weakref.finalize(self, _end_all, self._workers)
        first = self._start()
        try:
            while not first.is_ready:
                self._wait(first.deadline)
        except OracleError as error:
            self.close()
            raise ConfigError(str(error)) from error
        self.about = first.about

    def send(self, ticket: str, *arguments: Any) -> None:
        """Queue a call of the function. The call begins when a worker is free. If the arguments cannot be
        encoded, such as a text with a lone surrogate, the call fails.

        Args:
            ticket: name of the call, which `collect` returns with the outcome.
            arguments: plain data.
        """
        try:
            self._waiting.append((ticket, msgspec.msgpack.encode(arguments)))
        except (TypeError, ValueError, OverflowError):
            self._done.append((ticket, Outcome(None, "was asked about what is no plain data")))
        self._dispatch()

    def collect(self, seconds: float) -> list[tuple[str, Outcome]]:
        """Return ticket and outcome of each call that has ended since the last `collect`. If no call has
        ended, wait at most `seconds` for the first. While this method waits, workers with late calls are
        killed.

        Raises:
            OracleError: the function raised an `OatError`, or a worker ended before it was ready.
        """
        end = time.monotonic() + seconds
        while not self._done and (
            self._waiting or any(worker.in_progress is not None for worker in self._workers)
        ):
            self._dispatch()
            self._wait(end)
            if time.monotonic() >= end:
                break
        done, self._done = self._done, []
        return done

    def map(self, calls: Sequence[Sequence[Any]]) -> list[Outcome]:
        """Call the function once for each list of arguments, and return the outcomes in the same order.

        Raises:
            OracleError: as in `collect`.
        """
        for number, arguments in enumerate(calls):
            self.send(str(number), *arguments)
        found: dict[str, Outcome] = {}
        while len(found) < len(calls):
            found.update(self.collect(self.timeout_s))
        return [found[str(number)] for number in range(len(calls))]

    def close(self) -> None:
        """End all workers. They also end when this object is deleted and when the process ends."""
        self._end()

    def _dispatch(self) -> None:
        for worker in [worker for worker in self._workers if worker.is_ready and worker.in_progress is None][
            : len(self._waiting)
        ]:
            worker.call(*self._waiting.popleft(), self.timeout_s)
        starting = sum(not worker.is_ready for worker in self._workers)
        for _ in range(min(self.count - len(self._workers), len(self._waiting) - starting)):
            self._start()

    def _start(self) -> "_Worker":
        worker = _Worker(self._order, self._arrived)
        self._workers.append(worker)
        return worker

    def _wait(self, end: float) -> None:
        """Wait until a worker says something, until the first deadline of a worker, or until `end`. Take what
        was said, and kill the workers that are past their deadlines."""
        late = min((worker.deadline for worker in self._workers if worker.deadline), default=end)
        with suppress(Empty):
            self._take(*self._arrived.get(timeout=max(0.0, min(end, late) - time.monotonic())))
            while True:
                self._take(*self._arrived.get_nowait())
        for worker in [
            worker for worker in self._workers if worker.deadline and time.monotonic() >= worker.deadline
        ]:
            self._lose(
                worker,
                f"ran past {self.timeout_s:g} s"
                if worker.is_ready
                else f"was not ready after {_START_S:g} s",
            )

    def _take(self, worker: "_Worker", message: Message | None) -> None:
        if worker not in self._workers:
            return
        if message is None:
            self._take_end(worker)
            return
        try:
            ((kind, said),) = msgspec.msgpack.decode(message.head, type=dict[str, Any]).items()
        except (msgspec.DecodeError, UnicodeDecodeError, ValueError):
            self._lose(worker, _NO_ANSWER)
            return
        if kind == "error":
            self._drop(worker)
            raise OracleError(str(said))
        if kind == "failure":
            self._lose(worker, str(said))
        elif not worker.is_ready:
            worker.is_ready = True
            worker.about = said
            worker.deadline = 0.0
        elif worker.in_progress is not None:
            self._done.append((worker.in_progress.ticket, Outcome(said)))
            worker.in_progress, worker.deadline = None, 0.0

    def _take_end(self, worker: "_Worker") -> None:
        """Take the end of a worker's connection."""
        call = worker.in_progress
        if call is not None and not _was_sent(call):  # it ended while it had no call
            self._waiting.appendleft((call.ticket, call.message))
            worker.in_progress = None
        has_ended = worker.process.ends_within(_EXIT_S)
        code = self._drop(worker)
        self._on_worker_exit(worker, self._ending(code) if has_ended else _NO_ANSWER)

    def _lose(self, worker: "_Worker", failure: str) -> None:
        """Kill a worker that can no longer be used, and record its call as failed."""
        self._drop(worker)
        self._on_worker_exit(worker, failure)

    def _on_worker_exit(self, worker: "_Worker", failure: str) -> None:
        """Handle the end of a worker. If it ended during a call, record the call as failed.

        Raises:
            OracleError: the worker ended before it was ready. Another worker would end in the same way.
        """
        if not worker.is_ready:
            raise OracleError(
                f"a worker for {self.target} {failure} while it was started; its message stands above, "
                "repair what it loads"
            )
        if worker.in_progress is not None:
            self._done.append((worker.in_progress.ticket, Outcome(None, failure)))

    def _ending(self, code: int) -> str:
        return f"ran past {self.timeout_s:g} s" if code == -signal.SIGALRM else ending(code)

    def _drop(self, worker: "_Worker") -> int:
        self._workers.remove(worker)
        return worker.process.end()


class _Call(NamedTuple):
    """A call in progress.

    Attributes:
        sent: is done when the message was sent.
    """

    ticket: str
    message: bytes
    sent: "Future[None]"


def _was_sent(call: _Call) -> bool:
    with suppress(FutureTimeoutError):
        return call.sent.exception(_SENT_S) is None
    return False


class _Worker:
    """One worker process. It makes the function that the pool is for, and then serves calls of it.

    Args:
        arrived: gets what it says, and None when its connection ends.

    Attributes:
        is_ready: True if the worker has made the function.
        about: the attribute `about` of the function; None before the worker is ready.
        in_progress: None if there is no call.
        deadline: time at which the worker is killed, in seconds of `time.monotonic`; 0.0 means no deadline.
    """

    def __init__(self, order: Mapping[str, Any], arrived: "SimpleQueue[tuple[_Worker, Message | None]]"):
        is_confined = order["is_confined"]
        kept = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
        nothing = os.open(os.devnull, os.O_WRONLY) if is_confined else None
        try:
            self.process = Child(
                "oat.plugins.isolated_side:serve",
                order,
                lambda message: arrived.put((self, message)),
                environment=on_one_thread(kept if is_confined else os.environ),
                output=nothing,
                most=_MAX_BYTES,
            )
        finally:
            if nothing is not None:
                os.close(nothing)
        self.is_ready = False
        self.about: Any = None
        self.in_progress: _Call | None = None
        self.deadline = time.monotonic() + _START_S

    def call(self, ticket: str, message: bytes, seconds: float) -> None:
        """Send a call to the worker."""
        self.in_progress = _Call(ticket, message, self.process.link.send(message))
        self.deadline = time.monotonic() + _GRACE * seconds + 0.1


def _end_all(workers: list[_Worker]) -> None:
    for worker in workers:
        worker.process.end()
    workers.clear()
