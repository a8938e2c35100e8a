"""The loop. Read this first.

The function `steps` is the complete loop. It has one line for each box, and it alone decides whether a step
is the last one. Every box has a protocol (`protocols.py`). No algorithm has a loop of its own.

Rows of metrics are numbered from 0, the start. Row n + 1 closes step n: it has the metrics of this step, and
those of the evaluation after its update. The checkpoint of step n has the state before step n.

If a signal, an outage or a lost process ends the run while a step samples or asks, the loop saves the state
before this step. If it happens while new weights are published or evaluated after a step, the loop saves the
state before that. The row that closes the step is not written yet then. So the checkpoint also stores the
metrics of this row that are known, and the continued run writes the row.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from oat.algorithms.base import Objective, prepared, refill_metrics, step_metrics, used_advantages
from oat.control.interruption import Interruption
from oat.control.silence import missing
from oat.errors import ENDING, ActorError, AlarmError, Interrupted, OatError, OutageError, warn
from oat.metrics import Metrics
from oat.protocols import (
    Alarms,
    Buffer,
    Checkpoints,
    Collector,
    Evaluation,
    Learner,
    Ledger,
    LedgerRequirements,
    Plans,
    Stateful,
    Stop,
    Tracking,
    Weights,
)
from oat.seeds import Seeds
from oat.types import ENSEMBLE, Feedback

Report = Callable[[int, dict[str, float]], None]

ROW = "row"
"""A key in the state of a checkpoint that was saved when an evaluation was interrupted. Its value is the
metrics so far of the row that the run must still write."""

LEARNED = ("learner", "objective", ENSEMBLE)
"""The parts that learning changes. A roll back restores only these parts."""

MOST_GAP = 0.05
"""Nats per token by which the engine and the learner may differ on average before the run warns."""


@dataclass(frozen=True, eq=False)
class Run:
    """The boxes of one run, as `oat.assemble.run` made them.

    Attributes:
        objectives: the objectives that each step learns, one after another; the first one makes the plans.
        plans: function that returns the plan of a step, given the step's number.
        parts: every part with a state, by name.
        start: metrics of row 0 in addition to those of its evaluation.
        notes: sentences for people, printed before the first step.
        chosen: by (section, field), the settings that are fixed when a run is created, with their values.
        interruption: holds the request of a signal or a callback to end the run.
    """

    objectives: Sequence[Objective]
    plans: Plans
    stop: Stop
    seeds: Seeds
    collector: Collector
    ledger: Ledger
    holdings: LedgerRequirements
    buffer: Buffer
    learner: Learner
    weights: Weights
    evaluation: Evaluation | None
    alarms: Alarms
    checkpoints: Checkpoints
    tracking: Tracking
    parts: dict[str, Stateful]
    start: Mapping[str, float] = field(default_factory=dict)
    notes: Sequence[str] = ()
    chosen: Mapping[tuple[str, str], Any] = field(default_factory=dict)
    interruption: Interruption = field(default_factory=Interruption)


def train(run: Run, report: Report) -> str:
    """Bring a run from its newest checkpoint to its end. When this function returns or raises, no checkpoint
    is still being written.

    Args:
        report: function that is called with the number and the metrics of each row that this call closes.
    Returns:
        The reason why the run ended.
    Raises:
        Interrupted: a signal asked the run to end; its state is on disk.
        OutageError: an oracle's service gave no answer for too long; the run's state is on disk.
        AlarmError: an alarm ended the run; its state is on disk.
        CheckpointError: a checkpoint could not be written or read.
    """
    try:
        reason = steps(run, report)
        if run.alarms.ended is not None:
            raise AlarmError(run.alarms.ended)
        return reason
    finally:
        run.checkpoints.wait()


@dataclass(eq=False)
class Row:
    """A row of metrics that is not written yet.

    Attributes:
        number: number of the row, which is the number of steps done before the row is written.
        metrics: the metrics that are known so far.
    """

    number: int
    metrics: Metrics = field(default_factory=Metrics)

    @property
    def step(self) -> int:
        """The step that the row closes. It is also the version of the policy with which that step begins."""
        return self.number - 1


def steps(run: Run, report: Report) -> str:
    """Take the remaining steps, and return the reason why the run ended.

    Each turn of the loop takes one step and writes the row that closes it. Whether a step is the last one is
    known only after it has learned. After its last step a run evaluates and saves, even if that is not due.
    """
    row, feedback = begin(run, report)
    reason = reason_to_end(run, row.step) if feedback is None else None
    while reason is None:
        if feedback is None:  # otherwise an earlier process has learned this step, but not written its row
            with clock(row.metrics, "time/step_s"):
                with clock(row.metrics, "time/sample_s"), or_saved(run, row.step):
                    row.metrics.add(fill(run, row.step))
                    feedback = take(run, row.step)
                learn(run, row, feedback)
                is_rolled_back = react_to_alarms(run, row)
                publish_weights(run, row, is_due=is_rolled_back or run.weights.due(row.step))
            count(run, row)
        reason = reason_to_end(run, row.number) or run.stop.note(row.metrics.values)
        is_evaluated = evaluate(run, row, feedback, is_last=reason is not None)
        reason = reason or run.stop.note(row.metrics.values)
        write_row(run, row, feedback, is_evaluated=is_evaluated)
        later = checkpoint(run, row, is_last=reason is not None)
        report(row.number, row.metrics.values)
        row, feedback = Row(row.number + 1, later), None
    return reason


def begin(run: Run, report: Report) -> tuple[Row, Feedback | None]:
    """Restore the newest checkpoint, if there is one. If there is none, or it is that of step 0, write row 0.

    Returns:
        The row to write next, and the feedback of its step if an earlier process has learned that step;
        otherwise None.
    """
    number, known = restore(run)
    run.tracking.open(number, is_closed=known is None)
    if run.alarms.begin(number) and number == 0:
        save(run, number, states(run, number), is_last=False)
    if known is not None:
        row = Row(number)
        row.metrics.add(known)
        return row, take(run, row.step)
    if number == 0:
        write_first_row(run, report)
    return Row(number + 1), None


def write_first_row(run: Run, report: Report) -> None:
    """Write row 0, the start. If the run has evaluations, the row has the metrics of one."""
    row = Row(0)
    with run.interruption.at_once():
        if run.evaluation is not None:
            row.metrics.add(evaluation_metrics(run, run.evaluation, row.number).values)
    row.metrics.add(run.start)
    write_row(run, row, is_evaluated=run.evaluation is not None)
    report(row.number, row.metrics.values)


def reason_to_end(run: Run, number: int) -> str | None:
    """Return the reason why the run ends after `number` steps, whatever their metrics are; None if it goes
    on."""
    return run.alarms.ended or run.stop.reason(number, run.ledger.spent_before(number)) or run.collector.ended


def fill(run: Run, step: int) -> Mapping[str, float]:
    """Let the collector sample and ask until the step's questions are on disk. Return metrics of sampling."""
    return run.collector.fill(step, run.plans(step))


