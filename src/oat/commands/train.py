"""`oat train`: start a run, or continue the one in its directory."""

import argparse
from functools import partial
from typing import TYPE_CHECKING

from oat.commands.interruptible import hearing_signals
from oat.errors import ConfigError, printable
from oat.files import absolute
from oat.plugins.leaving import unfinished

if TYPE_CHECKING:
    from oat.loop import Run
    from oat.resolve.about import RunSummary


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "target", metavar="CONFIG", help="a YAML file; flags --section.field value override its settings"
    )
    parser.add_argument(
        "--profile",
        type=int,
        metavar="N",
        help="trace N steps, beginning with the second one; the trace is written to RUN/profile",
    )
    add_run_arguments(parser)


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that `train` and `check` have in common."""
    parser.add_argument(
        "--from",
        dest="source",
        metavar="RUN@STEP",
        help="begin a new run from a checkpoint of another run; settings may differ",
    )
    parser.add_argument(
        "--accept-changed",
        action="append",
        default=[],
        metavar="reward",
        help="continue the run although the file of a reward, or a reward model, has changed",
    )
    parser.add_argument(
        "--print-config",
        action="store_true",
        help="print the resolved configuration as YAML, and do nothing else",
    )


def print_config(arguments: argparse.Namespace, flags: list[str]) -> int:
    from oat.resolve.targets import resolve_file

    print(resolve_file(arguments.target, flags).as_yaml(), end="")
    return 0


def call(arguments: argparse.Namespace, flags: list[str]) -> int:
    from oat.resolve.targets import loaded_for, resolve_present

    if arguments.profile is not None and arguments.profile < 1:
        raise ConfigError(f"--profile is {arguments.profile}; give the number of steps to trace, at least 1")
    if arguments.print_config:
        return print_config(arguments, flags)
    read = partial(resolve_present, arguments.target, flags)
    with hearing_signals(read, lambda found: loaded_for(found.config)) as (told, resolved):
        with told.at_once():  # no file is written yet
            from oat.opening.open_run import opened_again
            from oat.resolve.resolve import openings

        work = partial(_worked, about=resolved.about, profile=arguments.profile)
        with unfinished():
            closing = opened_again(openings(resolved), work, arguments.source, arguments.accept_changed, told)
    print(printable("\n".join(f"oat train: {line}" for line in closing)))
    return 0


def _worked(run: "Run", about: "RunSummary", profile: int | None) -> list[str]:
    """Train, and return the lines to be printed last."""
    with run.interruption.at_once():
        from oat.loop import train
        from oat.reports.outcome import Outcome
        from oat.reports.progress import opening, shown
        from oat.reports.trace import train_traced

        outcome = Outcome(run, about)
        print(printable("\n".join(f"oat train: {line}" for line in opening(run, about.run_dir))), flush=True)
    with shown(run, about) as show:

        def report(step: int, metrics: dict[str, float]) -> None:
            show(step, metrics)
            outcome.note_step(step, metrics)

        if profile is None:
            reason, trace = train(run, report), None
        else:
            reason, trace = train_traced(run, report, absolute(about.run_dir) / "profile", profile)
    if profile is not None:
        where = (
            f"the trace is {trace}; open it in Perfetto or chrome://tracing"
            if trace
            else "no trace: the run had no second step"
        )
        print(f"oat train: {where}")
    return list(
        outcome.lines(
            reason, outcome.nothing_learned(), f"; write its model with: oat export {about.run_dir} OUT"
        )
    )
