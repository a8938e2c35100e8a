"""The protocol of a sink, and what it is given."""

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
        seconds: when the row was made, since 1970. For rows of earlier processes, the time as if the run had
            never stood still.
        samples: the lines of `samples.jsonl` of its step; none unless `samples: true`.
    """

    step: int
    values: Mapping[str, float]
    seconds: float
    samples: Sequence[Mapping[str, Any]] = ()


class Sink(Protocol):
    """Another place for the rows of a run. A sink is constructed from its options, opened, given each row of
    the run once in the order of the steps, and closed. If it raises, users are warned once, and the run goes
    on without it; the next process of the run goes on behind the last row that the sink took.

    A class attribute `begins_anew = True` says that the sink keeps nothing of earlier processes: `open`
    clears its place, and all rows of the run follow.

    Our own sinks also declare `Config` (their options), `extra` (the extra of this package that brings their
    library), `place` (the options that say where the rows go) and `told` (the options that `oat check`
    shows).
    """

    def open(self, run: Opening) -> str | None:
        """Begin. Return the name by which a later process of the run finds what this one wrote, or None if it
        needs none."""

    def row(self, row: Row) -> None: ...

    def close(self) -> None: ...
