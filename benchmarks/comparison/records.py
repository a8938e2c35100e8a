"""The CSV of the comparison: one row for each evaluation of each run."""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from oat.errors import DataError
from oat.files import write_atomically

DONE = "done"
"""The outcome of a run that came to its end."""
Key = tuple[str, str, int, str]
"""Name, settings, seed and digest of a run (`Job.key`)."""


@dataclass(frozen=True)
class Evaluation:
    """One evaluation of a run.

    Attributes:
        step: number of steps before the evaluation.
        queries: number of queries that training had made.
        seconds: duration of these steps on the clock, without evaluations.
        cpu_seconds: time of the processor in these steps.
        sampled: accuracy of one sampled response to each held-out prompt.
        greedy: accuracy of the greedy responses.
    """

    step: int
    queries: int
    seconds: float
    cpu_seconds: float
    sampled: float
    greedy: float


@dataclass(frozen=True)
class Record:
    """A finished run.

    Attributes:
        purpose: `search` or `final`.
        outcome: `done`, or the message of the error that ended the run.
        machine: processor and number of cores.
        commit: the last commit before the run that changed the code of `oat`.
        evaluations: at least that of the start, in order.
    """

    name: str
    settings: str
    seed: int
    digest: str
    purpose: str
    outcome: str
    machine: str
    commit: str
    evaluations: tuple[Evaluation, ...]

    @property
    def key(self) -> Key:
        return self.name, self.settings, self.seed, self.digest

    @property
    def last(self) -> Evaluation:
        return self.evaluations[-1]

    @property
    def is_done(self) -> bool:
        return self.outcome == DONE


_OF_RUN = tuple(field.name for field in fields(Record) if field.name != "evaluations")
_OF_EVALUATION = tuple(field.name for field in fields(Evaluation))


Records = Mapping[Key, Record]


def accuracies(records: Records) -> dict[Key, float | None]:
    """Return the accuracy of sampled responses at the end of each run; None for a run that failed."""
    return {key: record.last.sampled if record.is_done else None for key, record in records.items()}


def read_records(path: Path) -> dict[Key, Record]:
    """Return the runs of a CSV by key, in its order; none if there is no such file.

    Raises:
        DataError: a line lacks a column, or a value is no number.
    """
    if not path.exists():
        return {}
    evaluations: dict[tuple[str, ...], list[Evaluation]] = {}
    for number, row in enumerate(csv.DictReader(io.StringIO(path.read_text(encoding="utf-8"))), 2):
        try:
            found = Evaluation(*(_KINDS[name](row[name]) for name in _OF_EVALUATION))
            evaluations.setdefault(tuple(row[name] for name in _OF_RUN), []).append(found)
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(
                f"{path}:{number}: not a row of the comparison ({error}); take the lines of this run out, "
                "and `make compare` runs it again"
            ) from None
    records = [_record(dict(zip(_OF_RUN, run, strict=True)), rows) for run, rows in evaluations.items()]
    return {record.key: record for record in records}


_KINDS = {
    "step": int,
    "queries": int,
    "seconds": float,
    "cpu_seconds": float,
    "sampled": float,
    "greedy": float,
}


def _record(run: Mapping[str, str], rows: Sequence[Evaluation]) -> Record:
    return Record(**{**run, "seed": int(run["seed"])}, evaluations=tuple(rows))  # type: ignore[arg-type]


def write_records(path: Path, records: Iterable[Record]) -> None:
    """Write the runs as a CSV, sorted by name, purpose, settings and seed. The file is replaced at once."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*_OF_RUN, *_OF_EVALUATION])
    for record in sorted(records, key=lambda each: (each.name, each.purpose, *each.key[1:])):
        run = [getattr(record, name) for name in _OF_RUN]
        for each in record.evaluations:
            writer.writerow([*run, *(_written(value) for value in asdict(each).values())])
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, text.getvalue())


def _written(value: float) -> Any:
    return round(value, 4) if isinstance(value, float) else value
