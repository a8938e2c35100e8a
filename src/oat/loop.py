"""The loop. Read this first.

Everything around it is a box behind a protocol; no algorithm has a loop of its own.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from oat.algorithms.base import Objective, prepared, step_metrics
from oat.control.interruption import Interruption
from oat.control.silence import missing
from oat.errors import AlarmError, DirectoryError, Interrupted, LedgerError, OatError, OutageError, warn
from oat.metrics import Metrics
from oat.protocols import (
    Alarms,
    Buffer,
    Checkpoints,
    Collector,
    Evaluation,
    Holdings,
    Learner,
    Ledger,
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
"""In a checkpoint, beside the parts: metrics of a row that is still to be closed."""

LEARNED = ("learner", "objective", ENSEMBLE)
"""The parts that learning moves, and a roll back takes back. The others say where the run stands, and go
on."""


@dataclass(frozen=True, eq=False)
class Run:
    """The boxes of one run, as `oat.build.run` made them.

    Attributes:
        objectives: what is learned each step; the first one owns the plan.
        plans: the plan of each step, pure.
        parts: every stateful part, by name.
        start: metrics of row 0 that are known before the first step.
        notes: sentences for people, before the first step.
        chosen: settings that the configuration left open, by (section, field), as they were fixed when the
        run was built.
        interruption: how it is asked to end before its end.
    """

    objectives: Sequence[Objective]
    plans: Plans
    stop: Stop
    seeds: Seeds
    collector: Collector
    ledger: Ledger
    holdings: Holdings
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
    """Bring a run to its end, from its newest checkpoint. However it ends, what it saved is on disk then.

    Args:
        report: called with (step, metrics) after each step.
    Returns:
        Why it ended.
    Raises:
        Interrupted: it was asked to end before that; where it stood is on disk.
        OutageError: an oracle's service was away for too long; likewise.
        AlarmError: an alarm ended it; where it stood is on disk.
        CheckpointError: a checkpoint could not be written or read.
    """
    try:
        return steps(run, report)
    finally:
        run.checkpoints.wait()


def steps(run: Run, report: Report) -> str:
    """The steps that are left; returns why there are no more."""
    step, row = restore(run)
    run.tracking.open(step, is_closed=row is None)
    metrics = Metrics()
    if run.alarms.begin(step) and step == 0:
        save(run, step, states(run), is_last=False)
    if row is not None:
        metrics.add(row)
        reason, metrics = close_step(
            run, step, metrics, run.ledger.take(step - 1, run.plans(step - 1).questions), report
        )
    else:
        if step == 0:
            open_rows(run, report)
        reason = run.alarms.ended or run.stop.reason(step, run.ledger.spent_before(step))
    while reason is None:
        plan = run.plans(step)
        with clock(metrics, "time/step_s"):
            with clock(metrics, "time/sample_s"), or_saved(run, step):
                metrics.add(run.collector.fill(step, plan))
                feedback = run.ledger.take(step, plan.questions)
            with clock(metrics, "time/learn_s"):
                learned = run.buffer.fill(feedback)
                metrics.add(step_metrics(feedback))
                for objective in run.objectives:
                    batch = prepared(
                        objective, learned, run.learner.forward, run.seeds.at("prepare", objective.name, step)
                    )
                    metrics.add(
                        run.learner.update(objective, run.buffer.share_out(objective, batch, learned))
                    )
            metrics.add({**missing(feedback.items), **run.buffer.metrics(learned)})
            if react_to_alarms(run, step + 1, metrics) or run.weights.due(step):
                run.weights.sync(run.learner, version=step + 1)
            run.weights.follow(run.learner)
        metrics.add(
            {
                "oracle/reasked": run.ledger.reasked,
                **run.ledger.reported,
                "weights/version": run.weights.sampler_version,
            }
        )
        step += 1
        reason, metrics = close_step(run, step, metrics, feedback, report)
    if run.alarms.ended is not None:
        raise AlarmError(run.alarms.ended)
    return reason


def open_rows(run: Run, report: Report) -> None:
    """Row 0: the start."""
    with run.interruption.at_once():
        metrics = evaluate(run, 0, due=run.evaluation is not None)
    metrics.add(run.start)
    mark_changes(run, 0, metrics, is_evaluated=run.evaluation is not None)
    run.tracking.row(0, metrics.values)
    report(0, metrics.values)


def react_to_alarms(run: Run, step: int, metrics: Metrics) -> bool:
    """Hold the metrics of the update that made it so many against the alarms; whether what was learned went
    back to a checkpoint."""
    back = run.alarms.check(step, metrics.values, is_saved=run.checkpoints.due(step - 1))
    if back is not None:
        run.alarms.back, tensors, plain = run.checkpoints.load_back(back)
        take_up(run, [part for part in run.parts if part in LEARNED], tensors, plain)
    metrics.add({"alarms/raised": run.alarms.raised, "alarms/rolled_back": back is not None})
    return back is not None


def close_step(
    run: Run, step: int, metrics: Metrics, feedback: Feedback, report: Report
) -> tuple[str | None, Metrics]:
    """What follows the update that made it so many: evaluation, row, checkpoint.

    Returns:
        Why the run ends here, or None; and the next row so far: the seconds that the checkpoint took.
    """
    later = Metrics()
    reason = run.alarms.ended or run.stop.reason(step, run.ledger.spent_before(step))
    with or_saved(run, step, metrics.values):
        is_due = run.evaluation is not None and (
            reason is not None or run.evaluation.due(step, feedback.queries)
        )
        metrics.add(evaluate(run, step, due=is_due, feedback=feedback).values)
    mark_changes(run, step, metrics, is_evaluated=is_due)
    run.tracking.row(step, metrics.values, feedback)
    if run.checkpoints.due(step) or reason is not None:
        with clock(later, "time/save_s"):
            save(run, step, states(run), metrics=metrics.values, is_last=reason is not None)
        if run.checkpoints.oldest is not None:
            run.ledger.drop(run.buffer.reach(run.checkpoints.oldest))
    report(step, metrics.values)
    return reason, later


def evaluate(run: Run, step: int, *, due: bool, feedback: Feedback | None = None) -> Metrics:
    """The metrics of an evaluation after `step` updates, the last of which took this, if one is due. Whatever
    fails in it is said and counted; weights that do not verify and a ledger that cannot be written end the
    run, since training shares them."""
    metrics = Metrics()
    if due and run.evaluation is not None:
        with clock(metrics, "time/evaluate_s"):
            if run.evaluation.slot == "policy":
                run.weights.push("policy", step, run.learner.tensors("policy"))
            try:
                metrics.add(run.evaluation.measure())
                values = run.evaluation.run(step, feedback.queries if feedback else 0, feedback)
            except (LedgerError, DirectoryError):
                raise
            except OatError as error:
                warn(f"the evaluation after {step} steps failed and is left out: {error}")
                values = {"eval/failed": 1.0}
            run.alarms.note_evaluation(values)
            metrics.add(values)
    return metrics


def mark_changes(run: Run, step: int, metrics: Metrics, *, is_evaluated: bool) -> None:
    """Say in a row that an oracle has changed since the run's first, as soon as one has."""
    count = run.ledger.changes(step, is_evaluated=is_evaluated)
    if count:
        metrics.add({"oracle/changes": count})


