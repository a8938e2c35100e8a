"""`oat check`: say what a configuration would run."""

import argparse

from oat.commands.interruptible import say_loading
from oat.commands.train import add_run_arguments, print_config
from oat.errors import printable


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "target", metavar="CONFIG", help="a YAML file; flags --section.field value override its settings"
    )
    parser.add_argument("--memory", action="store_true", help="also estimate how much memory it needs")
    parser.add_argument(
        "--show-tokens",
        action="store_true",
        help="also print an example of what the run learns from, token by token (this may load weights)",
    )
    add_run_arguments(parser)


def call(arguments: argparse.Namespace, flags: list[str]) -> int:
    from oat.resolve.targets import loaded_for, resolve_present

    if arguments.print_config:
        return print_config(arguments, flags)
    resolved = resolve_present(arguments.target, flags)  # refuses what needs no torch to be refused
    say_loading(loaded_for(resolved.config, trains=False))
    from oat.commands.check import check_run

    lines = check_run(
        resolved,
        arguments.source,
        accept_changed=arguments.accept_changed,
        with_tokens=arguments.show_tokens,
        with_memory=arguments.memory,
    )
    print(printable("\n".join([f"oat check: {arguments.target} is sound", *lines])))
    return 0
