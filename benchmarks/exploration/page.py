"""The table of the comparison, from its records."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from exploration.arms import ARMS, BASELINE, LAST, LEARNING_RATES, SIZES, TUNING_SEEDS, Size
from exploration.records import Evaluation, Key, read

Runs = Mapping[Key, Sequence[Evaluation]]


def end_of(run: Sequence[Evaluation]) -> float:
    """Return the mean reward of the last evaluations of a run."""
    return float(np.mean([each.reward for each in run[-LAST:]]))


def tuned_rate(runs: Runs, arm: str) -> float | None:
    """Return the learning rate with the best end on the tuning seeds; None if runs are missing."""
    found: dict[float, list[float]] = {}
    for rate in LEARNING_RATES:
        for seed in TUNING_SEEDS:
            run = runs.get((arm, f"{rate:g}", seed, "tuning"))
            if run is None:
                return None
            found.setdefault(rate, []).append(end_of(run))
    return max(found, key=lambda rate: float(np.mean(found[rate])))


def pairs_to(run: Sequence[Evaluation], level: float) -> float:
    """Return the number of pairs after which the mean reward of two evaluations in a row is at least a level,
    between evaluations on a straight line; infinity if this never happens."""
    pairs = np.array([each.pairs for each in run], dtype=float)
    rewards = np.array([each.reward for each in run])
    smooth, at = (rewards[1:] + rewards[:-1]) / 2, (pairs[1:] + pairs[:-1]) / 2
    reached = np.flatnonzero(smooth >= level)
    if not len(reached):
        return float("inf")
    first = reached[0]
    if first == 0:
        return float(at[0])
    share = (level - smooth[first - 1]) / (smooth[first] - smooth[first - 1])
    return float(at[first - 1] + share * (at[first] - at[first - 1]))


def finals(runs: Runs, arm: str, size: Size) -> list[Sequence[Evaluation]]:
    """Return the final runs of an arm with its tuned learning rate, in the order of the seeds; those that
    exist."""
    rate = tuned_rate(runs, arm)
    keys = [(arm, f"{rate:g}", seed, "final") for seed in size.seeds] if rate is not None else []
    return [runs[key] for key in keys if key in runs]


def table(file: Path, size: Size) -> str:
    """Return the results in Markdown. The ratio is that of a seed's pairs to the level, over those of passive
    with the same seed; it shows the median and the range."""
    runs = read(file)
    base = finals(runs, BASELINE, size)
    lines = [
        "| arm | what it adds to passive | learning rate | reward at the end | win rate | pairs to passive's "
        "end, ratio | best of 20 |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    if len(base) < len(size.seeds):
        return "\n".join(lines) + "\n"
    level = float(np.mean([end_of(run) for run in base]))
    for arm in size.arms:
        own = finals(runs, arm, size)
        if len(own) < len(size.seeds):
            continue
        ends = [end_of(run) for run in own]
        wins = [float(np.mean([each.win_rate for each in run[-LAST:]])) for run in own]
        ratios = [
            min(pairs_to(run, level), run[-1].pairs) / min(pairs_to(one, level), one[-1].pairs)
            for run, one in zip(own, base, strict=True)
        ]
        never = sum(pairs_to(run, level) == float("inf") for run in own)
        best = [each.best for run in own for each in run[-LAST:] if each.best is not None]
        cells = [
            arm,
            ARMS[arm].part,
            f"{tuned_rate(runs, arm):g}",
            _spread(ends),
            _spread(wins),
            _spread(ratios) + (f", {never} never" if never else ""),
            f"{np.mean(best):.3f}" if best else "",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _spread(values: Sequence[float]) -> str:
    return f"{np.median(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def plot(file: Path, size: Size, picture: Path) -> None:
    """Draw reward and win rate against pairs: the mean over seeds of each arm, with a band from the lowest to
    the highest."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    runs = read(file)
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    for axis, name in zip(figure.subplots(1, 2), ("reward", "win_rate"), strict=True):
        for number, arm in enumerate(size.arms):
            own = finals(runs, arm, size)
            if not own:
                continue
            x = np.linspace(0, min(run[-1].pairs for run in own), 60)
            values = [
                np.interp(x, [each.pairs for each in run], [getattr(each, name) for each in run])
                for run in own
            ]
            style = ("-", "--")[number // 10]
            axis.plot(x, np.mean(values, axis=0), style, color=f"C{number % 10}", label=arm, linewidth=1.3)
            axis.fill_between(
                x, np.min(values, axis=0), np.max(values, axis=0), color=f"C{number % 10}", alpha=0.08
            )
        axis.set(xlabel="compared pairs", ylabel=name.replace("_", " "))
    figure.axes[0].legend(fontsize=7)
    figure.savefig(picture, dpi=130)


__all__ = ["SIZES", "end_of", "finals", "pairs_to", "plot", "table", "tuned_rate"]
