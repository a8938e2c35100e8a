"""The picture of the comparison: accuracy against queries, and against seconds."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from comparison.algorithms import RECORDED, family
from comparison.page import REACH
from comparison.plan import Size
from comparison.records import Evaluation, Record

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
"""Colours of Okabe and Ito, which people with colour blindness can tell apart. A row of the picture has at
most as many algorithms."""
AXES: dict[str, Callable[[Evaluation], float]] = {
    "oracle queries": lambda each: each.queries,
    "seconds of the processor in training, one thread": lambda each: each.cpu_seconds,
}
STYLES = ("--", "-.", ":")


def draw(size: Size, runs: Mapping[str, Sequence[Record]], path: Path) -> None:
    """Write the picture as a PNG. A line is the mean over the seeds of an algorithm, and ends where the
    first of its runs ends; the band reaches from the least to the greatest. Horizontal lines are the ends of
    runs that ask nobody.

    Args:
        runs: the runs that are compared, by contestant.
    """
    rows = list(_rows([name for name in runs if name not in RECORDED]))
    figure = Figure(figsize=(11, 1 + 3.2 * len(rows)), layout="constrained")
    grid = figure.subplots(len(rows), len(AXES), squeeze=False, sharex="col", sharey=True)
    for axes_of_row, names in zip(grid, rows, strict=True):
        for axes, (label, x_of) in zip(axes_of_row, AXES.items(), strict=True):
            for colour, name in zip(COLOURS, names, strict=False):
                x, low, mean, high = band(runs[name], x_of)
                axes.plot(x, mean, color=colour, label=name, marker="o", markersize=2.5, linewidth=1.3)
                axes.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)
            _horizontal(axes, runs)
            axes.set(xlabel=label, ylabel="accuracy, sampled", ylim=(0, 1.02))
            axes.grid(alpha=0.3)
        axes_of_row[-1].legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, fontsize="small")
    figure.suptitle(
        f"Two-digit sums with a carry: mean over seeds {', '.join(map(str, size.seeds))}, band from the "
        "least to the greatest",
        fontsize="medium",
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    FigureCanvasAgg(figure)
    figure.savefig(path, dpi=110)


def band(
    runs: Sequence[Record], x_of: Callable[[Evaluation], float]
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return x, and the least, the mean and the greatest accuracy of sampled responses at each x. Between its
    evaluations the curve of a run is straight. x ends where the first of the runs ends."""
    curves = [
        (
            np.array([x_of(each) for each in run.evaluations]),
            np.array([each.sampled for each in run.evaluations]),
        )
        for run in runs
    ]
    end = min(x[-1] for x, _ in curves)
    x = np.unique(np.concatenate([np.append(x[x <= end], end) for x, _ in curves]))
    values = np.stack([np.interp(x, *curve) for curve in curves])
    return x, values.min(0), values.mean(0), values.max(0)


def _rows(names: Sequence[str]) -> list[list[str]]:
    """Return the algorithms of each row of the picture. No row has two kinds of answers."""
    kinds = {kind: [name for name in names if family(name) == kind] for kind in ("pairs", "scores")}
    return [
        own[first : first + len(COLOURS)]
        for own in kinds.values()
        for first in range(0, len(own), len(COLOURS))
    ]


def _horizontal(axes: Any, runs: Mapping[str, Sequence[Record]]) -> None:
    for style, name in zip(STYLES, (name for name in runs if name in RECORDED), strict=False):
        height = float(np.mean([run.last.sampled for run in runs[name]]))
        axes.axhline(height, color="0.3", linestyle=style, linewidth=1, label=f"{name} (asks nobody)")
    axes.axhline(REACH, color="0.8", linewidth=0.8, zorder=0)
