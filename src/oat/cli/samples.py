"""`oat samples`: show prompts, responses and what the oracle said of them."""

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN")
    parser.add_argument(
        "--step", type=int, metavar="N", help="only what this step learned from, counted as in metrics.jsonl"
    )
    parser.add_argument(
        "--eval",
        dest="evaluations",
        action="store_true",
        help="the responses of evaluations, rather than those of training",
    )


def call(arguments: argparse.Namespace, _: list[str]) -> int:
    from oat.reports.samples import sample_pages
    from oat.reports.terminal import show_pages

    show_pages(sample_pages(Path(arguments.run), arguments.step, evaluations=arguments.evaluations))
    return 0
