"""Reading of rows of metrics, of advantages and of evaluations (JSON lines) from the files of a run. Missing
or damaged rows are reported."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from oat.errors import DataError, warn
from oat.files import parse_json

_NAMED = 5
"""A message lists at most this many stretches of lines or steps (`_Spans`), such as "3 to 5"."""

_BOUND = 2**63
"""The bound of whole numbers in a row: their absolute value must be smaller, as SQLite requires."""

_Spans = Sequence[tuple[int, int]]
"""Ascending whole numbers, stored as the first and the last number of each stretch without a gap."""


def content_of(file: Path) -> bytes:
    """Return what is in a file of rows; nothing if there is no file.

    Raises:
        DataError: a folder or something else that is no file has its name. A pipe would never end.
    """
    if not file.exists():
        return b""
    if not file.is_file():
        raise DataError(f"{file}: a file of the run has this name, and this is no file; move it away")
    return file.read_bytes()


def read_rows(file: Path) -> list[dict[str, Any]]:
    """Return the objects of a JSONL file; empty if there is no file. If the last line is still being written,
    it is left out.

    Raises:
        DataError: a complete line is not a JSON object, or what is there is no file.
    """
    rows = []
    # the text after the last line end is not complete yet
    for number, line in enumerate(content_of(file).split(b"\n")[:-1], 1):
        try:
            row = parse_json(line)
        except ValueError as error:
            raise DataError(
                f"{file}:{number}: this is not JSON ({error}); take the line out, or `oat train` the run "
                "again"
            ) from None
        if not isinstance(row, dict):
            raise DataError(
                f"{file}:{number}: expected an object, got {line[:40]!r}; take the line out, or `oat "
                "train` the run again"
            )
        rows.append(row)
    return rows


def read_metrics(file: Path) -> list[dict[str, Any]]:
    """Return the sound rows of a `metrics.jsonl`; empty if there is no file. A warning names damaged lines,
    and steps with no row or with several."""
    rows, damage = sound_rows(content_of(file))
    if damage:
        warn(f"{file}: {damage}; the others are read")
    return [row for _, row in rows]


def read_advantages(file: Path) -> dict[int, tuple[int, list[list[float | None]]]]:
    """Return by step the number of its line in an `advantages.jsonl`, and its advantages; empty if there is
    no file.

    Raises:
        DataError: a line is something else, or a step has several lines.
    """
    found: dict[int, tuple[int, list[list[float | None]]]] = {}
    for number, row in enumerate(read_rows(file), 1):
        if not _has_advantages(row):
            raise DataError(
                f"{file}:{number}: expected a step and, for each of its questions, a list of numbers or "
                "nulls; take the line out, or `oat train` the run again"
            )
        if row["step"] in found:
            raise DataError(
                f"{file}:{number}: line {found[row['step']][0]} is about step {row['step']} too; take one of "
                "them out"
            )
        found[row["step"]] = number, row["advantages"]
    return found


def sound_rows(content: bytes, end: int | None = None) -> tuple[list[tuple[bytes, dict[str, Any]]], str]:
    """Return the rows of a `metrics.jsonl`, and what is wrong with the file. If the last line is still being
    written, it is left out.

    Args:
        end: return only rows 0 to `end` - 1, and report those that are missing. None: return all rows, and
            report those that are missing before the highest row.

    Returns:
        Each row with its line, in the order of the file; and a sentence about what is wrong, or "". The
        sentence names lines that are not rows, and steps with no row or with several. It also says if rows
        are not in the order of their steps.
    """
    return _sound(content, "metrics", _is_metrics, 0, end)


def sound_advantages(content: bytes, end: int) -> tuple[list[tuple[bytes, dict[str, Any]]], str]:
    """Return the rows of an `advantages.jsonl`, and what is wrong with the file, as `sound_rows` does.

    The rows of steps before the first in the file are not missed, because earlier versions wrote none. In a
    file without any row all are missed: a run makes the file when it has a row. The first may be cut off.
    """
    lines = content.split(b"\n")[:-1]
    steps = [row["step"] for row in map(_object, lines) if row is not None and _has_advantages(row)]
    start = min(steps, default=end if content and not lines else 1)
    return _sound(content, "advantages", _has_advantages, start, end)


def _sound(
    content: bytes, what: str, is_sound: Callable[[dict[str, Any]], bool], start: int, end: int | None
) -> tuple[list[tuple[bytes, dict[str, Any]]], str]:
    """Return the rows and what is wrong; `start` is the first step that must have a row (`sound_rows`)."""
    rows, unreadable = [], []
    for number, line in enumerate(content.split(b"\n")[:-1], 1):
        row = _object(line)
        if row is None or not is_sound(row):
            unreadable.append(number)
        elif end is None or row["step"] < end:
            rows.append((number, line, row))
    counts = Counter(row["step"] for *_, row in rows)
    missing = _without(counts, start, max(counts, default=-1) + 1 if end is None else end)
    if end is not None and not missing:
        # a damaged line after the wanted rows may be the row of a later step
        unreadable = [
            number for number in unreadable if number < max((place for place, *_ in rows), default=0)
        ]
    twice = [step for step, count in counts.items() if count > 1]
    found = [f"{_said('line', _spans(unreadable))} cannot be read as {what}"] if unreadable else []
    found += [f"there is no row of {_said('step', missing)}"] if missing else []
    found += [f"there are several rows of {_said('step', _spans(twice))}"] if twice else []
    found += (
        ["the rows are not in the order of their steps"] if not twice and [*counts] != sorted(counts) else []
    )
    return [(line, row) for _, line, row in rows], ", and ".join(found)


def _object(line: bytes) -> dict[str, Any] | None:
    """Return the object in a line; None if the line has something else."""
    try:
        row = parse_json(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


def _is_metrics(row: dict[str, Any]) -> bool:
    """Return True if a row has a step, and numbers by name."""
    return is_step(row.get("step")) and all(
        isinstance(value, float) or (isinstance(value, int) and abs(value) < _BOUND) for value in row.values()
    )


def _has_advantages(row: dict[str, Any]) -> bool:
    """Return True if a row has a step from 1, and a list of finite numbers or nulls for each question."""
    step, groups = row.get("step"), row.get("advantages")
    return (
        is_step(step)
        and step != 0
        and isinstance(groups, list)
        and all(isinstance(group, list) and all(map(_is_advantage, group)) for group in groups)
    )


def _is_advantage(value: Any) -> bool:
    if type(value) is int:
        return abs(value) < _BOUND
    return value is None or (isinstance(value, float) and math.isfinite(value))


def is_step(value: Any) -> bool:
    """Return True if a value from a file can be the number of a step."""
    return type(value) is int and 0 <= value < _BOUND


def _spans(numbers: Iterable[int]) -> _Spans:
    ordered = sorted(numbers)
    gaps = [place for place in range(1, len(ordered)) if ordered[place] > ordered[place - 1] + 1]
    return (
        [(ordered[begin], ordered[end - 1]) for begin, end in pairwise([0, *gaps, len(ordered)])]
        if ordered
        else []
    )


def _without(numbers: Iterable[int], start: int, end: int) -> _Spans:
    """Return, as spans, the numbers from `start` to `end` - 1 that are missing in `numbers`. All of `numbers`
    are in this range."""
    return [
        (before + 1, after - 1)
        for before, after in pairwise([start - 1, *sorted(numbers), end])
        if after > before + 1
    ]


def _said(what: str, spans: _Spans) -> str:
    """Return spans in words, such as "lines 3 to 5 and 9"."""
    count, rest = (sum(end - begin + 1 for begin, end in some) for some in (spans, spans[_NAMED:]))
    said = [str(begin) if begin == end else f"{begin} to {end}" for begin, end in spans[:_NAMED]] + (
        [f"{rest} more"] if rest else []
    )
    listed = f"{', '.join(said[:-1])} and {said[-1]}" if len(said) > 1 else said[0]
    return f"{what}{'s' if count > 1 else ''} {listed}"
