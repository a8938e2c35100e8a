"""`oat chat`: talk to a run's policy, or to a model."""

import argparse

from oat.cli.answering import add_generation_options, add_model, generation_options
from oat.cli.interruptible import say_loading


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    add_generation_options(parser)


def call(arguments: argparse.Namespace, _: list[str]) -> int:
    say_loading(arguments.model)
    from oat.answering.speaker import NO_TEMPLATE, load_speaker
    from oat.commands.chat import chat

    chat(
        load_speaker(arguments.model, generation_options(arguments)),
        continues=arguments.template == NO_TEMPLATE,
    )
    return 0
