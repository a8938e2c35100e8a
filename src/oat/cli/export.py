"""`oat export`: write the trained model of a run to a directory."""

import argparse
from pathlib import Path

from oat.cli.answering import checkpoint_of
from oat.cli.interruptible import say_loading
from oat.errors import ConfigError, printable


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN")
    parser.add_argument("out", metavar="OUT")
    parser.add_argument(
        "--step",
        metavar="N|best",
        help="the checkpoint; by default the newest. best: the one with the highest checkpoint.best_metric",
    )
    parser.add_argument(
        "--adapter",
        action="store_true",
        help="write only the LoRA adapter of the run, for PEFT, instead of the merged model",
    )
    parser.add_argument(
        "--critic",
        action="store_true",
        help="write the critic, as a sequence-classification model, instead of the policy",
    )
    parser.add_argument(
        "--ensemble",
        action="store_true",
        help="write the ensemble of the run's explorer, for explorer.ensemble.start, instead of the policy",
    )


def call(arguments: argparse.Namespace, _: list[str]) -> int:
    out, which = Path(arguments.out), checkpoint_of(arguments.step)
    if arguments.ensemble and (arguments.adapter or arguments.critic):
        raise ConfigError("--ensemble writes neither an adapter nor a critic; give one of the three")
    say_loading(arguments.run)
    from oat.commands.export import export_run
    from oat.commands.export_ensemble import export_ensemble

    if arguments.ensemble:
        step = export_ensemble(Path(arguments.run), out, which)
        print(f"oat export: the ensemble after {step} steps is in {arguments.out}")
        return 0
    replaced = any((out / name).exists() for name in ("config.json", "adapter_config.json"))
    made = export_run(Path(arguments.run), out, which, adapter=arguments.adapter, critic=arguments.critic)
    print(
        f"oat export: the {'critic' if arguments.critic else 'model'} after {made.step} steps is in "
        f"{arguments.out}{', in place of the model that was there' if replaced else ''}"
    )
    print(printable(f"oat export: {made.read_back}"))
    return 0
