"""The protocol of a sink, and the values that a sink gets: the run, and its rows."""

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
        id: the name that `open` returned in the previous process of this run. None in the first process of a
            run or of a fork; None if `open` returned none; and None if the options that say where rows go
            have changed since.
    """

    folder: Path
    config: Mapping[str, Any]
    id: str | None


@dataclass(frozen=True)
class Row:
    """A line of `metrics.jsonl`.

    Attributes:
        values: the metrics by name.
        seconds: when the row was made, in seconds since 1970. For the rows that were there before the sink's
            process started, the time is computed as if the run had never paused.
        samples: the records of the step in `samples.jsonl`; empty unless `samples: true`.
    """

    step: int
    values: Mapping[str, float]
    seconds: float
    samples: Sequence[Mapping[str, Any]] = ()


class Sink(Protocol):
    """Another place for the rows of a run. A sink is constructed from its options and opened, gets rows of
    the run in the order of the steps, and is closed. If it raises, users are warned once, and the run goes on
    without it.

    The next process of the run sends the sink the rows after the last one that it took. So a sink gets each
    row at most once, with two exceptions. If the options that say where rows go have changed, the sink gets
    all rows again. If the class attribute `begins_anew` is True, the sink starts over in every process:
    `open` deletes what earlier processes wrote, and the sink then gets all rows of the run.

    Our own sinks also declare `Config` (the class of their options), `extra` (the extra of this package that
    installs their library), `place` (the options that say where the rows go) and `told` (the options that
    `oat check` shows).
    """

    def open(self, run: Opening) -> str | None:
        """Prepare to take rows. Return the name by which a later process of the run finds what this process
        wrote, or None if no name is needed."""

    def row(self, row: Row) -> None: ...

    def close(self) -> None: ...
