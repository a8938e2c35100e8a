"""`oat quickstart`: train, align and compare a tiny model on this machine."""

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", default="quickstart", metavar="DIR")
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="seed of the data, the start model and the runs"
    )


def call(arguments: argparse.Namespace, _: list[str]) -> int:
    from oat.quickstart import quickstart

    return quickstart(Path(arguments.out), arguments.seed)
