"""Training's side of a sink. It starts the process of the sink, sends it rows, and ends it.

Training does not wait for a sink between its steps: rows that the sink's process has not taken yet are kept
here. If too many rows wait, the sink has failed. If a sink fails, its process is killed, the user is warned
once, and the run goes on without the sink. At the end of the run, every sink has `wait_s` seconds for the
remaining rows; then its processes are killed.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from oat.config.secrets import Hider
from oat.errors import printable, warn
from oat.files import absolute, start
from oat.plugins.child import HEADER, frame
from oat.tracking.leftovers import VARIABLE, end_all_marked

_MOST_ROWS, _MOST_BYTES = 10_000, 64 * 2**20
"""Limits on the number of rows that a sink has not taken yet, and on their size in bytes."""
_TICK_S = 0.02
_SHOWN = 300
"""Largest number of characters of a sink's error that the warning shows."""


@dataclass(frozen=True)
class Described:
    """The configuration of a sink.

    Attributes:
        key: the sink's name in messages, and the name of its files in `RUN/sinks`.
        symbol: the sink's class, as `package.module:Class` or `path/to/file.py:Class`.
        options: the options for the sink's constructor, as plain data.
        place: the options that say where the sink's rows go.
        samples: True if the sink gets the samples of each step.
        wait_s: seconds that the sink has for the remaining rows at the end of the run.
    """

    key: str
    symbol: str
    options: Mapping[str, Any]
    place: Mapping[str, Any]
    samples: bool
    wait_s: float


