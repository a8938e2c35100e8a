"""`oat plot`: metrics of several runs as a picture and as a table.

If configurations differ only in the seed, or in other settings listed in `ASIDE`, their runs are drawn as one
line. The line is the mean of their curves, with a band from the lowest to the highest value. (Two or three
seeds are too few for a confidence interval.) A line covers only the part of the x axis that all its runs
cover.

A curve is straight between two points, so runs whose points have different x can be averaged. For example,
evaluations that are due by queries or hours happen at different steps in each run.

Against `kl`, the points of a run are ordered by their distance from the reference, not by their steps.
`sqrt_kl` is the square root of that distance, as in Gao et al. 2022 (arXiv:2210.10760).
"""

import csv
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np

from oat.errors import ConfigError, DataError, did_you_mean
from oat.files import appearing, refuse_known, saying_what_is_free
from oat.metrics.counterparts import ours
from oat.reports.plot_labels import differences, directory_labels
from oat.reports.plot_picture import AXES, SOFTWARE, Against, Line, draw, matplotlib
from oat.rundir.reading import load_run
from oat.rundir.rows import read_metrics

DEFAULTS = ("eval/sampled", "reward/mean", "loss/total")
"""If no metric is chosen, the first of these that every run has is plotted."""
CHANGES = "oracle/changes"
PAIRS = "oracle/pairs"
KL = "eval/kl"
"""The metric of the policy's distance from the reference."""
GOLD = ("eval/sampled", "eval/gold_sampled")
"""If no metric is chosen, these are plotted against `KL`: the value of the run's oracle, which is a proxy,
and the value of the gold oracle."""

ASIDE = (
    "run_dir",
    "seed",
    "checkpoint",
    "tracking",
    "compute",
    "engine.threads",
    "learner.micro_batch_tokens",
    "render.date",
)
"""The settings, or complete sections, in which the runs of one line may differ."""

_TABLE_HEAD = ("line", "runs")
"""The first columns of a table of ours."""
_HEAD_BYTES = 1024


def plot_runs(
    runs: Sequence[Path], out: Path, metrics: Sequence[str] = (), against: Against = "steps"
) -> tuple[list[str], list[Path]]:
    """Plot metrics of runs. Return the metrics and the files that were written: a PNG and a CSV with its
    numbers. If `out` ends in .csv, only the CSV is written.

    Args:
        metrics: names of metrics. If empty, the default against `kl` or `sqrt_kl` is `GOLD`; against any
            other quantity it is the first of `DEFAULTS` that every run has.
        against: the quantity of the x axis.

    Raises:
        ConfigError: a directory holds no run, a run lacks a metric, `against` is unknown, `out` is neither
            PNG nor CSV, matplotlib is not installed, or one of the files is there already and `oat plot` did
            not write it.
        DataError: a file of a run cannot be read, or the runs that are drawn as one line (`ASIDE`) have no
            part of the x axis in common.
    """
    if out.suffix not in (".png", ".csv"):
        raise ConfigError(
            f"{out}: give a name that ends in .png, for a plot and its numbers, or in .csv, for the "
            "numbers alone"
        )
    if against not in AXES:
        raise ConfigError(f"--against is {against!r}; {did_you_mean(against, get_args(Against))}")
    if out.suffix == ".png":
        matplotlib()
    table = out.with_suffix(".csv")
    files = [out] if out == table else [out, table]
    for file in files:
        refuse_known(file, "--out", _is_ours)
    lines = lines_of(list({run.resolve(): run for run in runs}.values()), metrics, against)
    for file in reversed(files):
        with appearing(file, "--out", _is_ours) as new, saying_what_is_free(file):
            (_write_table if file == table else draw)(lines, new, against)
    return list(dict.fromkeys(line.metric for line in lines)), files


def _is_ours(file: Path) -> bool:
    """Return True if `plot_runs` has written a file. An earlier plot may be replaced."""
    if file.suffix == ".csv":
        return _is_table(file)
    with file.open("rb") as stream:
        return SOFTWARE.encode() in stream.read(_HEAD_BYTES)