def take(run: Run, step: int) -> Feedback:
    """Return the answers that the step learns from. The ledger records the take before it returns them."""
    return run.ledger.take_feedback(step, run.plans(step).questions, is_usable=run.collector.is_usable)


def learn(run: Run, row: Row, feedback: Feedback) -> None:
    """For each objective, prepare a batch and let the learner update the models on it. Write the advantages
    of the step's responses: those of the first objective that has any."""
    with clock(row.metrics, "time/learn_s"):
        learned = run.buffer.fill(feedback)
        row.metrics.add({**step_metrics(feedback), **run.collector.metrics(feedback)})
        used = None
        for objective in run.objectives:
            generator = run.seeds.at("prepare", objective.name, row.step)
            batch = prepared(objective, learned, run.learner.forward, generator)
            row.metrics.add(run.learner.update(objective, run.buffer.split(objective, batch, learned)))
            used = used or used_advantages(batch, feedback.items)
        nothing = [[None] * len(item.question.picks) for item in feedback.items]
        run.tracking.advantages(row.number, used or nothing)
    warn_of_gap(row.metrics.values)
    row.metrics.add({**missing(feedback.asked), **run.buffer.metrics(learned)})
    if run.collector.is_usable is not None:
        row.metrics.add(refill_metrics(feedback, run.collector.is_usable))


