"""`oat features`: say how much an explorer's features tell about the oracle."""

import argparse
from functools import partial

from oat.cli.interruptible import hearing_signals


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "target", metavar="CONFIG", help="a YAML file; flags --section.field value override its settings"
    )
    parser.add_argument("--prompts", type=int, default=64, metavar="N", help="prompts; default: 64")
    parser.add_argument(
        "--samples",
        type=int,
        metavar="N",
        help="responses per prompt, half as many pairs; default: as many as the explorer takes",
    )
    parser.add_argument(
        "--share",
        type=float,
        default=0.75,
        metavar="X",
        help="share of the prompts that the regression learns from; default: 0.75",
    )


def call(arguments: argparse.Namespace, flags: list[str]) -> int:
    from oat.resolve.targets import resolve_file, what_loads

    with hearing_signals(partial(what_loads, arguments.target, flags)) as told, told.at_once():
        resolved = resolve_file(arguments.target, flags)
        from oat.commands.features import judge_features, table

        found, asked = judge_features(resolved, arguments.prompts, arguments.samples, arguments.share)
    print(f"{table(found)}\noat features: {asked}")
    return 0
