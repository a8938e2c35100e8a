"""`oat bench`: measure what this machine can do, or compare rules of exploration in the laboratory."""

import argparse
import json
from pathlib import Path

from oat.cli.interruptible import say_loading


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", metavar="PATH", help="also compute the limits of this model, a directory or a hub id"
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print bytes, operations and tokens per second as one JSON object",
    )
    kinds = parser.add_subparsers(dest="kind", metavar="[explore]")
    explore = kinds.add_parser(
        "explore",
        help="compare rules of exploration in small worlds, without a language model",
    )
    _add_of_explore(explore)


def _add_of_explore(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--rules",
        nargs="+",
        metavar="RULE",
        help="names of rules, or your own as path/to/file.py:function; by default all of oat's rules",
    )
    parser.add_argument("--worlds", nargs="+", metavar="WORLD", help="by default all (docs/exploration.md)")
    parser.add_argument(
        "--agents", nargs="+", metavar="AGENT", help="`ideal`, `ensemble`, or both, which is the default"
    )
    parser.add_argument("--seeds", type=int, default=20, metavar="N", help="default: 20")
    parser.add_argument(
        "--policy",
        nargs="+",
        type=float,
        metavar="SHARE",
        help="let a policy learn too; the agent itself labels a pair of these shares of the prompts",
    )
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes; default: 1")
    parser.add_argument("--out", default="runs/laboratory", metavar="DIR", help="default: runs/laboratory")


def call(arguments: argparse.Namespace, _: list[str]) -> int:
    say_loading(arguments.model or "")
    if arguments.kind == "explore":
        from oat.commands.bench_explore import bench_explore

        print(
            bench_explore(
                Path(arguments.out),
                rules=arguments.rules,
                worlds=arguments.worlds,
                agents=arguments.agents,
                seeds=arguments.seeds,
                shares=arguments.policy or (),
                jobs=arguments.jobs,
            )
        )
        return 0
    from oat.commands.bench import bench, table

    found = bench(arguments.model)
    print(json.dumps(found) if arguments.json else table(found))
    return 0
