"""`oat plot`: plot a metric of runs."""

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", metavar="RUN", nargs="+")
    metric = (
        "of docs/metrics.md, also several times; by default eval/sampled, or reward/mean, or loss/total; "
        "against a KL proxy and gold"
    )
    parser.add_argument("--metric", action="append", default=[], metavar="NAME", help=metric)
    parser.add_argument(
        "--against",
        default="steps",
        metavar="steps|queries|tokens|time|kl|sqrt_kl",
        help="the axis; by default steps",
    )
    parser.add_argument(
        "--out",
        default="plot.png",
        metavar="FILE.png",
        help="the numbers go beside it, as FILE.csv; FILE.csv writes them alone",
    )


def call(arguments: argparse.Namespace, _: list[str]) -> int:
    from oat.reports.plot import plot_runs

    files = plot_runs(
        [Path(run) for run in arguments.runs], Path(arguments.out), arguments.metric, arguments.against
    )
    print(f"oat plot: {' and '.join(map(str, files))} {'is' if len(files) == 1 else 'are'} written")
    return 0