def _is_table(file: Path) -> bool:
    """Return True if a file is a table as `_write_table` writes it."""
    try:
        with file.open(encoding="utf-8", newline="") as text:
            head, *rows = csv.reader(text, strict=True)
            numbers = [float(cell) for row in rows for cell in row[len(head) - 3 :]]
    except (ValueError, csv.Error):
        return False
    columns = [[*_TABLE_HEAD, axis.column] for axis in AXES.values()]
    last = len(head) - (head[-1:] == [CHANGES])
    return (
        head[:3] in columns
        and head[last - 2 : last] == ["low", "high"]
        and (last == 6 or (last == 7 and head[3:5] == ["metric", "mean"]))
        and all(len(row) == len(head) and row[1].isdigit() for row in rows)
        and all(map(math.isfinite, numbers))
    )


def lines_of(runs: Sequence[Path], metrics: Sequence[str], against: Against) -> list[Line]:
    """Return the lines of a plot: one for each configuration and metric."""
    rows = {run: read_metrics(run / "metrics.jsonl") for run in runs}
    trees = {run: _flat(_within(load_run(run).settings)) for run in runs}
    wanted: Sequence[str | None] = metrics or (GOLD if against in ("kl", "sqrt_kl") else [None])
    chosen = [_chosen(metric, rows) for metric in dict.fromkeys(wanted)]
    together: dict[str, list[Path]] = {}
    for run, tree in trees.items():
        key = repr(sorted((field, repr(value)) for field, value in _compared(tree).items()))
        together.setdefault(key, []).append(run)
    labels = dict(zip(runs, directory_labels(runs), strict=True))
    different = differences([_compared(trees[members[0]]) for members in together.values()])
    lines = []
    for members, settings in zip(together.values(), different, strict=True):
        name = ", ".join(labels[run] for run in members)
        changes = sorted({place for run in members for place in _changes(run, rows[run], against)})
        for metric in chosen:
            curves = [_curve(run, rows[run], metric, against) for run in members]
            lines.append(_line(name, settings, metric, curves, changes))
    return lines


def _chosen(metric: str | None, rows: Mapping[Path, Sequence[Mapping[str, Any]]]) -> str:
    """Return the metric if every run has it. If the metric is None, return the first of `DEFAULTS` that every
    run has.

    Raises:
        ConfigError: a run lacks the metric. The message suggests one that all runs have.
    """
    has = {run: {name for row in some for name in row if name != "step"} for run, some in rows.items()}
    shared = set.intersection(*has.values())
    if empty := [run for run, names in has.items() if not names]:
        raise ConfigError(f"{empty[0]}: has no metrics yet; let `oat train` make its first row")
    if metric is None:
        metric = next((name for name in DEFAULTS if name in shared), None)
        if metric is None:
            raise ConfigError(
                f"these runs share none of {', '.join(DEFAULTS)}; give a --metric: "
                f"{', '.join(sorted(shared)) or 'they share none'}"
            )
    if metric in shared:
        return metric
    if ours(metric) in shared:
        raise ConfigError(
            f"--metric {metric}: it is called {ours(metric)} here; docs/metrics.md has all names"
        )
    lacking = next(run for run, names in has.items() if metric not in names)
    raise ConfigError(f"--metric {metric}: {lacking} has no such metric; {did_you_mean(metric, shared)}")


def _curve(
    run: Path, rows: Sequence[Mapping[str, Any]], metric: str, against: Against
) -> tuple[np.ndarray, np.ndarray]:
    """Return the values of x, ascending and distinct, and the metric at each x. Points that are not finite
    are left out. If several rows have the same x, the last row counts."""
    x = np.array(_places(run, rows, against))
    y = np.array([math.nan if (value := row.get(metric)) is None else value for row in rows], dtype=float)
    is_known = np.isfinite(x) & np.isfinite(y)
    order = np.argsort(x[is_known], kind="stable")
    x = x[is_known][order]
    y = y[is_known][order]
    if not len(x):
        raise ConfigError(f"{run}: no value of {metric} is finite; give another --metric")
    last = np.append(x[1:] > x[:-1], True)
    return x[last], y[last]


def _changes(run: Path, rows: Sequence[Mapping[str, Any]], against: Against) -> list[float]:
    """Return the x of each row whose number of oracle changes is larger than that of the row before it."""
    counts = np.array([row.get(CHANGES, 0.0) for row in rows])
    return list(np.array(_places(run, rows, against))[1:][counts[1:] > counts[:-1]]) if counts.any() else []


