"""Workers: processes that call code which may hang, crash or fill the memory. If this happens, the worker is
killed, and another worker takes its place.

A worker is a new interpreter. It is not forked from this process, because it must not inherit the process's
threads and models. The head of `plugins/child.py` gives a worker's limits. SECURITY.md says which attacks
these limits do not stop.
"""

import os
import selectors
import signal
import subprocess
import sys
import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from oat.errors import ConfigError, OracleError
from oat.files import start
from oat.plugins.child import HEADER, frame

_START_S = 120.0
"""Seconds within which a started worker must be ready. Large imports take long."""
_GRACE = 1.5
"""If a call has not ended after this multiple of `timeout_s`, plus 0.1 s, its worker is killed."""
_MAX_BYTES = 64 * 2**20
"""Largest number of bytes in an answer."""
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
            "target": target,
            "arguments": list(arguments),
            "timeout_s": self.timeout_s,
            "memory_gb": float(memory_gb),
        }
        self._order |= {"is_confined": is_confined, "path": sys.path}
        self._waiting: deque[tuple[str, bytes]] = deque()
        self._done: list[tuple[str, Outcome]] = []
        self._selector = selectors.DefaultSelector()
        self._workers: list[_Worker] = []
        self._end = weakref.finalize(self, _end_all, self._workers, os.getpid())
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
            self._waiting.append((ticket, frame(arguments)))
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
            self._waiting or any(worker.ticket is not None for worker in self._workers)
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
        for worker in [worker for worker in self._workers if worker.is_ready and worker.ticket is None][
            : len(self._waiting)
        ]:
            ticket, message = self._waiting.popleft()
            try:
                worker.call(ticket, message, self.timeout_s)
            except OSError:  # the worker ended while it had no call
                self._waiting.appendleft((ticket, message))
                self._drop(worker)
        starting = sum(not worker.is_ready for worker in self._workers)
        for _ in range(min(self.count - len(self._workers), len(self._waiting) - starting)):
            self._start()

    def _start(self) -> "_Worker":
        worker = _Worker(self._order)
        self._workers.append(worker)
        self._selector.register(worker.output, selectors.EVENT_READ, worker)
        return worker

    def _wait(self, end: float) -> None:
        """Wait until a worker writes, until the first deadline of a worker, or until `end`. Take the messages
        that have arrived, and kill the workers that are past their deadlines."""
        late = min((worker.deadline for worker in self._workers if worker.deadline), default=end)
        for key, _ in self._selector.select(max(0.0, min(end, late) - time.monotonic())):
            self._take_message(key.data)
        for worker in [
            worker for worker in self._workers if worker.deadline and time.monotonic() >= worker.deadline
        ]:
            self._lose(
                worker,
                f"ran past {self.timeout_s:g} s"
                if worker.is_ready
                else f"was not ready after {_START_S:g} s",
            )

    def _take_message(self, worker: "_Worker") -> None:
        if not worker.read():
            self._on_worker_exit(worker, _ending(self._drop(worker, 1.0), self.timeout_s))
            return
        message = worker.message()
        if message is None:
            return
        if not isinstance(message, dict) or len(message) != 1:
            self._lose(worker, "answered what is no answer")
            return
        ((kind, said),) = message.items()
        if kind == "error":
            self._drop(worker)
            raise OracleError(str(said))
        if kind == "failure":
            self._lose(worker, str(said))
        elif not worker.is_ready:
            worker.is_ready = True
            worker.about = said
            worker.deadline = 0.0
        elif worker.ticket is not None:
            self._done.append((worker.ticket, Outcome(said)))
            worker.ticket, worker.deadline = None, 0.0

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
        if worker.ticket is not None:
            self._done.append((worker.ticket, Outcome(None, failure)))

    def _drop(self, worker: "_Worker", patience: float = 0.0) -> int:
        self._selector.unregister(worker.output)
        self._workers.remove(worker)
        return worker.end(patience)


class _Worker:
    """One worker process. It makes the function that the pool is for, and then serves calls of it.

    Attributes:
        is_ready: True if the worker has made the function.
        about: the attribute `about` of the function; None before the worker is ready.
        ticket: ticket of the call in progress; None if there is none.
        deadline: time at which the worker is killed, in seconds of `time.monotonic`; 0.0 means no deadline.
    """

    def __init__(self, order: Mapping[str, Any]):
        kept = (
            {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
            if order["is_confined"]
            else dict(os.environ)
        )
        package = str(Path(__file__).parent.parent.parent)
        one = {name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "PYTHONDONTWRITEBYTECODE")}
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "oat.plugins.child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if order["is_confined"] else None,
            env={**kept, **one, "PYTHONPATH": package},
            cwd=start(),
            process_group=0,  # processes that the worker starts are killed with it
        )
        assert self.process.stdin is not None, "a pipe was asked for"
        assert self.process.stdout is not None, "a pipe was asked for"
        self.input, self.output = self.process.stdin, self.process.stdout
        os.set_blocking(self.output.fileno(), False)
        self.is_ready, self._heard = False, bytearray()
        self.about: Any = None
        self.ticket: str | None = None
        self.deadline = time.monotonic() + _START_S
        with suppress(OSError):  # if the worker has ended, `read` returns False
            self._write(frame(order))

    def call(self, ticket: str, message: bytes, seconds: float) -> None:
        """Send a call to the worker.

        Raises:
            OSError: the worker has ended.
        """
        self._write(message)
        self.ticket, self.deadline = ticket, time.monotonic() + _GRACE * seconds + 0.1

    def read(self) -> bool:
        """Read the bytes that the worker has written. Return False if its output has ended."""
        with suppress(BlockingIOError):
            said = os.read(self.output.fileno(), 2**20)
            self._heard += said
            return bool(said)
        return True

    def message(self) -> Any:
        """Return the next message of the worker; None if the message is incomplete. If the bytes are not a
        valid message, return a value that is not a dict."""
        if len(self._heard) < HEADER.size:
            return None
        (size,) = HEADER.unpack_from(self._heard)
        if size > _MAX_BYTES:
            return size
        if len(self._heard) < HEADER.size + size:
            return None
        body = bytes(self._heard[HEADER.size : HEADER.size + size])
        del self._heard[: HEADER.size + size]
        try:
            return msgspec.msgpack.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return body

    def end(self, patience: float = 0.0) -> int:
        """Kill the worker and the processes that it started, and wait until the worker has ended.

        Args:
            patience: seconds to wait for the worker to end by itself before it is killed.

        Returns:
            The exit code, or minus the number of the signal that ended the worker.
        """
        end = time.monotonic() + patience
        while (
            time.monotonic() < end
            and os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
        ):
            time.sleep(0.002)
        with suppress(ProcessLookupError, PermissionError):
            # kill the group before `wait`: afterwards, a new group may have the same number
            os.killpg(self.process.pid, signal.SIGKILL)
        with suppress(OSError):
            self.input.close()
        self.output.close()
        return self.process.wait()

    def _write(self, message: bytes) -> None:
        self.input.write(message)
        self.input.flush()


def _ending(code: int, seconds: float) -> str:
    if code == -signal.SIGALRM:
        return f"ran past {seconds:g} s"
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"ended its process (exit code {code})"


def _end_all(workers: list[_Worker], owner: int) -> None:
    if os.getpid() == owner:  # a forked child must not end the parent's workers
        for worker in workers:
            worker.end()
        workers.clear()
