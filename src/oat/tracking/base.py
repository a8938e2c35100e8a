"""What a sink is, and what it is given."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True)
class Opening:
    """The run that a sink is opened for.

    Attributes:
        folder: the run directory, absolute.
        config: the resolved configuration, without secrets.
        id: what `open` returned in an earlier process of this run; None in the first one, and in a fork.
    """

    folder: Path
    config: Mapping[str, Any]
    id: str | None


@dataclass(frozen=True)
class Row:
    """A line of `metrics.jsonl`.

    Attributes:
        values: the metrics by name.
        seconds: when it was made, since 1970; of rows that were there before this process, as if the run had
        not stood still since.
        samples: the lines of `samples.jsonl` of its step; none unless `samples: true`.
    """

    step: int
    values: Mapping[str, float]
    seconds: float
    samples: Sequence[Mapping[str, Any]] = ()


class Sink(Protocol):
    """A place for rows. It is made from its options, opened, given each row of the run once, in order of
    their steps, and closed. What it raises is said to people once, and the run goes on without it; the next
    process of the run goes on behind the last row that it took.

    A class attribute `begins_anew = True` says that it keeps nothing of earlier processes: `open` clears its
    place, and all rows of the run follow.
    """

    def open(self, run: Opening) -> str | None:
        """Begin; returns the name by which a later process of the run finds what this one wrote, or None
        where it needs none."""

    def row(self, row: Row) -> None: ...

    def close(self) -> None: ...
