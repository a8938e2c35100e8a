"""All rows and notes of `oat check` that need no weights."""

from typing import NamedTuple

from oat.assemble.run_inputs import RunInputs
from oat.files import absolute
from oat.forecast.arithmetic import Begun, Rows, evaluation_rows, evaluations_left, run_rows, step_rows
from oat.forecast.inputs import input_rows, text_notes
from oat.forecast.places import checkpoint_rows, place_rows, sink_rows, stored_step
from oat.learner.learner import Learner
from oat.loop import Run
from oat.resolve.defaults import derived
from oat.resolve.resolved import Resolved
from oat.rundir.checkpoint_files import newest_state
from oat.rundir.provenance import Origin
from oat.rundir.rows import read_metrics
from oat.types import Price


class Left(NamedTuple):
    """What a run still has to do; None where its number of steps is not known."""

    steps: int | None
    evaluations: int | None


def rows_of(
    resolved: Resolved, run: Run, run_inputs: RunInputs, origin: Origin | None, dearest: Price
) -> Rows:
    """Yield the rows and notes about a run.

    Args:
        origin: the origin of a fork that is still to be made; None: no fork is to be made.
        dearest: the highest price of a question of training, as `dearest_question` returns it.
    """
    learner, begun = run.learner, _begun(resolved, origin)
    assert isinstance(learner, Learner), "nothing goes through the wire here"
    yield from input_rows(learner, run_inputs, learns=resolved.objective.learns)
    yield from step_rows(resolved, run, dearest)
    yield from run_rows(resolved, run, run_inputs, dearest, begun)
    yield from evaluation_rows(resolved, run, run_inputs, begun)
    yield from checkpoint_rows(resolved, learner, origin, run.stop.last)
    yield from place_rows(resolved, learner, run_inputs)
    yield from sink_rows(resolved)
    yield from text_notes(run_inputs)
    for sentence in derived(resolved):
        yield f"by default {sentence}"


def left(resolved: Resolved, run: Run, origin: Origin | None) -> Left:
    """Return what a run still has to do."""
    last, done = run.stop.last, _begun(resolved, origin).steps
    return Left(None if last is None else max(0, last - done), evaluations_left(resolved, last, done))


def _begun(resolved: Resolved, origin: Origin | None) -> Begun:
    """Return the numbers of steps and queries that the run in the directory has made. If a fork is still to
    be made, return those that the original run had made at the checkpoint from which the fork begins."""
    step, directory = stored_step(resolved), absolute(resolved.about.run_dir)
    if step is None and origin is not None:
        step, directory = origin.step, origin.run
    if not step:
        return Begun(0, 0)
    spent = [
        row["oracle/queries"]
        for row in read_metrics(directory / "metrics.jsonl")
        if row["step"] <= step and "oracle/queries" in row
    ]
    _, state = newest_state(directory / "checkpoints", step) or ("", {})
    return Begun(step, int(spent[-1]) if spent else 0, state.get("prompts", {}).get("taken"))
