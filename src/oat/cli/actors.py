"""`oat actors`: say or change the number of actors of a run while it works."""

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN")
    how = "how many processes shall sample; without it, the command says how many shall do so now"
    parser.add_argument("number", metavar="N", type=int, nargs="?", help=how)


def call(arguments: argparse.Namespace, _: list[str]) -> int:
    from oat.commands.actors import want_actors

    print(want_actors(Path(arguments.run), arguments.number))
    return 0
