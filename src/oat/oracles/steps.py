"""Step rewards as an oracle's code gives them: reads the pairs of one candidate, and checks them."""

import math
from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any

import numpy as np

from oat.errors import shown
from oat.types import Question, Steps, StepUnit

_ROUNDING = 1e-6
"""Largest difference of a value from the sum of its step rewards, relative to the size of the rewards."""
UNITS: tuple[StepUnit, ...] = ("characters", "tokens")


def plain_steps(given: Any, most: int | None = None, unit: StepUnit = "characters") -> Steps:
    """Return the step rewards of one candidate with plain numbers.

    Args:
        given: pairs of an end and a reward, as a list, a tuple, or an array of two columns.
        most: the length of the candidate, which no end may exceed; None: it is not known here.
        unit: what the ends count, for messages.

    Raises:
        ValueError: the pairs are no step rewards. The message says which one is wrong, and what to give.
    """
    pairs = given.tolist() if isinstance(given, np.ndarray) else given
    if not isinstance(pairs, list | tuple):
        raise ValueError(f"is {shown(given)}; give a list of pairs of an end and a reward")
    steps: list[tuple[int, float]] = []
    for pair in pairs:
        is_pair = isinstance(pair, Sequence) and not isinstance(pair, str | bytes) and len(pair) == 2
        end, reward = pair if is_pair else (None, None)
        whole = _whole(end)
        if whole is None:
            raise ValueError(
                f"has {shown(pair)}; give pairs of an end, which is a whole number, and a reward"
            )
        if not isinstance(reward, Real) or not math.isfinite(reward):
            raise ValueError(f"has the reward {shown(reward)} at {whole}; give a finite number")
        if whole <= (steps[-1][0] if steps else 0):
            before = f"after the end {steps[-1][0]}" if steps else "at the beginning"
            raise ValueError(f"has the end {whole} {before}; give ends above 0, each above the one before")
        if most is not None and whole > most:
            raise ValueError(
                f"has the end {whole}, and the response has {most} {unit}; give ends up to {most}"
            )
        steps.append((whole, float(reward)))
    return tuple(steps)


def sum_of(steps: Steps) -> float:
    """Return the exact sum of the rewards of some steps, rounded once; infinity if it is no finite number."""
    try:
        return math.fsum(reward for _, reward in steps)
    except OverflowError:
        return math.inf


def is_sum(value: float, steps: Steps) -> bool:
    """Return True if a value is the sum of the rewards of some steps, up to rounding."""
    size = max((abs(reward) for _, reward in steps), default=0.0)
    return math.isclose(sum_of(steps), value, rel_tol=_ROUNDING, abs_tol=_ROUNDING * size * len(steps))


def lengths(question: Question, unit: StepUnit) -> list[int | None]:
    """Return for each candidate the number of its characters or tokens; None if a question does not have the
    tokens."""
    if unit == "characters":
        return [len(text) for text in question.candidates]
    return [len(ids) for ids in question.ids] or [None] * len(question.candidates)


def _whole(value: Any) -> int | None:
    is_whole = isinstance(value, Integral) or (isinstance(value, float) and value.is_integer())
    return int(value) if is_whole and not isinstance(value, bool | np.bool_) else None
