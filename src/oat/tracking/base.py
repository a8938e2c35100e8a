"""The protocol of a sink, and the values that a sink gets: the run and its rows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True)
class Opening:
    """The run for which a sink is opened.

    Attributes:
        folder: the run directory, absolute.
        config: the resolved configuration, without secrets.
        id: the name that `open` returned in the previous process of this run. None in three cases: this is
            the first process of a run or a fork; `open` returned None; or the options that say where rows go
            have changed.
    """

    folder: Path
    config: Mapping[str, Any]
    id: str | None


@dataclass(frozen=True)
class Row:
    """A line of `metrics.jsonl`.

    Attributes:
        values: the metrics by name.
        seconds: time at which the row was made, in seconds since 1970. For rows that are older than the
            sink's process, this is an estimate from their durations, as if the run had never paused.
        samples: the records of the step in `samples.jsonl`; empty without the option `samples: true`.
    """

    step: int
    values: Mapping[str, float]
    seconds: float
    samples: Sequence[Mapping[str, Any]] = ()


class Sink(Protocol):
    """A place, in addition to `metrics.jsonl`, for the rows of a run. A sink is constructed from its
    options, is opened, gets rows in the order of the steps, and is closed. If a sink raises, the user is
    warned once, and the run goes on without the sink.

    When a run is continued, the sink is opened again and gets the rows that it has not had. So a sink gets
    each row at most once, with two exceptions:

    * If the options that say where rows go have changed, the sink gets all rows again.
    * If the class attribute `begins_anew` is True, `open` must delete the output of earlier processes, and
      every process sends all rows.

    The package's own sinks also declare four attributes. `Config` is the class of the options. `extra` is the
    extra of this package that installs the library of the sink's name; None: it needs no library. `place`
    names the options that say where the rows go. `told` names the options that `oat check` shows.
    """

    def open(self, run: Opening) -> str | None:
        """Prepare to take rows. Return a name by which a later process of the run can continue the output of
        this process; None if no name is needed."""

    def row(self, row: Row) -> None: ...

    def close(self) -> None: ...
