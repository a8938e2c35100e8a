"""`oat samples`: show prompts, responses and the oracle's answers about them."""

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN")
    parser.add_argument(
        "--step", type=int, metavar="N", help="show only this step; steps are counted as in metrics.jsonl"
    )
    parser.add_argument(
        "--eval",
        dest="evaluations",
        action="store_true",
        help="show the responses of evaluations instead of those of training",
    )


def call(arguments: argparse.Namespace, _: list[str]) -> int:
    from oat.reports.samples import sample_pages
    from oat.reports.terminal import show_pages

    show_pages(sample_pages(Path(arguments.run), arguments.step, evaluations=arguments.evaluations))
    return 0