def _places(run: Path, rows: Sequence[Mapping[str, Any]], against: Against) -> list[float]:
    """Return the value of x for each row of metrics."""
    if against == "steps":
        return [float(row["step"]) for row in rows]
    if against == "queries":
        return _running_maximum(row.get("oracle/queries", 0.0) for row in rows)
    if against == "pairs":
        if not any(PAIRS in row for row in rows):
            raise ConfigError(
                f"{run}: its rows have no {PAIRS}, since no step took a paid answer about a pair, so it "
                "cannot be plotted against pairs; give another --against, such as queries"
            )
        return _running_maximum(row.get(PAIRS, 0.0) for row in rows)
    if against == "tokens":
        if not any("response/tokens" in row for row in rows):
            raise ConfigError(
                f"{run}: its rows have no response/tokens, so it cannot be plotted against tokens; give "
                "another --against"
            )
        return list(np.cumsum([row.get("response/tokens", 0.0) for row in rows]))
    if against in ("kl", "sqrt_kl"):
        if not any(KL in row for row in rows):
            raise ConfigError(
                f"{run}: its rows have no {KL}, so it cannot be plotted against it; train with "
                "evaluation.kl: true"
            )
        places = [row.get(KL, math.nan) for row in rows]
        if against == "kl":
            return places
        # an estimate may be below 0; its root keeps the sign
        return [math.copysign(math.sqrt(abs(place)), place) for place in places]
    return list(
        np.cumsum(
            [sum(row.get(f"time/{name}_s", 0.0) for name in ("step", "evaluate", "save")) for row in rows]
        )
    )


def _running_maximum(values: Any) -> list[float]:
    """Return, for each row, the largest value of this row and all rows before it."""
    return list(np.maximum.accumulate(np.array([*values], dtype=float)))


def _line(
    name: str,
    settings: Sequence[str],
    metric: str,
    curves: Sequence[tuple[np.ndarray, np.ndarray]],
    changes: Sequence[float],
) -> Line:
    begin = max(x[0] for x, _ in curves)
    end = min(x[-1] for x, _ in curves)
    if begin > end:
        raise DataError(
            f"the runs of {name} share no stretch of the axis; plot them by themselves, or against steps"
        )
    x = np.unique(np.concatenate([x[(x >= begin) & (x <= end)] for x, _ in curves]))
    values = np.stack([np.interp(x, *curve) for curve in curves])
    band = (values.mean(0), values.min(0), values.max(0))
    return Line(name, tuple(settings), metric, len(curves), x, *band, tuple(changes))


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the settings of a configuration by dotted name."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return flat


def _within(tree: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration, with paths in the run directory made relative to this directory.

    If a user gives records to `oat.Trainer`, it stores them in the run directory. So their full paths differ
    from run to run.
    """
    own = f"{tree['run_dir']}/"

    def cut(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: cut(item) for name, item in value.items()}
        return value.removeprefix(own) if isinstance(value, str) else value

    return {name: cut(value) for name, value in tree.items()}


def _compared(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings in which the runs of one line must agree."""
    aside = tuple(f"{name}." for name in ASIDE)
    return {field: value for field, value in tree.items() if not f"{field}.".startswith(aside)}


def _write_table(lines: Sequence[Line], file: Path, against: Against) -> None:
    """Write the lines as CSV.

    With a single metric, the column of means has the metric's name. With several metrics, the column `metric`
    names the metric of each row. If an oracle changed, the last column counts the changes up to each point.
    """
    metrics = list(dict.fromkeys(line.metric for line in lines))
    head = metrics if len(metrics) == 1 else ["metric", "mean"]
    has_changes = any(line.changes for line in lines)
    with file.open("w", encoding="utf-8", newline="") as text:
        writer = csv.writer(text)
        writer.writerow(
            [
                *_TABLE_HEAD,
                AXES[against].column,
                *head,
                "low",
                "high",
                *([CHANGES] if has_changes else []),
            ]
        )
        for line in lines:
            for point in zip(line.x, line.mean, line.low, line.high, strict=True):
                x, *values = [int(value) if value.is_integer() else float(value) for value in point]
                count = [sum(place <= x for place in line.changes)] if has_changes else []
                writer.writerow(
                    [line.name, line.runs, x, *([line.metric] if len(metrics) > 1 else []), *values, *count]
                )
