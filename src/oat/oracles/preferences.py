"""Preferences from scores."""

import math
from collections.abc import Sequence
from dataclasses import replace

from oat.errors import ConfigError
from oat.oracles.base import Oracle, is_cacheable, names_price, price_of, version_of
from oat.types import Answer, Kind, Mark, Price, Question


class Preferences:
    """Makes an oracle of scores answer comparisons (Bradley and Terry, 1952).

    p = sigmoid((r_first - r_second) / scale)

    Equal rewards are a tie (0.5), never a win. A candidate without a score leaves the question with that mark. It costs what its two scores cost.

    Args:
        oracle: answers "score".
        scale: rewards that make odds of e to 1; above 0.

    Raises:
        ConfigError: the oracle does not score, or the scale is not a positive number.
    """

    answers: Kind = "compare"

    def __init__(self, oracle: Oracle, scale: float = 1.0):
        if oracle.answers != "score":
            raise ConfigError(f"preferences are made from scores, and this oracle answers {oracle.answers!r}; use it as it is")
        if not (math.isfinite(scale) and scale > 0):
            raise ConfigError(f"the scale of preferences must be a finite number above 0, not {scale}")
        self.oracle = oracle
        self.scale = scale
        self.durable, self.cacheable, self.names_price = oracle.durable, is_cacheable(oracle), names_price(oracle)
        self.version = version_of(oracle)

    def price(self, question: Question) -> Price:
        return price_of(self.oracle, replace(question, kind="score"))

    def submit(self, questions: Sequence[Question]) -> list[str]:
        return self.oracle.submit([replace(question, kind="score") for question in questions])

    def collect(self, tickets: Sequence[str], seconds: float) -> list[tuple[str, Answer]]:
        return [(ticket, self._compare(answer)) for ticket, answer in self.oracle.collect(tickets, seconds)]

    def _compare(self, answer: Answer) -> Answer:
        mark: Mark = next((mark for mark in ("failed", "abstain") if mark in answer.marks), "ok")
        if mark != "ok":
            return replace(answer, values=(0.5,), marks=(mark,))
        first, second = answer.values
        if first == second:
            return replace(answer, values=(0.5,), marks=("tie",))
        return replace(answer, values=(_sigmoid((first - second) / self.scale),), marks=("ok",))


def _sigmoid(x: float) -> float:
    small = math.exp(-abs(x))
    return (1.0 if x >= 0 else small) / (1.0 + small)
