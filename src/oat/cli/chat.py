"""`oat chat`: talk to a run's policy, or to a model."""

import argparse

from oat.cli.answering import add_manner, add_model, manner_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    add_manner(parser)


def call(arguments: argparse.Namespace, _: list[str]) -> int:
    from oat.build.speaker import NO_TEMPLATE, load_speaker
    from oat.commands.chat import chat

    chat(load_speaker(arguments.model, manner_of(arguments)), continues=arguments.template == NO_TEMPLATE)
    return 0
