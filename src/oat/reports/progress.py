"""The progress of a run. In a terminal it is a few lines that are redrawn in place; elsewhere it is one line
for each step.

In a terminal, a thread draws the lines four times a second. It only reads values that the run has stored in
the `Display`, so the run waits for it only where both write to the terminal. The cursor stays visible, so the
terminal can be used after a kill.
"""

import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from threading import Event, RLock, Thread
from typing import Any

from oat.files import absolute
from oat.loop import Report, Run
from oat.reports.terminal import is_terminal
from oat.reports.trace import name_boxes
from oat.resolve.about import RunSummary
from oat.rundir.rows import read_metrics
from oat.tracking.files import step_line
from oat.types.questions import in_money

WATCHED = (
    "reward/mean",
    "eval/sampled_win_rate",
    "eval/sampled",
    "eval/greedy",
    "eval/best",
    "eval/pairs/accuracy",
    "pairs/accuracy",
    "loss/total",
)
"""Metrics that may be shown with a sparkline. Without a list of the user (`tracking.shown`), the first two of
them that a run reports are shown, and `CUT`."""
CUT = "response/truncated_frac"

_DRAWN_EACH_S = 0.25
_SHOWN = 2
_RECENT = 30
"""The number of recent rows from which the time left is estimated."""
_CELLS = 24
_BLOCKS = "▁▂▃▄▅▆▇█"
_ASCII = "_.-~=+*#"
_DOING = {
    "sample": "sampling and asking",
    "take": "waiting for answers",
    "prepare": "preparing the update",
    "update": "learning",
    "sync": "handing over the weights",
    "evaluate": "evaluating",
    "save": "saving",
}


@contextmanager
def shown(run: Run, about: RunSummary) -> Iterator[Report]:
    """Yield the function that `loop.train` calls with each row. In a terminal, the lines of a `Display` are
    drawn until the context ends."""
    if not is_terminal():
        yield lambda step, values: print(step_line(step, run.stop.last, values, about.shown), flush=True)
        return
    display = Display(run, about, read_metrics(absolute(about.run_dir) / "metrics.jsonl"))
    name_boxes(run, display.doing)
    with display.drawn():
        yield display.report


@contextmanager
def counted(what: str, steps: int) -> Iterator[Callable[[int], None]]:
    """Show the progress of steps outside a run. Yield a function, which the caller calls after each step with
    the number of steps done. In a terminal, a line shows this number. Elsewhere, one line with the number of
    all steps is printed at the beginning."""
    if not is_terminal():
        print(f"{what}: {steps:,} steps", flush=True)
        yield lambda step: None
        return
    try:
        yield lambda step: print(f"\r{what}: step {step:,} of {steps:,}", end="", flush=True)
    finally:
        print(flush=True)


def opening(run: Run, run_dir: str | Path) -> list[str]:
    """Return the lines that are printed before the first step."""
    begun = run.checkpoints.next_loaded
    is_over = begun is not None and run.stop.steps_done(begun) is not None
    where = (
        ""
        if begun is None
        else f"; the run {'stands at' if is_over else 'goes on from'} its checkpoint after {_steps(begun)}"
    )
    return [
        f"{_steps(run.stop.last) if run.stop.last else 'endless steps'} in {run_dir}{where}",
        *run.notes,
    ]


def _steps(count: int) -> str:
    return "1 step" if count == 1 else f"{count} steps"


def way_on(run: Run, about: RunSummary, reason: str) -> str:
    """Return a sentence for a run that had already ended when it was started again. The sentence says how to
    continue.

    Args:
        reason: the reason why the run ended.
    """
    is_used_up = reason == run.collector.ended or (
        run.stop.last != about.max_steps and reason == run.stop.steps_done(run.stop.last or 0)
    )
    raised = "" if is_used_up else "raise what ended it (stop.max_steps or another field of stop), or "
    used_up = "its prompts are used up (prompts.epochs); " if is_used_up else ""
    return (
        f"it had ended before, and nothing was left to do; {used_up}to go on {raised}begin another run in "
        "a run_dir of its own"
    )


