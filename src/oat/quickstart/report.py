"""The results of the quickstart: a table and a plot, made from the files of its runs."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from oat.errors import DataError
from oat.rundir.rows import read_metrics

COLOURS = {"dpo": "tab:blue", "grpo": "tab:orange", "dpo-control": "0.35", "grpo-control": "0.65"}


@dataclass(frozen=True)
class Curve:
    """The held-out accuracy of one run at each evaluation. The first evaluation measures the start model.

    Attributes:
        queries: number of oracle queries that training had spent before each evaluation.
        sampled: mean score of sampled responses in each evaluation.
        greedy: mean score of greedy responses in each evaluation.
        seconds: sum of the durations of all steps and evaluations, in seconds.
    """

    queries: tuple[float, ...]
    sampled: tuple[float, ...]
    greedy: tuple[float, ...]
    seconds: float


def read_curve(run_dir: Path) -> Curve:
    """Read the curve of a run from its `metrics.jsonl`.

    Raises:
        DataError: the file is missing, or has no evaluation.
    """
    path = run_dir / "metrics.jsonl"
    if not path.exists():
        raise DataError(f"{path}: there is no such file; let `oat train` make the run first")
    rows = read_metrics(path)
    evaluated = [row for row in rows if "eval/sampled" in row and "eval/greedy" in row]
    if not evaluated:
        raise DataError(
            f"{path}: has no evaluation of sampled and greedy responses; set evaluation.samples and "
            "evaluation.greedy"
        )
    return Curve(
        queries=tuple(row.get("oracle/queries", 0.0) for row in evaluated),
        sampled=tuple(row["eval/sampled"] for row in evaluated),
        greedy=tuple(row["eval/greedy"] for row in evaluated),
        seconds=sum(row.get("time/step_s", 0.0) + row.get("time/evaluate_s", 0.0) for row in rows),
    )


def table(curves: Mapping[str, Curve]) -> str:
    """Return a table with one line per run: number of queries, held-out accuracy at the start and at the end,
    and seconds."""
    lines = [f"{'run':<14}{'queries':>8}   {'sampled':<14} {'greedy':<14} {'seconds':>7}"]
    for name, curve in curves.items():
        accuracies = (f"{values[0]:.3f} -> {values[-1]:.3f}" for values in (curve.sampled, curve.greedy))
        lines.append(f"{name:<14}{curve.queries[-1]:>8.0f}   {'  '.join(accuracies)} {curve.seconds:>8.0f}")
    return "\n".join(lines)


def plot(curves: Mapping[str, Curve], path: Path) -> None:
    """Plot each run's held-out accuracy against its number of oracle queries, and write a PNG. This needs
    matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for name, curve in curves.items():
        for kind, values, line in (("sampled", curve.sampled, "-"), ("greedy", curve.greedy, "--")):
            axes.plot(
                curve.queries,
                values,
                line,
                label=f"{name}, {kind}",
                color=COLOURS.get(name),
                marker="o",
                markersize=3,
            )
    start = next(iter(curves.values())).sampled[0]
    axes.axhline(start, color="black", linewidth=0.8, linestyle=":", label="start, sampled")
    axes.set(
        xlabel="oracle queries",
        ylabel="held-out accuracy",
        ylim=(-0.02, 1.02),
        title="Two-digit sums, after a teacher who forgets the carry",
    )
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right upper", frameon=False, fontsize="small")
    FigureCanvasAgg(figure)
    figure.savefig(path, dpi=150)
