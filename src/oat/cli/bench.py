"""`oat bench`: measure what this machine can do."""

import argparse
import json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", metavar="PATH", help="also compute the limits of this model, a directory or a hub id"
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print bytes, operations and tokens per second as one JSON object",
    )


def call(arguments: argparse.Namespace, _: list[str]) -> int:
    from oat.commands.bench import bench, table

    found = bench(arguments.model)
    print(json.dumps(found) if arguments.json else table(found))
    return 0