class SinkProcess:
    """The process of one sink of a run.

    Args:
        folder: the run directory.
        config: the resolved configuration as plain data; the sink gets it without secrets.
    """

    def __init__(self, sink: Described, folder: Path, config: Mapping[str, Any]):
        self.sink, self.folder = sink, absolute(folder)
        self._hider = Hider(config)
        self._process: subprocess.Popen[bytes] | None = None
        self._scratch, self._mark = "", ""
        self._pending, self._heard = bytearray(), bytearray()
        self._given: deque[tuple[int, int]] = deque()
        self._lag = 0
        self._next = 0
        self._is_closed = False

    def open(self, kept: int) -> None:
        """Start the sink's process. If the sink lacks earlier rows of the run, the process first gives it
        these from `metrics.jsonl`.

        Args:
            kept: step of the first row that will be sent with `row`. The rows of earlier steps are in
                `metrics.jsonl`.
        """
        sink, place = self.sink, self.folder / "sinks"
        self._mark = uuid.uuid4().hex
        try:
            place.mkdir(exist_ok=True)
            self._scratch = tempfile.mkdtemp(prefix="oat-sink-")
            with (place / f"{sink.key}.log").open("wb") as log:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "oat.tracking.process"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    env=self._environment(),
                    cwd=start(),
                    process_group=0,  # then Ctrl-C in a terminal reaches training only
                )
        except OSError as error:
            self._fail(f"could not be started: {error}")
            return
        _open.add(self)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None, "pipes were asked for"
            os.set_blocking(pipe.fileno(), False)
        order = {
            "sink": sink.symbol,
            "options": dict(sink.options),
            "place": dict(sink.place),
            "samples": sink.samples,
            "wait_s": sink.wait_s,
        }
        order |= {
            "folder": str(self.folder),
            "state": str(place / f"{sink.key}.json"),
            "scratch": self._scratch,
            "mark": self._mark,
        }
        self._pending += frame(
            {**order, "config": self._hider.tree, "kept": kept, "now": time.time(), "path": sys.path}
        )
        self._pump()

    def row(self, step: int, metrics: str, samples: Sequence[str]) -> None:
        """Send a row to the sink.

        Args:
            metrics: the row's line of `metrics.jsonl`.
            samples: the row's lines of `samples.jsonl`.
        """
        if self._process is None:
            return
        texts = [self._hider.text(line) for line in samples] if self.sink.samples else []
        message = frame({"metrics": metrics, "samples": texts, "seconds": time.time()})
        self._pending += message
        self._given.append((step, len(message)))
        self._lag += len(message)
        self._pump()
        if self._process is not None and (len(self._given) > _MOST_ROWS or self._lag > _MOST_BYTES):
            self._fail(
                f"has not taken the row of step {self._given[0][0]} yet, and {len(self._given):,} rows wait"
            )

    def is_done(self, since: float) -> bool:
        """Return True if the sink's process has ended or `wait_s` seconds have passed since the last row. If
        the time is over and the sink is not closed, kill the process and warn that rows may be missing.

        Args:
            since: time at which the last row was sent, in seconds of `time.monotonic`.
        """
        if self._process is not None:
            self._pump()
        if self._process is None:
            return True
        if not self._pending and self._process.stdin is not None:
            self._process.stdin.close()
        is_late = time.monotonic() - since > self.sink.wait_s
        if is_late and not self._is_closed:
            self._fail(f"was not done {self.sink.wait_s:g} s after the last row (its wait_s)")
        return is_late or (self._is_closed and self._process is not None and self._process.poll() is not None)

    def end(self) -> None:
        """Kill the sink's process and the processes that it started, and remove its temporary folder."""
        process, self._process = self._process, None
        if process is not None:
            _open.discard(self)
            if process.poll() is None:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with suppress(OSError):
                        pipe.close()
            process.wait()
            end_all_marked(self._mark)
        if self._scratch:
            shutil.rmtree(self._scratch, ignore_errors=True)

    def let_go(self) -> None:
        """Close the pipes to the sink's process. A forked child calls this, because it must not keep the
        pipes open."""
        process, self._process = self._process, None
        for pipe in (process.stdin, process.stdout) if process is not None else ():
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()

    def _environment(self) -> dict[str, str]:
        one = {name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "PYTHONDONTWRITEBYTECODE")}
        package = str(Path(__file__).parent.parent.parent)
        return {**os.environ, **one, "PYTHONPATH": package, "TMPDIR": self._scratch, VARIABLE: self._mark}

    def _pump(self) -> None:
        """Write to the process and read from it, as far as this is possible without waiting."""
        assert self._process is not None, "it runs"
        reading, writing = self._process.stdout, self._process.stdin
        assert reading is not None, "pipes were asked for"
        if writing is not None and not writing.closed:
            with suppress(BlockingIOError, BrokenPipeError):  # a dead process is seen below
                while self._pending:
                    del self._pending[: os.write(writing.fileno(), memoryview(bytes(self._pending[: 2**16])))]
        is_over = False
        with suppress(BlockingIOError):
            while not is_over:
                said = os.read(reading.fileno(), 2**16)
                self._heard += said
                is_over = not said
        while self._process is not None and (message := self._message()) is not None:
            self._take(message)
        if is_over and self._process is not None and not self._is_closed:
            self._fail(f"lost its process ({_ending(self._process.wait())})")

    def _message(self) -> dict[str, Any] | None:
        if len(self._heard) < HEADER.size:
            return None
        (size,) = HEADER.unpack_from(self._heard)
        if len(self._heard) < HEADER.size + size:
            return None
        body = bytes(self._heard[HEADER.size : HEADER.size + size])
        del self._heard[: HEADER.size + size]
        message: dict[str, Any] = msgspec.msgpack.decode(body)
        return message

    def _take(self, message: Mapping[str, Any]) -> None:
        if "failed" in message:
            self._fail(str(message["failed"]))
        self._is_closed = self._is_closed or "closed" in message
        self._next = message.get("next", self._next)
        while self._given and self._given[0][0] < self._next:
            self._lag -= self._given.popleft()[1]

    def _fail(self, what: str) -> None:
        self.end()
        said = printable(" ".join(self._hider.text(what).split()))[:_SHOWN]
        warn(
            f"the sink {self.sink.key} {said}; the run goes on without it, and rows from step "
            f"{self._next} on may be missing there "
            f"({self.folder / 'sinks' / self.sink.key}.log has what it wrote)"
        )


def finish_all(sinks: Sequence[SinkProcess]) -> None:
    """Wait until every sink of a run is done, and end the sinks' processes. If this function is interrupted,
    the processes end too."""
    begin = time.monotonic()
    try:
        waiting = list(sinks)
        while waiting := [sink for sink in waiting if not sink.is_done(begin)]:
            time.sleep(_TICK_S)
    finally:
        for sink in sinks:
            sink.end()


def _ending(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


_open: "weakref.WeakSet[SinkProcess]" = weakref.WeakSet()
"""The sinks of this process whose processes are running."""


def _let_go() -> None:
    for sink in list(_open):
        sink.let_go()
    _open.clear()


os.register_at_fork(after_in_child=_let_go)
