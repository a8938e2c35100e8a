"""The side of a sink: the process in which it runs. `sink_process.py` starts the process and may kill it.

Why a process: a sink's library may hang, crash, print, exit or start other processes. In a thread of
training, each of these would disturb training.

Messages: each message from training is a row; an empty one says that no row follows. This process sends

    {"next": step}      the sink has all rows before this step
    {"failed": text}    the sink raised an error; no further message follows
    {"closed": true}    the sink is closed; its libraries may still be ending

The process writes all other output to `RUN/sinks/NAME.log`.

End: this process ignores SIGTERM and Ctrl-C. When its connection ends, because training has ended or was
killed, the sink takes the rows that have arrived, and is closed. If this takes too long, the process kills
itself. The sink's process of a continued run waits for this process to end. What the library has started ends
with this process (`processes/guard.py`); wandb's process, for example, leaves the session.

State: `RUN/sinks/NAME.json` has the run's id in the sink and the step of the next row. This step is moved
forward before the sink gets a row, and is moved back if the sink raises. So if this process is killed while
the sink takes a row, the row may be missing in the sink. The opposite order could write the row twice, and no
service can remove a point.
"""

import fcntl
import json
import os
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any

import msgspec

from oat.errors import escape_streams
from oat.files import parse_json
from oat.plugins.loading import load_symbol
from oat.processes.pipe import Pipe
from oat.tracking.base import Opening, Row

NO_MORE = b""
"""The message that no row follows."""
_CALL_S = 600
"""Seconds that a call of the sink may take. Afterwards, the kernel ends this process, even if the sink's code
never returns to Python."""


def after_training_s(wait_s: float) -> float:
    """Return how many seconds the process of a sink may go on when training has ended without it."""
    return 1.5 * wait_s + 2.0


def serve(pipe: Pipe, order: Mapping[str, Any]) -> None:
    """Open a sink, give it the rows of its run, and close it.

    Args:
        order: what `SinkProcess` was given.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # these are for training, with which the connection ends
    escape_streams()
    rows: SimpleQueue[Any] = SimpleQueue()
    Thread(target=_hear, args=(pipe, rows, order), daemon=True).start()
    doing = "be opened"
    try:
        with _alone(Path(order["state"]).with_suffix(".lock")):
            sink = load_symbol(order["sink"])(**order["options"])
            state = State(
                Path(order["state"]), order["place"], begins_anew=getattr(sink, "begins_anew", False)
            )
            with _limited():
                state.keep(sink.open(Opening(Path(order["folder"]), order["config"], state.id)))
            doing = "take a row"
            for row in _rows(order, state.next, rows):
                if row.step >= state.next:
                    state.begin(row.step)
                    try:
                        with _limited():
                            sink.row(row)
                    except BaseException:
                        state.take_back(row.step)
                        raise
                _tell(pipe, {"next": row.step + 1})
            doing = "be closed"
            with _limited():
                sink.close()
    except BaseException as error:  # a library may also call `sys.exit`
        _tell(pipe, {"failed": f"could not {doing}: {type(error).__name__}: {error}"[:2000]})
        return
    _tell(pipe, {"closed": True})


class State:
    """The state of a sink. This process stores it in `RUN/sinks/NAME.json`, and the run's next process reads
    it.

    Args:
        file: the path of this file.
        place: the options that say where the rows go. If they have changed, the sink gets all rows again.
        begins_anew: True if the sink gets all rows in every process.

    Attributes:
        id: the name that the sink's `open` returned, in this process or an earlier one; None if there is
            no name.
        next: step of the first row that the sink has not had.
    """

    def __init__(self, file: Path, place: Mapping[str, Any], *, begins_anew: bool):
        self.file, self.place = file, place
        before: dict[str, Any] = {}
        with suppress(OSError, ValueError):
            before = parse_json(file.read_text(encoding="utf-8"))
        if not isinstance(before, dict) or before.get("place") != place:
            before = {}
        self.id = before.get("id") if isinstance(before.get("id"), str) else None
        self.next = before["next"] if isinstance(before.get("next"), int) and not begins_anew else 0

    def keep(self, id: str | None) -> None:
        self.id = id
        self._write()

    def begin(self, step: int) -> None:
        self.next = step + 1
        self._write()

    def take_back(self, step: int) -> None:
        self.next = step
        self._write()

    def _write(self) -> None:
        new = self.file.with_name(f".new-{self.file.name}")
        new.write_text(json.dumps({"id": self.id, "next": self.next, "place": self.place}), encoding="utf-8")
        new.replace(self.file)


@contextmanager
def _alone(file: Path) -> Iterator[None]:
    """A context in which this process has the lock of a sink of a run. It first waits until no other process
    has the lock. For example, the sink's process from before a restart of the run may still have it."""
    with file.open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def _limited() -> Iterator[None]:
    """A context with a timer: if the body takes longer than `_CALL_S` seconds, the kernel ends this
    process."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, _CALL_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _rows(order: Mapping[str, Any], first: int, rows: "SimpleQueue[Any]") -> Iterator[Row]:
    """Yield the rows on disk from the step `first` onwards, and then the rows that training sends."""
    folder, kept = Path(order["folder"]), order["kept"]
    seconds = {
        row["step"]: sum(row.get(f"time/{name}_s", 0.0) for name in ("step", "evaluate", "save"))
        for row in _lines(folder, "metrics", kept)
    }
    now = order["now"] - sum(seconds.values())
    samples = _lines(folder, "samples", kept) if order["samples"] else iter(())
    sample = next(samples, None)
    for values in _lines(folder, "metrics", kept):
        step, own = values.pop("step"), []
        now += seconds[step]
        while sample is not None and sample["step"] <= step:
            own += [sample] if sample["step"] == step else []
            sample = next(samples, None)
        if step >= first:
            yield Row(step, values, now, own)
    while (message := rows.get()) is not None:
        values = json.loads(message["metrics"])
        step = values.pop("step")
        yield Row(step, values, message["seconds"], [json.loads(line) for line in message["samples"]])


def _lines(folder: Path, name: str, kept: int) -> Iterator[dict[str, Any]]:
    """Yield the records of a stream (`metrics` or `samples`) before the step `kept`. Lines that cannot be
    read are left out without a warning, because the run has warned of them."""
    with (
        suppress(FileNotFoundError),
        (folder / f"{name}.jsonl").open(encoding="utf-8", errors="replace", newline="\n") as file,
    ):
        for line in file:
            with suppress(ValueError):
                record = parse_json(line)
                if isinstance(record, dict) and isinstance(record.get("step"), int) and record["step"] < kept:
                    yield record


def _hear(pipe: Pipe, rows: "SimpleQueue[Any]", order: Mapping[str, Any]) -> None:
    """Put the rows that arrive into the queue, and None when no more follow. When the connection has ended,
    give this process the time that it has left, and kill it."""
    with suppress(EOFError, OSError):
        while (message := bytes(pipe.receive().head)) != NO_MORE:
            rows.put(msgspec.msgpack.decode(message))
        rows.put(None)
        pipe.receive()
    rows.put(None)
    time.sleep(after_training_s(order["wait_s"]))
    os.killpg(0, signal.SIGKILL)


def _tell(pipe: Pipe, message: Mapping[str, Any]) -> None:
    with suppress(OSError):  # training has ended
        pipe.send(msgspec.msgpack.encode(message))
