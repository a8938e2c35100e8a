"""The arguments that `generate` and `chat` share. They say which model answers, and how."""

import argparse
from typing import TYPE_CHECKING, Literal

from oat.errors import ConfigError

if TYPE_CHECKING:
    from oat.answering.speaker import GenerationOptions


def add_model(parser: argparse.ArgumentParser) -> None:
    """Add the argument that names the model that answers."""
    parser.add_argument(
        "model", metavar="RUN|MODEL", help="a run, whose policy answers; or a model, an adapter or a hub id"
    )


def add_generation_options(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that say how the model answers."""
    add = parser.add_argument
    add("--step", metavar="N|best", help="a run's checkpoint, as for oat export; by default the newest")
    add(
        "--template",
        metavar="T",
        help=(
            "chat template, as render.template; none: the model continues prompts as plain text; by default "
            "the run's or the model's"
        ),
    )
    add("--system", metavar="TEXT", help="a system message for conversations that have none")
    add(
        "--max-new-tokens",
        type=int,
        metavar="N",
        help="largest number of tokens in a response; by default the run's, or 256",
    )
    add("--temperature", type=float, metavar="X", help="0 is greedy; by default the run's, or 1")
    add("--top-p", type=float, metavar="X", help="as sampling.top_p; by default the run's, or 1")
    add(
        "--best-of",
        type=int,
        metavar="N",
        help="sample N responses for each one, and keep the one that an ensemble rewards most on average",
    )
    add(
        "--ensemble",
        metavar="DIR",
        help="the ensemble that chooses, written by oat export RUN DIR --ensemble; by default the run's own",
    )
    add("--seed", type=int, default=0, metavar="N", help="seed of the random numbers; by default 0")
    add(
        "--device",
        choices=("cpu", "gpu"),
        metavar="cpu|gpu",
        help="device of the model; by default the run's, or the CPU",
    )
    add(
        "--dtype",
        choices=("float32", "bfloat16"),
        metavar="bfloat16|float32",
        help="precision of the weights of a model without a run; by default float32",
    )


def generation_options(arguments: argparse.Namespace) -> "GenerationOptions":
    """Return the options that the arguments of `add_generation_options` give.

    Raises:
        ConfigError: `--step` is neither a number nor "best", or a number is out of range.
    """
    from oat.answering.speaker import GenerationOptions

    names = (
        "template",
        "system",
        "temperature",
        "top_p",
        "max_new_tokens",
        "dtype",
        "seed",
        "best_of",
        "ensemble",
    )
    own = {name: getattr(arguments, name) for name in names}
    return GenerationOptions(step=checkpoint_of(arguments.step), profile=arguments.device, **own)


def checkpoint_of(step: str | None) -> int | Literal["best"] | None:
    """Return the checkpoint that `--step` names: its step, "best", or None for the newest.

    Raises:
        ConfigError: `step` is neither a number nor "best".
    """
    if step is None:
        return None
    if step == "best":
        return "best"
    if not step.isdecimal():
        raise ConfigError(f"--step is {step!r}; give the step of a checkpoint, or best")
    return int(step)
