"""`oat eval`: make one evaluation outside of training, of a run's newest checkpoint or of the model that a
configuration starts from; or compare two models (`oat.answering.compare`)."""

import argparse
import json
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from oat.commands.interruptible import hearing_signals
from oat.files import absolute
from oat.plugins.leaving import unfinished

if TYPE_CHECKING:
    from oat.resolve.resolved import Resolved


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
    from oat.resolve.targets import resolve_evaluated

    target = Path(arguments.target)
    read = partial(resolve_evaluated, target, flags) if arguments.against is None else lambda: None
    with hearing_signals(read, lambda _: str(target)) as (told, resolved), told.at_once(), unfinished():
        return _compare(arguments, flags) if resolved is None else _evaluate(target, resolved)


def _evaluate(target: Path, resolved: "Resolved") -> int:
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
    from oat.answering.compare import compare_models
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


def evaluate_once(resolved: "Resolved", run_dir: Path | None = None) -> dict[str, float]:
    """Evaluate once, without writing anything into the run. The budget of the section `evaluation` counts for
    this evaluation alone. If the evaluation fails, a warning says why, and `eval/failed` is 1.

    Args:
        resolved: a configuration with a section `evaluation`. The caller uses this object for nothing else.
        run_dir: the run whose newest checkpoint is evaluated. None: the model that the configuration starts
            from is evaluated.

    Returns:
        The metrics `eval/...`, and `step`: the number of updates that the weights have had.

    Raises:
        OatError: a part cannot be made as configured, the run has no usable checkpoint, or the run's model,
            tokenizer or template has changed since the run began.
    """
    from oat.answering.evaluated import seeds_of, with_ensemble_of
    from oat.answering.learned import load_trained_policy
    from oat.assemble.fingerprints import recorded
    from oat.assemble.run import build
    from oat.assemble.run_inputs import gather_inputs, refuse_weights, warn_of_changes
    from oat.loop import evaluation_metrics

    resolved = with_ensemble_of(resolved, run_dir)
    with tempfile.TemporaryDirectory() as scratch:
        known = None if run_dir is None else recorded(absolute(run_dir))
        run_inputs = gather_inputs(resolved, folder=Path(scratch), known=known)
        if run_dir is not None:
            refuse_weights(resolved, run_inputs, is_begun=True)
            warn_of_changes(run_dir, resolved, run_inputs)
        seeds = seeds_of(resolved, run_dir)
        run = build(resolved, directory=Path(scratch), run_inputs=run_inputs, seeds=seeds)
        try:
            step = 0 if run_dir is None else load_trained_policy(run, absolute(run_dir))
            assert run.evaluation is not None, "the configuration has the section"
            metrics = evaluation_metrics(run, run.evaluation, step)
        finally:
            run.ledger.close()
    return {
        "step": step,
        **{name: value for name, value in metrics.values.items() if name.startswith("eval/")},
    }
