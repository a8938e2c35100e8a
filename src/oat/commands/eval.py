"""`oat eval`: make one evaluation outside of training. It evaluates a run's newest checkpoint, or the model
that a configuration starts from."""

import tempfile
from pathlib import Path

from oat.answering.evaluated import seeds_of, with_ensemble_of
from oat.answering.learned import take_up_policy
from oat.assemble.fingerprints import recorded
from oat.assemble.run import build
from oat.assemble.run_inputs import gather_inputs, refuse_weights, warn_of_changes
from oat.files import seen
from oat.loop import evaluation_metrics
from oat.resolve.resolved import Resolved


def evaluate_once(resolved: Resolved, run_dir: Path | None = None) -> dict[str, float]:
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
    resolved = with_ensemble_of(resolved, run_dir)
    with tempfile.TemporaryDirectory() as scratch:
        known = None if run_dir is None else recorded(seen(run_dir))
        run_inputs = gather_inputs(resolved, folder=Path(scratch), known=known)
        if run_dir is not None:
            refuse_weights(resolved, run_inputs, is_begun=True)
            warn_of_changes(run_dir, resolved, run_inputs)
        seeds = seeds_of(resolved, run_dir)
        run = build(resolved, directory=Path(scratch), run_inputs=run_inputs, seeds=seeds)
        try:
            step = 0 if run_dir is None else take_up_policy(run, seen(run_dir))
            assert run.evaluation is not None, "the configuration has the section"
            metrics = evaluation_metrics(run, run.evaluation, step)
        finally:
            run.ledger.close()
    return {
        "step": step,
        **{name: value for name, value in metrics.values.items() if name.startswith("eval/")},
    }
