"""`oat ledger`: say what a run asked, or write its answers as a data set."""

import argparse
import sys
from pathlib import Path

from oat.errors import plural, printable


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN")
    parser.add_argument(
        "--check",
        action="store_true",
        help="check that the ledger does not contradict itself and has its files; exit code 1 if not",
    )
    parser.add_argument("--export", metavar="FILE", help="write the answers to FILE, .jsonl or .parquet")
    parser.add_argument(
        "--layout",
        default="preference",
        metavar="preference|scored",
        help="layout of the exported rows, as TRL reads them",
    )


def call(arguments: argparse.Namespace, _: list[str]) -> int:
    from oat.reports.accounts import accounts_table, export_answers, left_by_kills, problems

    run_dir = Path(arguments.run)
    if arguments.check:
        found = problems(run_dir)
        for problem in found:
            print(printable(f"oat ledger: {run_dir}: {problem}"), file=sys.stderr)
        if found:
            return 1
        print("the ledger is sound")
        if left := left_by_kills(run_dir):
            print(printable(left))
    if arguments.export is None:
        print(printable(accounts_table(run_dir)))
    else:
        rows, labelled = export_answers(run_dir, Path(arguments.export), arguments.layout)
        without = f", without {plural(labelled, 'pair')} that the ensemble labelled" if labelled else ""
        print(f"oat ledger: {rows} rows are in {arguments.export}{without}")
    return 0
