"""`oat actors`: say or change the number of actors of a run while it works."""

import argparse
from pathlib import Path

from oat.errors import plural
from oat.files import absolute
from oat.opening.directory import refuse_idle
from oat.runtime.wanted import Wanted, want


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN")
    how = "how many processes shall sample; without it, the command says how many shall do so now"
    parser.add_argument("number", metavar="N", type=int, nargs="?", help=how)


def call(arguments: argparse.Namespace, _: list[str]) -> int:
    print(want_actors(Path(arguments.run), arguments.number))
    return 0


def want_actors(run_dir: Path, number: int | None) -> str:
    """Ask a run for another number of actors, and return a sentence that says what happens.

    Args:
        number: None: ask for nothing, and say how many there shall be.

    Raises:
        ConfigError: there is no run, no process works in it, the number of its actors cannot change, or the
            number is below 1.
    """
    from oat.assemble.apart import first_actors

    directory = absolute(run_dir)
    first = first_actors(directory)
    refuse_idle(directory)
    later = f"when the run is continued, it begins with compute.actors ({first})"
    if number is None:
        return (
            f"the run shall sample with {plural(Wanted(directory, first, is_new=False)(), 'actor')}; {later}"
        )
    want(directory, number)
    return f"the run shall sample with {plural(number, 'actor')}, as soon as it can; {later}"