def warn_of_gap(values: Mapping[str, float]) -> None:
    """Warn, once in a process, if the engine and the learner give the same weights' tokens log-probabilities
    that differ by more than `MOST_GAP`. A sampler with older weights is no fault, so it gives no warning."""
    if values.get("logps/recorded_gap", 0.0) > MOST_GAP and not values.get("lag/versions"):
        warn(
            f"the engine's log-probabilities differ from the learner's by more than {MOST_GAP} nats a token, "
            "although both have the same weights (metric logps/recorded_gap); set engine.dtype to float32 "
            "and remove learner.autocast, or correct for it with algorithm.correction "
            "(docs/algorithms/corrections.md)"
        )


def react_to_alarms(run: Run, row: Row) -> bool:
    """Check the step's metrics against the alarms. If an alarm calls for a roll back, restore the learned
    parts (`LEARNED`) from a checkpoint, and return True."""
    back = run.alarms.check(row.number, row.metrics.values, is_saved=run.checkpoints.due(row.step))
    if back is not None:
        run.alarms.back, tensors, plain = run.checkpoints.load_back(back)
        load_states(run, [part for part in run.parts if part in LEARNED], tensors, plain)
    is_rolled_back = back is not None
    row.metrics.add({"alarms/raised": run.alarms.raised, "alarms/rolled_back": is_rolled_back})
    return is_rolled_back


def publish_weights(run: Run, row: Row, *, is_due: bool) -> None:
    """Load the learner's weights into the slots of engines.

    If a transfer is due, load the policy into `sampler` and the ensemble's networks into `ensemble`. If the
    reference has changed, load it into `reference`.

    If a process is lost for good, or a signal ends the run, save the state in which these weights are still
    to be loaded.

    Args:
        is_due: True if the sampler gets new weights after this step, or the weights were rolled back.
    """
    if is_due:
        run.weights.take(run.learner, version=row.number)
    try:
        with run.interruption.at_once():
            if is_due:
                run.weights.load(run.learner)
            run.weights.follow(run.learner)
    except (Interrupted, ActorError):
        count(run, row)
        save(run, row.number, states(run, row.number), row=row.metrics.values, is_last=True)
        raise


def count(run: Run, row: Row) -> None:
    """Add to the row the numbers that the ledger and the transfer of weights report at the end of the
    step."""
    row.metrics.add({"oracle/reasked": run.ledger.reasked, **run.ledger.reported})
    row.metrics.add({"weights/version": run.weights.sampler_version})


def evaluate(run: Run, row: Row, feedback: Feedback, *, is_last: bool) -> bool:
    """If an evaluation is due or the run ends, evaluate the new weights, and return True."""
    with or_saved(run, row.number, row.metrics.values):
        evaluation = run.evaluation
        if evaluation is None or not (is_last or evaluation.due(row.number, feedback.queries)):
            return False
        row.metrics.add(evaluation_metrics(run, evaluation, row.number, feedback).values)
        return True


def write_row(run: Run, row: Row, feedback: Feedback | None = None, *, is_evaluated: bool) -> None:
    """Write the row. If versions of oracles have changed, the row also has the number of changes so far.

    Args:
        feedback: the feedback that the row's step learned from; None for row 0.
    """
    changes = run.ledger.changes(row.number, is_evaluated=is_evaluated)
    if changes:
        row.metrics.add({"oracle/changes": changes})
    run.tracking.row(row.number, row.metrics.values, feedback)


def checkpoint(run: Run, row: Row, *, is_last: bool) -> Metrics:
    """Save the state after the row if a checkpoint is due or the run ends. Then let the ledger drop the
    trajectories that no checkpoint on disk needs.

    Returns:
        The time of the save. The row is already written, so the next row has this metric.
    """
    later = Metrics()
    if run.checkpoints.due(row.number) or is_last:
        with clock(later, "time/save_s"):
            save(run, row.number, states(run, row.number), metrics=row.metrics.values, is_last=is_last)
        if run.checkpoints.oldest is not None:
            run.ledger.drop(run.buffer.oldest_needed(run.checkpoints.oldest))
    return later


def evaluation_metrics(
    run: Run, evaluation: Evaluation, step: int, feedback: Feedback | None = None
) -> Metrics:
    """Evaluate after `step` updates, and return the metrics.

    If the evaluation raises an OatError, the run warns, sets the metric `eval/failed`, and continues. The
    errors in `ENDING` end the run instead.

    Args:
        feedback: the feedback that the last of these updates learned from; None if there was no update.
    """
    metrics = Metrics()
    with clock(metrics, "time/evaluate_s"):
        if evaluation.slot == "policy":
            run.weights.push("policy", step, run.learner)
        try:
            metrics.add(evaluation.measure())
            values = evaluation.run(step, feedback.queries if feedback else 0, feedback)
        except ENDING:
            raise
        except OatError as error:
            warn(f"the evaluation after {step} steps failed and is left out: {error}")
            values = {"eval/failed": 1.0}
        run.alarms.note_evaluation(values)
        metrics.add(values)
    return metrics


