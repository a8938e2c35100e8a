"""`oat samples`: show prompts, responses and the oracle's answers about them."""

import argparse
import csv
import sys
from pathlib import Path

from oat.errors import ConfigError


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
    parser.add_argument(
        "--csv",
        metavar="FILE",
        help="write a table of the responses of training and of evaluations to FILE instead; -: to stdout",
    )


def call(arguments: argparse.Namespace, _: list[str]) -> int:
    from oat.files import appearing, refuse_known
    from oat.reports.sample_table import sample_table
    from oat.reports.samples import sample_pages
    from oat.reports.terminal import show_pages

    if arguments.csv is not None:
        table = sample_table(Path(arguments.run), arguments.step, evaluations=arguments.evaluations)
        if arguments.csv == "-":
            csv.writer(sys.stdout).writerows(table)
            return 0
        out = Path(arguments.csv)
        refuse_known(out, "--csv")
        names, *rows = table
        try:
            with appearing(out, "--csv") as new, new.open("x", encoding="utf-8", newline="") as file:
                csv.writer(file).writerows([names, *rows])
        except OSError as error:
            raise ConfigError(
                f"--csv {arguments.csv}: the table cannot be written ({error.strerror}); give another file"
            ) from error
        print(f"oat samples: {len(rows)} responses are in {arguments.csv}")
        return 0
    show_pages(sample_pages(Path(arguments.run), arguments.step, evaluations=arguments.evaluations))
    return 0
