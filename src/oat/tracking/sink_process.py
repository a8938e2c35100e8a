"""Training's side of a sink. It starts the process of the sink, sends it rows, and ends it.

Training does not wait for a sink between its steps: rows that the sink's process has not taken yet are kept
here. If too many rows wait, the sink has failed. If a sink fails, its process is killed, the user is warned
once, and the run goes on without the sink. At the end of the run, every sink has `wait_s` seconds for the
remaining rows; then its processes are killed.
"""

import os
import tempfile
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import msgspec

from oat.config.secrets import Hider
from oat.errors import printable, warn
from oat.files import absolute
from oat.processes.pipe import Message
from oat.processes.spawn import Child, ending, on_one_thread
from oat.tracking.sink_side import NO_MORE, after_training_s

_MOST_ROWS, _MOST_BYTES = 10_000, 64 * 2**20
"""Limits on the number of rows that a sink has not taken yet, and on their size in bytes."""
_TICK_S = 0.02
_EXIT_S = 1.0
"""Time in seconds that a process whose connection has ended may take to end."""
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
        self._process: Child | None = None
        self._mark = ""
        self._arrived = SimpleQueue[Message | None]()
        self._given: deque[tuple[int, int]] = deque()
        self._lag = 0
        self._next = 0
        self._has_all = self._is_closed = False

    def open(self, kept: int) -> None:
        """Start the sink's process. If the sink lacks earlier rows of the run, the process first gives it
        these from `metrics.jsonl`.

        Args:
            kept: step of the first row that will be sent with `row`. The rows of earlier steps are in
                `metrics.jsonl`.
        """
        sink, place = self.sink, self.folder / "sinks"
        order = {
            "sink": sink.symbol,
            "options": dict(sink.options),
            "place": dict(sink.place),
            "samples": sink.samples,
            "wait_s": sink.wait_s,
            "folder": str(self.folder),
            "state": str(place / f"{sink.key}.json"),
            "config": self._hider.tree,
            "kept": kept,
            "now": time.time(),
        }
        try:
            place.mkdir(exist_ok=True)
            scratch = tempfile.mkdtemp(prefix="oat-sink-")
            with (place / f"{sink.key}.log").open("wb") as log:
                self._process = Child(
                    "oat.tracking.sink_side:serve",
                    order,
                    self._arrived.put,
                    environment=on_one_thread({**os.environ, "TMPDIR": scratch}),
                    output=log.fileno(),
                    lingers_s=after_training_s(sink.wait_s),
                    folder=scratch,
                )
            self._mark = self._process.mark
        except OSError as error:
            self._fail(f"could not be started: {error}")

    def row(self, step: int, metrics: str, samples: Sequence[str]) -> None:
        """Send a row to the sink.

        Args:
            metrics: the row's line of `metrics.jsonl`.
            samples: the row's lines of `samples.jsonl`.
        """
        if self._process is None:
            return
        texts = [self._hider.text(line) for line in samples] if self.sink.samples else []
        message = msgspec.msgpack.encode({"metrics": metrics, "samples": texts, "seconds": time.time()})
        self._process.link.send(message)
        self._given.append((step, len(message)))
        self._lag += len(message)
        self._take_arrived()
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
        self._take_arrived()
        if self._process is None:
            return True
        if not self._has_all:
            self._has_all = True
            self._process.link.send(NO_MORE)
        is_late = time.monotonic() - since > self.sink.wait_s
        if is_late and not self._is_closed:
            self._fail(f"was not done {self.sink.wait_s:g} s after the last row (its wait_s)")
        return is_late or (self._is_closed and self._process is not None and self._process.has_ended)

    def end(self) -> None:
        """Kill the sink's process and the processes that it started, and remove its temporary folder."""
        process, self._process = self._process, None
        if process is not None:
            process.end()

    def _take_arrived(self) -> None:
        if self._process is not None and self._process.link.is_anothers:
            self._process = None
        with suppress(Empty):
            while self._process is not None:
                message = self._arrived.get_nowait()
                if message is not None:
                    self._take(msgspec.msgpack.decode(message.head))
                elif not self._is_closed:
                    self._process.ends_within(_EXIT_S)
                    self._fail(ending(self._process.end()))

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