@contextmanager
def or_saved(run: Run, step: int, row: Mapping[str, float] | None = None) -> Iterator[None]:
    """If a signal, an outage or a lost process ends the run in the body, save the state from before the body.
    If the last saved or loaded checkpoint is of this step already, save nothing.

    Args:
        step: the step of the checkpoint, which is the number of steps done before the body.
        row: if the body evaluates: the metrics so far of the evaluation's row, which is not written yet.
            Otherwise None.
    """
    before, known = states(run, step), None if row is None else dict(row)
    try:
        with run.interruption.at_once():
            yield
    except (Interrupted, OutageError, ActorError):
        if run.checkpoints.saved != step:
            save(run, step, before, row=known, is_last=True)
        raise


def states(run: Run, step: int) -> dict[str, dict[str, Any]]:
    """Return the state of every part before `step`, by the part's name.

    The collector and its prompts may have begun later steps, and know where they stood. Every other part
    changes when the loop learns, publishes or evaluates, so its state is the present one. Its tensors are not
    copies, so learning changes them.
    """
    return {part: box.state for part, box in run.parts.items()} | run.collector.states_at(step)


def save(
    run: Run,
    step: int,
    states: Mapping[str, Mapping[str, Any]],
    *,
    metrics: Mapping[str, float] | None = None,
    row: Mapping[str, float] | None = None,
    is_last: bool,
) -> None:
    """Start to write a checkpoint of these states. Tensors are named "part/name"; other values are saved as
    JSON. The rows of metrics so far are written to disk first.

    Args:
        metrics: the metrics of row `step`, if the row has just been written; otherwise None.
        row: the metrics of row `step` that are known so far, if its evaluation was interrupted; otherwise
            None.
        is_last: True if this process learns nothing after the checkpoint.
    """
    run.tracking.flush()
    tensors: dict[str, torch.Tensor] = {}
    plain: dict[str, dict[str, Any]] = {}
    for part, state in states.items():
        tensors |= {
            f"{part}/{name}": value for name, value in state.items() if isinstance(value, torch.Tensor)
        }
        plain[part] = {name: value for name, value in state.items() if not isinstance(value, torch.Tensor)}
    everything = {
        **plain,
        **run.holdings.before(step, evaluated=step > 0 and row is None),
        **({} if row is None else {ROW: row}),
    }
    run.checkpoints.save(step, tensors, everything, metrics, keep=run.alarms.back, is_last=is_last)


def restore(run: Run) -> tuple[int, Mapping[str, float] | None]:
    """If there is a checkpoint, load the newest one into the parts whose states it contains. Then load the
    slots' weights, also in a new run.

    Returns:
        The next step, and the metrics of the row that the run must still complete; None if it need not
        complete a row.
    """
    step, row = 0, None
    loaded = run.checkpoints.load()
    if loaded is not None:
        step, tensors, plain = loaded
        row = plain.pop(ROW, None)
        stored = [part for part in run.parts if part in plain]  # a fork may add parts
        load_states(run, stored, tensors, plain)
    run.weights.restore(run.learner)
    return step, row


def load_states(
    run: Run,
    parts: Iterable[str],
    tensors: Mapping[str, torch.Tensor],
    plain: Mapping[str, Mapping[str, Any]],
) -> None:
    """Load the states of these parts from a checkpoint.

    Args:
        tensors: the tensors, by "part/name".
        plain: the other values of each part's state, by part.
    """
    for part in parts:
        mine = {
            name.removeprefix(f"{part}/"): tensor
            for name, tensor in tensors.items()
            if name.startswith(f"{part}/")
        }
        run.parts[part].load_state({**plain[part], **mine})


@contextmanager
def clock(metrics: Metrics, name: str) -> Iterator[None]:
    """Measure the body's time, and report it as the metric `name`, in seconds."""
    begin = time.perf_counter()
    yield
    metrics.add({name: time.perf_counter() - begin})
