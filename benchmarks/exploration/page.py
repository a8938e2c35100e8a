"""The tables of the comparison, from its records."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from exploration.arms import ARMS, BASELINE, LAST, PARTS, Size
from exploration.records import Evaluation, Key, read

Runs = Mapping[Key, Sequence[Evaluation]]


def end_of(run: Sequence[Evaluation]) -> float:
    """Return the mean reward of the last evaluations of a run."""
    return float(np.mean([each.reward for each in run[-LAST:]]))


def tuned_rate(runs: Runs, arm: str, size: Size) -> float | None:
    """Return the learning rate with the best mean end on the tuning seeds; None if runs are missing."""
    found: dict[float, list[float]] = {}
    for rate in size.rates:
        for seed in size.tuning_seeds:
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
    rate = tuned_rate(runs, arm, size)
    keys = [(arm, f"{rate:g}", seed, "final") for seed in size.seeds] if rate is not None else []
    return [runs[key] for key in keys if key in runs]


def table(file: Path, size: Size) -> str:
    """Return the results in Markdown: a table of the arms, one of the parts of a gain, and one of the
    learning rates. The ratio is that of a seed's pairs to the level, over those of passive with the same
    seed; it shows the median and the range."""
    runs = read(file)
    own = {arm: found for arm in size.arms if len(found := finals(runs, arm, size)) == len(size.seeds)}
    if BASELINE not in own:
        return ""
    level = float(np.mean([end_of(run) for run in own[BASELINE]]))
    reached = {
        arm: np.array([min(pairs_to(run, level), size.pairs) for run in found]) for arm, found in own.items()
    }
    ends = {arm: np.array([end_of(run) for run in found]) for arm, found in own.items()}
    lines = [
        "| arm | what it adds to passive | learning rate | reward at the end | win rate | pairs to passive's "
        "end, ratio | best of 20 |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for arm, found in own.items():
        wins = [float(np.mean([each.win_rate for each in run[-LAST:]])) for run in found]
        never = sum(pairs_to(run, level) == float("inf") for run in found)
        bests = [[each.best for each in run[-LAST:] if each.best is not None] for run in found]
        best = [float(np.mean(values)) for values in bests if values]
        cells = [
            arm,
            ARMS[arm].part,
            f"{tuned_rate(runs, arm, size):g}",
            _spread(ends[arm]),
            _spread(wins),
            _spread(reached[arm] / reached[BASELINE]) + (f", {never} never" if never else ""),
            _spread(best) if best else "",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    lines += [
        "",
        "| part | with it | without it | difference of rewards at the end | pairs to passive's end, ratio |",
        "| --- | --- | --- | --- | --- |",
    ]
    for part, having, lacking in PARTS:
        if having not in own or lacking not in own:
            continue
        gains = ends[having] - ends[lacking]
        faster = reached[having] / reached[lacking]
        lines.append(f"| {part} | {having} | {lacking} | {_spread(gains)} | {_spread(faster)} |")
    return "\n".join([*lines, "", *_rates(runs, own, size, level)]) + "\n"


def _rates(runs: Runs, arms: Iterable[str], size: Size, level: float) -> list[str]:
    """Return a table of the tuning runs: a row for each arm, a column for each learning rate. A cell has the
    mean reward at the end, and the mean number of pairs to the level."""
    lines = [
        f"| arm | {' | '.join(f'{rate:g}' for rate in size.rates)} |",
        "| --- |" + " --- |" * len(size.rates),
    ]
    for arm in arms:
        cells = []
        for rate in size.rates:
            found = [runs[arm, f"{rate:g}", seed, "tuning"] for seed in size.tuning_seeds]
            end = np.mean([end_of(run) for run in found])
            pairs = np.mean([min(pairs_to(run, level), size.pairs) for run in found])
            cells.append(f"{end:.2f}; {pairs:.0f}")
        lines.append(f"| {arm} | {' | '.join(cells)} |")
    return lines


def _spread(values: Sequence[float] | np.ndarray) -> str:
    return f"{np.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def plot(file: Path, size: Size, picture: Path) -> None:
    """Draw reward and win rate against pairs: the mean over seeds of each arm, with a band from the lowest to
    the highest."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    runs = read(file)
    figure = Figure(figsize=(13, 4.5), layout="constrained")
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
    figure.legend(*figure.axes[0].get_legend_handles_labels(), fontsize=8, loc="outside right center")
    figure.savefig(picture, dpi=130)