@contextmanager
def or_saved(run: Run, step: int, row: Mapping[str, float] | None = None) -> Iterator[None]:
    """A run that is asked to end ends within it, or whose oracle is out of reach, with a checkpoint of the
    state before it, unless there is one.

    Args:
        row: metrics of a row that is not closed yet.
    """
    before, known = states(run), None if row is None else dict(row)
    try:
        with run.interruption.at_once():
            yield
    except (Interrupted, OutageError):
        if run.checkpoints.saved != step:
            save(run, step, before, row=known, is_last=True)
        raise


def states(run: Run) -> dict[str, dict[str, Any]]:
    """What every stateful part holds now, by part; tensors are those that learning overwrites, and no
    copies."""
    return {part: box.state for part, box in run.parts.items()}


def save(
    run: Run,
    step: int,
    states: Mapping[str, Mapping[str, Any]],
    *,
    metrics: Mapping[str, float] | None = None,
    row: Mapping[str, float] | None = None,
    is_last: bool,
) -> None:
    """Have a checkpoint of these states written: tensors by "part/name", the rest as JSON. Before it, the
    rows up to it are brought to disk.

    Args:
        metrics: of the last of them, where it has just been closed.
        row: metrics of the last of them, where it is still to be closed.
        is_last: nothing is learned after it.
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
    """Load the newest checkpoint into every part, and every slot of the engines; returns the step to go on
    with, and a row to be closed first."""
    step, row = 0, None
    loaded = run.checkpoints.load()
    if loaded is not None:
        step, tensors, plain = loaded
        row = plain.pop(ROW, None)
        take_up(run, [part for part in run.parts if part in plain], tensors, plain)  # a fork may have more
    run.weights.restore(run.learner)
    return step, row


def take_up(
    run: Run,
    parts: Iterable[str],
    tensors: Mapping[str, torch.Tensor],
    plain: Mapping[str, Mapping[str, Any]],
) -> None:
    """Give parts the states that a checkpoint has of them."""
    for part in parts:
        mine = {
            name.removeprefix(f"{part}/"): tensor
            for name, tensor in tensors.items()
            if name.startswith(f"{part}/")
        }
        run.parts[part].load_state({**plain[part], **mine})


@contextmanager
def clock(metrics: Metrics, name: str) -> Iterator[None]:
    """Adds the seconds of its body to the metrics."""
    begin = time.perf_counter()
    yield
    metrics.add({name: time.perf_counter() - begin})
