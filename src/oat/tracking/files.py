"""The files that people read while a run goes on. `metrics.jsonl` has one line for the start and one for each
step. `samples.jsonl` has some groups of each step. `advantages.jsonl` has the advantages of the responses
that a step learns from, if the algorithm has any. `environment.json` has the machine, versions and code of
the run. Sinks get the lines of `metrics.jsonl` and, if their options ask for it, those of `samples.jsonl`."""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from oat.errors import DirectoryError, printable, warn
from oat.files import DirectoryGuard, parse_json, saying_what_is_free, write_atomically
from oat.rundir.provenance import ProvenanceWriter
from oat.rundir.rows import content_of, is_step, sound_advantages, sound_rows
from oat.tracking.sink_process import SinkProcess, finish_all
from oat.types import Feedback, Item, Trajectory

MAX_COLUMN = 4000
"""Largest number of characters of a data column in `samples.jsonl`. Prompts and responses are not cut,
because other settings limit their numbers of tokens."""

STREAMS = {"metrics": "metrics.jsonl", "samples": "samples.jsonl", "advantages": "advantages.jsonl"}
"""The names of the files to which a run adds lines."""


class Tracking:
    """The writer of the run's `STREAMS`. Row n of `metrics.jsonl` describes the state after n steps, so row 0
    describes the start.

    Args:
        samples: largest number of groups that are written for each step.
        turns: function that returns the turns of an episode; None for an episode of one turn.
        told: writer of `environment.json`; None: the file is not written.
        sinks: the processes of the sinks, which also get the lines of metrics and samples.
        standing: files and folders that must exist whenever a row is written.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        samples: int,
        turns: Callable[[Trajectory], list[dict[str, Any]] | None] = lambda _: None,
        told: ProvenanceWriter | None = None,
        sinks: Sequence[SinkProcess] = (),
        standing: DirectoryGuard | None = None,
    ):
        self.paths = {stream: run_dir / name for stream, name in STREAMS.items()}
        self.samples = samples
        self.turns = turns
        self.told = told
        self.sinks = sinks
        self.standing = standing or DirectoryGuard()
        self.files: dict[str, TextIO] = {}
        self._streams = DirectoryGuard()

    def open(self, step: int, *, is_closed: bool = True) -> None:
        """Remove from the streams the rows that the run will write again, and open them for the next row. A
        run without advantages has no file for them.

        Args:
            step: number of steps that are done. If it is 0, all rows are removed.
            is_closed: True: rows 0 to `step` are kept. False: only the rows before row `step` are kept,
                and the advantages of step `step`, which were written before its row. Without effect if `step`
                is 0.

        Raises:
            ConfigError: somebody has changed `environment.json`.
            DataError: a folder or a pipe has the name of a stream.
            DirectoryError: the run directory was moved, removed or replaced.
        """
        self.standing.refuse_lost(DirectoryError)
        kept_rows = step + is_closed if step > 0 else 0
        if self.told is not None:
            self.told.begin(kept_rows)
        for name, path in self.paths.items():
            content, is_there = content_of(path), path.exists()
            if name == "metrics":
                kept, damage = _metrics_before(content, kept_rows)
            elif name == "samples":
                kept, damage = _lines_before(name, content, kept_rows)
            else:
                kept, damage = _advantages_before(content, step + 1) if is_there and step > 0 else ([], "")
            if damage:
                warn(f"{path}: {damage}; the run goes on, and what cannot be read is taken out")
            self._begin(name, kept, is_there=is_there)
        self._streams = DirectoryGuard(*self.paths.values())
        for sink in self.sinks:
            sink.open(kept_rows)
        if step == 0 and self.told is not None:
            self.told.tell()

    def row(self, step: int, values: Mapping[str, float], feedback: Feedback | None = None) -> None:
        """Write the row of a step and its samples.

        Raises:
            DirectoryError: the run directory or one of the streams was moved, removed or replaced, so the
                row would be lost.
        """
        self._refuse_lost()
        if self.told is not None:
            self.told.tell()
        shown = [
            _line({"step": step, **_readable(item), **self._turns(item)})
            for item in (feedback.asked[: self.samples] if feedback else ())
        ]
        for line in shown:
            self._write("samples", line)
        metrics = _line({"step": step, **dict(sorted(values.items()))})
        self._write("metrics", metrics)
        for sink in self.sinks:
            sink.row(step, metrics, shown)

    def advantages(self, step: int, values: Sequence[Sequence[float | None]]) -> None:
        """Write the advantages of the responses of a step's questions (`used_advantages`). From the first
        step on in which a response has one, every step has a line.

        Raises:
            DirectoryError: see `row`.
        """
        self._refuse_lost()
        if "advantages" not in self.files:
            if all(value is None for own in values for value in own):
                return
            self._open("advantages")
            self._streams = DirectoryGuard(*self.paths.values())
        self._write("advantages", _line({"step": step, "advantages": values}))

    def flush(self) -> None:
        """Force the streams to disk. The run calls this before it writes a checkpoint, because a continued
        run needs the row of the checkpoint's step.

        Raises:
            DirectoryError: see `row`.
        """
        self._refuse_lost()
        if self.told is not None:
            self.told.amend()
        for name, file in self.files.items():
            with saying_what_is_free(self.paths[name]):
                file.flush()
                os.fsync(file.fileno())

    def close(self) -> None:
        """Close the streams and wait for the sinks to finish. Errors of closing are ignored, because every
        row has been written already."""
        for file in self.files.values():
            with suppress(OSError):
                file.close()
        finish_all(self.sinks)

    def _turns(self, item: Item) -> dict[str, Any]:
        """Return the field `turns`: for each response its turns, or None. Without an episode of several
        turns there is no such field."""
        turns = [self.turns(trajectory) for trajectory in item.group.trajectories]
        return {"turns": turns} if any(turns) else {}

    def _refuse_lost(self) -> None:
        self.standing.refuse_lost(DirectoryError)
        self._streams.refuse_lost(DirectoryError)

    def _begin(self, name: str, kept: Sequence[bytes], *, is_there: bool) -> None:
        """Leave only the kept lines in a stream, and open it."""
        if name == "advantages" and not kept:
            if is_there:  # an empty file would look as if somebody had emptied it
                self.paths[name].unlink()
            if name in self.files:
                self.files.pop(name).close()
            return
        if is_there:
            write_atomically(self.paths[name], b"".join(line + b"\n" for line in kept).decode("utf-8"))
        self._open(name)

    def _open(self, name: str) -> None:
        self.files[name] = self.paths[name].open("a", encoding="utf-8")

    def _write(self, name: str, line: str) -> None:
        with saying_what_is_free(self.paths[name]):
            self.files[name].write(line + "\n")
            self.files[name].flush()


def _line(record: Mapping[str, Any]) -> str:
    return printable(json.dumps(record, ensure_ascii=False))


def step_line(step: int, last: int | None, values: Mapping[str, float], shown: Sequence[str]) -> str:
    """Return one line about a step, for people.

    Args:
        last: largest number of steps of the run; None if the run has no limit on steps.
        shown: the metrics of the line (`tracking.shown`). Those that `values` lacks are left out.
    """
    return "  ".join(
        [
            f"step {step}" + (f"/{last}" if last else ""),
            *(f"{name} {values[name]:.4g}" for name in shown if name in values),
        ]
    )


def _metrics_before(content: bytes, end: int) -> tuple[list[bytes], str]:
    """Return the lines of the rows before step `end`, and a sentence about damaged lines. The sentence is ""
    if no line is damaged."""
    rows, damage = sound_rows(content, end)
    return [line for line, _ in rows], damage


def _advantages_before(content: bytes, end: int) -> tuple[list[bytes], str]:
    """Return the line of each step before `end`, and a sentence about damage, or "". Of several lines of a
    step the first is kept, as the run wrote it before another was added."""
    rows, damage = sound_advantages(content, end)
    kept: dict[int, bytes] = {}
    for line, row in rows:
        kept.setdefault(row["step"], line)
    return [*kept.values()], damage + (" (the first is kept)" if len(kept) < len(rows) else "")


def _lines_before(what: str, content: bytes, end: int) -> tuple[list[bytes], str]:
    """Return the lines of the steps before `end`, and a sentence about lines that cannot be read. The
    sentence is "" if all lines can be read. A missing line goes unnoticed, because a step may have any number
    of lines."""
    lines = content.split(b"\n")[:-1]
    steps = [_step_of(line) for line in lines]
    last = max((place for place, step in enumerate(steps) if step is not None and step < end), default=-1)
    unreadable = sum(step is None for step in steps[:last])
    damage = f"{unreadable} of its first {last + 1} lines cannot be read as {what}" if unreadable else ""
    return [line for line, step in zip(lines, steps, strict=True) if step is not None and step < end], damage


def _step_of(line: bytes) -> int | None:
    try:
        step = parse_json(line.decode("utf-8"))["step"]
    except (ValueError, KeyError, TypeError):
        return None
    return step if is_step(step) else None


def _readable(item: Any) -> dict[str, Any]:
    prompt, answer = item.group.prompt, item.answer
    return {
        "row": prompt.row,
        "prompt": [message.plain for message in prompt.messages],
        "responses": [trajectory.text for trajectory in item.group.trajectories],
        "finish": [trajectory.finish_reason for trajectory in item.group.trajectories],
        "reference": prompt.reference,
        "columns": {name: _bounded(value) for name, value in prompt.columns.items()},
        "asked": list(item.question.picks),
        "oracle": item.answer.by,
        "values": list(item.answer.values),
        "marks": list(item.answer.marks),
        "label": item.label,
        **({"steps": list(answer.steps), "step_unit": answer.step_unit} if answer.steps else {}),
        **({"sources": dict(answer.sources)} if answer.sources else {}),
    }


def _bounded(value: Any) -> Any:
    """Return the value. If its text or JSON is longer than `MAX_COLUMN`, return the beginning of this text,
    followed by the number of characters."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return value if len(text) <= MAX_COLUMN else f"{text[:MAX_COLUMN]}... ({len(text):,} characters)"
