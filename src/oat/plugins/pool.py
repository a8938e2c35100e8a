"""Workers: processes that call code which may hang, crash or fill the memory. If the code does so, its worker
is killed and replaced.

A worker is a new interpreter. It is never forked from this process, since it must not have this process's
threads and models. The docstring of `plugins/child.py` says what a worker may do, and SECURITY.md what cannot
be promised.
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
"""Seconds after its start within which a worker must be ready; its imports may be large."""
_GRACE = 1.5
"""A worker whose call has not ended is killed after this multiple of `timeout_s`, plus 0.1 s."""
_MAX_BYTES = 64 * 2**20
"""Largest number of bytes in an answer."""
_PASSED_ON = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "LD_LIBRARY_PATH")
"""The environment variables of this process that confined workers get; secret keys are not among them."""


class Outcome(NamedTuple):
    """The outcome of a call.

    Attributes:
        value: the returned value; None if the call failed.
        failure: what happened instead, as the end of a sentence about the call; "" if the call returned.
    """

    value: Any
    failure: str = ""


def check_limits(**limits: float) -> None:
    """Refuse limits of workers (`workers`, `timeout_s`, `memory_gb`) that are not numbers above 0.

    Raises:
        ConfigError: names the limit.
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
        count: largest number of workers at a time. The first one starts immediately, the others when there is
            work for them.
        timeout_s: seconds of a call, after which the call has failed.
        memory_gb: the memory that a worker may address, in 10^9 bytes, shared libraries included.
        is_confined: True for code of ours: the workers have no network, get no keys from the environment, and
            cannot write files or start processes.

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
        """Call the function with these arguments, which are plain data, as soon as a worker is free. If the
        arguments cannot be encoded (for example a lone surrogate), the call has failed."""
        try:
            self._waiting.append((ticket, frame(arguments)))
        except (TypeError, ValueError, OverflowError):
            self._done.append((ticket, Outcome(None, "was asked about what is no plain data")))
        self._dispatch()

    def collect(self, seconds: float) -> list[tuple[str, Outcome]]:
        """Return the outcomes of the calls that have ended since the last `collect`, each with its ticket. If
        there are none, wait at most `seconds` for the first. Messages of workers are read, and late workers
        are killed, in two places: in this method, and in the constructor until the first worker is ready.

        Raises:
            OracleError: the function raised an error of ours, or a worker ended before it was ready.
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
        """End all workers. This also happens when the object is deleted, and at the end of the process."""
        self._end()

    def _dispatch(self) -> None:
        for worker in [worker for worker in self._workers if worker.is_ready and worker.ticket is None][
            : len(self._waiting)
        ]:
            ticket, message = self._waiting.popleft()
            try:
                worker.call(ticket, message, self.timeout_s)
            except OSError:  # the worker has died while it had nothing to do
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
        """Wait until a worker writes, at most until `end` or until a worker is late. Take the messages that
        are there, and kill the workers that are late."""
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
        """Kill a worker that cannot be used any more; its call has failed."""
        self._drop(worker)
        self._on_worker_exit(worker, failure)

    def _on_worker_exit(self, worker: "_Worker", failure: str) -> None:
        """Record that a worker has ended. If it had a call, the call has failed.

        Raises:
            OracleError: the worker ended before it was ready, so another worker would do the same.
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
    """One process.

    Attributes:
        is_ready: True once the worker has made the function.
        about: the attribute `about` of this function, once the worker is ready.
        ticket: the ticket of the worker's call; None if it has no call.
        deadline: the time at which the worker is killed, in monotonic seconds; 0.0 if it has no deadline.
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
            process_group=0,  # so that the processes that the worker starts end with it
        )
        assert self.process.stdin is not None, "a pipe was asked for"
        assert self.process.stdout is not None, "a pipe was asked for"
        self.input, self.output = self.process.stdin, self.process.stdout
        os.set_blocking(self.output.fileno(), False)
        self.is_ready, self._heard = False, bytearray()
        self.about: Any = None
        self.ticket: str | None = None
        self.deadline = time.monotonic() + _START_S
        with suppress(OSError):  # if the worker is dead already, the end of its output tells
            self._write(frame(order))

    def call(self, ticket: str, message: bytes, seconds: float) -> None:
        """Have the worker call the function.

        Raises:
            OSError: the worker is dead.
        """
        self._write(message)
        self.ticket, self.deadline = ticket, time.monotonic() + _GRACE * seconds + 0.1

    def read(self) -> bool:
        """Read what the worker has written so far; return False if its output has ended."""
        with suppress(BlockingIOError):
            said = os.read(self.output.fileno(), 2**20)
            self._heard += said
            return bool(said)
        return True

    def message(self) -> Any:
        """Return the next message of the worker; None as long as the message is incomplete. If the bytes are
        no message, return something that is not a dictionary."""
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
            patience: seconds in which the worker may end by itself.

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
            # before the wait for the process: after it another group may get the same number
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
