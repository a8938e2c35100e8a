"""`oat digest`: print hashes of a run."""

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN")


def call(arguments: argparse.Namespace, _: list[str]) -> int:
    from oat.commands.export import digest_run

    for name, value in digest_run(Path(arguments.run)).items():
        print(f"{name:<10} {value}")
    return 0
