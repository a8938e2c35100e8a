"""`oat generate`: write responses to the prompts of a file."""

import argparse

from oat.cli.answering import add_generation_options, add_model, generation_options
from oat.cli.interruptible import hearing_signals
from oat.errors import ConfigError, printable
from oat.files import refuse_known, seen


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    add = parser.add_argument
    add(
        "--prompts",
        required=True,
        metavar="FILE",
        help="the prompts, as prompts.path: a file, a saved dataset or a dataset of the hub",
    )
    add("--prompt-key", metavar="NAME", help="column of the prompt; by default the run's, or prompt")
    add(
        "--out",
        metavar="FILE",
        help="a new file, which appears once it is complete; by default the standard output",
    )
    add("--n", type=int, default=1, metavar="N", help="number of responses to each prompt; by default 1")
    add_generation_options(parser)


def call(arguments: argparse.Namespace, _: list[str]) -> int:
    if arguments.n < 1:
        raise ConfigError(f"--n is {arguments.n}; give at least 1 response a prompt")
    with hearing_signals(lambda: str(arguments.model)) as told, told.at_once():
        from oat.answering.speaker import load_speaker
        from oat.commands.generate import generate, write_lines

        out = None if arguments.out is None else seen(arguments.out)
        if out is not None:
            refuse_known(out, "--out")
        lines = generate(
            load_speaker(arguments.model, generation_options(arguments)),
            arguments.prompts,
            arguments.n,
            prompt_key=arguments.prompt_key,
        )
        if out is None:
            for line in lines:
                print(line, flush=True)
            return 0
        count = write_lines(lines, out)
        print(printable(f"oat generate: {arguments.n} responses to each of {count:,} prompts are in {out}"))
    return 0
