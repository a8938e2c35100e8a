"""Rows and notes of `oat check --time`."""

import statistics
from collections.abc import Sequence

from oat.forecast.all_rows import Left
from oat.forecast.arithmetic import Rows
from oat.forecast.estimate import Lengths
from oat.forecast.rows import Row
from oat.forecast.step_time import STEPS, Times, measure_times
from oat.oracles.builtin import BUILTIN
from oat.resolve.resolved import Resolved

_PARTS = {"sampling": "sampling", "learning": "learner", "weights": "learner.sync_every"}
"""The settings that each part of a step follows from."""


def time_rows(resolved: Resolved, lengths: Lengths, left: Left) -> Rows:
    """Measure a few steps, and yield rows about the time of a run: the mean, and the least and the most that
    was measured.

    Args:
        left: what the run still has to do.
    """
    times = measure_times(resolved, lengths)
    steps = [sum(parts.values()) for parts in times.steps]
    yield Row("steps that were measured", STEPS, "steps", "--time")
    if times.measured < times.prompts:
        yield Row("prompts of a measured step", times.measured, "prompts", "algorithm.prompts")
    yield Row("tokens of a response, mean", times.tokens, "tokens", "sampling.max_new_tokens")
    yield Row("time of the start", times.start, "s", "model.path")
    for part, setting in (
        ("sampling", "sampling"),
        ("learning", "learner"),
        ("weights", "learner.sync_every"),
    ):
        yield Row(
            f"time of {part} in a step", statistics.mean(each[part] for each in times.steps), "s", setting
        )
    yield from _spread("time of a step", steps, "algorithm.prompts")
    if times.evaluations:
        yield from _spread("time of an evaluation", times.evaluations, "evaluation.path")
    yield Row("time of a checkpoint", times.checkpoint, "s", "checkpoint.every")
    if left.steps is not None:
        saves = left.steps / resolved.config.checkpoint.every * times.checkpoint
        evaluations = sorted(times.evaluations) or [0.0]
        whole = [
            times.start
            + left.steps * of_steps(steps)
            + (left.evaluations or 0) * of_steps(evaluations)
            + saves
            for of_steps in (min, statistics.mean, max)
        ]
        yield from _spread("time of the run", whole, "stop", mean=whole[1])
    for setting, times_as_fast in times.faster.items():
        yield Row("a step is faster", times_as_fast, "times as fast", setting)
    yield from _notes(resolved, times)


def _spread(name: str, seconds: Sequence[float], setting: str, mean: float | None = None) -> Rows:
    yield Row(name, statistics.mean(seconds) if mean is None else mean, "s", setting)
    yield Row(f"{name}, least", min(seconds), "s", setting)
    yield Row(f"{name}, most", max(seconds), "s", setting)


def _notes(resolved: Resolved, times: Times) -> Rows:
    if resolved.config.oracle.name not in BUILTIN:
        yield "time: no oracle was asked, and its time is not counted; responses got random scores"
    if resolved.config.prompts.responses:
        yield "time: steps differ with the lengths of the records that they learn from"
    else:
        yield "time: later steps differ: responses become longer or shorter while the policy learns"
    if times.measured < times.prompts:
        yield "time: a whole step would have taken too long, so fewer prompts were measured, and scaled"
    if times.faster:
        yield (
            "time: each faster setting was tried together with those above it in the table; a run that has "
            "begun keeps its own"
        )
    else:
        yield (
            "time: no other value of learner.micro_batch_tokens, compute.threads or engine.threads that was "
            "tried makes a step clearly faster"
        )
