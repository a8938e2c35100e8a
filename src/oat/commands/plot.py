"""`oat plot`: plot metrics of runs."""

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", metavar="RUN", nargs="+")
    metric = (
        "a metric of docs/metrics.md; may be given several times; by default the first of eval/sampled, "
        "reward/mean and loss/total that every run has; against a KL: eval/sampled and eval/gold_sampled"
    )
    parser.add_argument("--metric", action="append", default=[], metavar="NAME", help=metric)
    parser.add_argument(
        "--against",
        default="steps",
        metavar="steps|queries|pairs|tokens|time|kl|sqrt_kl",
        help="the horizontal axis; by default steps",
    )
    parser.add_argument(
        "--out",
        default="plot.png",
        metavar="FILE.png",
        help="the plot; its numbers are written to FILE.csv. --out FILE.csv writes only the numbers",
    )


def call(arguments: argparse.Namespace, _: list[str]) -> int:
    from oat.reports.plot import plot_runs

    metrics, files = plot_runs(
        [Path(run) for run in arguments.runs], Path(arguments.out), arguments.metric, arguments.against
    )
    print(f"oat plot: {', '.join(metrics)} written to {' and '.join(map(str, files))}")
    return 0