def _console(drawing: Any) -> Any:
    """Return a console that holds the lock `drawing` while it prints. If two threads print at once, rich lets
    each erase the lines that were there before both, and some of the display would stay above it."""
    from rich.console import Console

    class Locked(Console):
        def print(self, *objects: Any, **options: Any) -> None:
            with drawing:
                super().print(*objects, **options)

    # users' code sees another size of the terminal (`plugins/calls.py`)
    return Locked(markup=False, highlight=False, emoji=False, _environ=dict(os.environ))


class Display:
    """The lines that show a run in a terminal.

    Args:
        rows: rows of metrics that earlier processes wrote.
    """

    def __init__(self, run: Run, about: RunSummary, rows: Sequence[Mapping[str, float]] = ()):
        self.run = run
        self.about = about
        self.rows = list(rows)
        self._drawing = RLock()
        self.console = _console(self._drawing)
        self.cells: list[tuple[str, Any, Any]] = []
        self.done = 0.0
        self.left_s: float | None = None
        self.reported = time.monotonic()
        self.now: tuple[str, float] | None = ("starting", self.reported)

    @contextmanager
    def drawn(self) -> Iterator[None]:
        """Draw the lines while the context is open. The cursor stays visible."""
        from rich.live import Live

        live = Live(
            console=self.console,
            get_renderable=self.lines,
            redirect_stderr=sys.stderr.isatty(),
            auto_refresh=False,
        )
        is_over = Event()
        thread = Thread(target=self._redraw, args=(live, is_over), daemon=True)
        with live:
            self.console.show_cursor(True)
            thread.start()
            try:
                yield
            finally:
                is_over.set()
                thread.join()
                self.now = None

    def _redraw(self, live: Any, is_over: Event) -> None:
        while not is_over.wait(_DRAWN_EACH_S):
            with self._drawing:
                live.refresh()

    @contextmanager
    def doing(self, name: str) -> Iterator[None]:
        """While the context is open, show what the run is doing.

        Args:
            name: a key of `_DOING`, which holds the words that are shown.
        """
        before = self.now
        self.now = (_DOING[name], time.monotonic())
        try:
            yield
        finally:
            self.now = before

    def report(self, step: int, values: Mapping[str, float]) -> None:
        """Show the state after a step. If the step was evaluated, also print a permanent line."""
        while self.rows and self.rows[-1]["step"] >= step:
            self.rows.pop()
        self.rows.append({"step": step, **values})
        if any(name.startswith("eval/") for name in values):
            line = step_line(step, self.run.stop.last, values, self.about.shown)
            self.console.print(line, soft_wrap=True)
        spent = self.run.ledger.spent_before(step).price
        used = {"queries": spent.queries, "tokens": spent.tokens, "cost": spent.cost}
        limits = {name: getattr(self.run.stop.budget, name) for name in used}
        self._plan(step, used, limits)
        self.cells = [
            *(
                self._budget(name, used[name], limits[name])
                for name in used
                if name == "queries" or limits[name] is not None
            ),
            *(self._metric(name) for name in self._named()),
            *self._changes(),
        ]
        self.reported = time.monotonic()
        self.now = None

    def lines(self) -> Any:
        """Return the lines to draw now."""
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        grid = Table.grid(padding=(0, 2), pad_edge=False)
        for style, width in (("bold", None), ("", max(map(len, _DOING.values()))), ("cyan", None)):
            grid.add_column(style=style, min_width=width, no_wrap=True)
        since = time.monotonic() - self.reported
        now = self.now
        if self.rows:
            step = int(self.rows[-1]["step"])
            last = self.run.stop.last
            grid.add_row(
                "step",
                f"{step:,} of {last:,}" if last else f"{step:,}",
                ProgressBar(total=1.0, completed=self.done, width=_CELLS),
            )
        for cells in self.cells:
            grid.add_row(*cells)
        if self.left_s is not None and now is not None:
            grid.add_row("left", f"about {in_words(max(0.0, self.left_s - since))}", "")
        if now is not None:
            grid.add_row("now", now[0], in_words(time.monotonic() - now[1]))
        return grid

    def _plan(self, step: int, used: Mapping[str, float], limits: Mapping[str, float | None]) -> None:
        """Set the share of the run that is done, and the seconds left at the speed of recent rows. If the run
        has several limits, the limit that it reaches first decides."""
        recent = [row for row in self.rows[-_RECENT:] if row["step"] > 0]
        per_row = sum(
            sum(row.get(f"time/{name}_s", 0.0) for name in ("step", "evaluate", "save")) for row in recent
        ) / max(1, len(recent))
        bounds: list[tuple[float, float | None, float]] = [(step, self.run.stop.last, per_row)]
        for name, limit in limits.items():
            bounds.append((used[name], limit, per_row * step / used[name] if used[name] else math.inf))
        hours = self.run.stop.max_hours
        bounds.append((self.run.parts["stop"].state["seconds"], None if hours is None else 3600 * hours, 1.0))
        self.done = max((min(1.0, spent / most) for spent, most, _ in bounds if most), default=0.0)
        ends = [max(0.0, most - spent) * cost for spent, most, cost in bounds if most]
        self.left_s = min(ends) if recent and ends and min(ends) < math.inf else None

    def _budget(self, name: str, used: float, limit: float | None) -> tuple[str, str, str]:
        number = in_money if name == "cost" else "{:,}".format
        return (
            (name, number(used), "")
            if limit is None
            else (name, f"{number(used)} of {number(limit)}", f"{number(limit - used)} left")
        )

    def _changes(self) -> list[tuple[str, str, str]]:
        """Return a list with one line of the table: the number of changes of oracles, and the step before
        which the first change came. Return an empty list if no oracle has changed."""
        rows = [row for row in self.rows if "oracle/changes" in row]
        if not rows:
            return []
        changed = f"changed {rows[-1]['oracle/changes']:.0f}x"
        return [("oracle", changed, f"first before step {rows[0]['step']:.0f}")]

    def _named(self) -> list[str]:
        """Return the metrics that have a sparkline."""
        if self.about.shown != self.about.usually_shown:
            return [name for name in self.about.shown if self._is_reported(name)]
        watched = [name for name in WATCHED if self._is_reported(name)][:_SHOWN]
        return watched + [CUT] * self._is_reported(CUT)

    def _is_reported(self, name: str) -> bool:
        return any(name in row for row in self.rows)

    def _metric(self, name: str) -> tuple[str, str, str]:
        values = [row[name] for row in self.rows if name in row]
        return (
            name,
            f"{values[-1]:.4g}",
            sparkline(values, _ASCII if self.console.options.ascii_only else _BLOCKS),
        )


def sparkline(values: Sequence[float], blocks: str = _BLOCKS) -> str:
    """Draw values as a line of at most 24 blocks, scaled between the lowest and the highest. If there are
    more than 24 values, each block is the mean of neighbouring values. Values that are not finite are left
    out."""
    known = [value for value in values if math.isfinite(value)]
    count = min(_CELLS, len(known))
    ends = [round(place * len(known) / count) for place in range(count + 1)] if count else [0]
    means = [sum(known[begin:end]) / (end - begin) for begin, end in pairwise(ends)]
    low = min(means, default=0.0)
    high = max(means, default=0.0)
    return "".join(
        blocks[round((mean - low) / (high - low) * (len(blocks) - 1)) if high > low else 0] for mean in means
    )


def in_words(seconds: float) -> str:
    """Return a duration as a text for people, such as 42 s, 3 min, 2 h 05 min or 4 d 2 h."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 90:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours < 24 else f"{hours // 24} d {hours % 24} h"
