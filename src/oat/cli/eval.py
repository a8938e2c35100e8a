"""`oat eval`: evaluate a run or the model that a configuration starts from, or compare two models."""

import argparse
import json
import sys
from functools import partial
from pathlib import Path

from oat.cli.interruptible import hearing_signals
from oat.plugins.leaving import unfinished


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "target",
        metavar="RUN|CONFIG",
        help=(
            "a run directory or a YAML file; with --against also a model; flags --section.field value "
            "override its settings"
        ),
    )
    parser.add_argument(
        "--against",
        metavar="B",
        help="compute the win rate against another run, configuration or model on the same prompts instead",
    )


def call(arguments: argparse.Namespace, flags: list[str]) -> int:
    read = partial(_read, arguments, flags)
    with hearing_signals(read) as told, told.at_once(), unfinished():
        if arguments.against is not None:
            return _compare(arguments, flags)
        return _evaluate(arguments, flags)


def _read(arguments: argparse.Namespace, flags: list[str]) -> str:
    """Refuse a configuration that cannot be read. Return the name of what is loaded."""
    from oat.resolve.targets import load_evaluated

    if arguments.against is None:
        load_evaluated(Path(arguments.target), flags)
    return str(arguments.target)


def _evaluate(arguments: argparse.Namespace, flags: list[str]) -> int:
    from oat.resolve.targets import resolve_evaluated

    target = Path(arguments.target)
    resolved = resolve_evaluated(target, flags)
    from oat.commands.eval import evaluate_once
    from oat.reports.terminal import numbers_table

    values = evaluate_once(resolved, target if target.is_dir() else None)
    if sys.stdout.isatty():
        numbers = {name: value for name, value in values.items() if name != "step"}
        title = f"{target} after {values['step']} steps, asked about {resolved.about.evaluated}"
        print(numbers_table(title, numbers))
    else:
        print(json.dumps(values))
    return 1 if "eval/failed" in values else 0


def _compare(arguments: argparse.Namespace, flags: list[str]) -> int:
    from oat.commands.compare import compare_models
    from oat.reports.terminal import numbers_table

    found = compare_models(arguments.target, arguments.against, flags)
    if sys.stdout.isatty():
        steps = [
            f" after {found[f'{side}_step']} steps" if found[f"{side}_step"] else "" for side in ("a", "b")
        ]
        title = (
            f"{found['a']}{steps[0]} against {found['b']}{steps[1]}, {found['prompts']} prompts, judged "
            f"by {found['oracle']}"
        )
        about = ("a", "b", "a_step", "b_step", "prompts", "oracle")
        print(numbers_table(title, {name: value for name, value in found.items() if name not in about}))
    else:
        print(json.dumps(found))
    return 0
