"""Preferences from scores."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from oat.errors import ConfigError, OracleError
from oat.oracles.base import (
    Oracle,
    bind,
    close_oracle,
    is_cacheable,
    made_of,
    metrics_of,
    names_cost,
    names_price,
    price_of,
    version_of,
)
from oat.oracles.contract import pairs_of, plain_answer
from oat.types import Answer, Kind, Mark, Price, Question


class Preferences:
    """Makes an oracle of scores answer comparisons (Bradley and Terry, 1952).

    p = sigmoid((r_first - r_second) / scale)

    Equal rewards are a tie (0.5), never a win. A candidate without a score leaves the question with that
    mark. It costs what its two scores cost, and the answer has those that there are beside it.

    Args:
        oracle: answers "score".
        scale: rewards that make odds of e to 1; above 0.

    Raises:
        ConfigError: the oracle does not score, or the scale is not a positive number.
    """

    answers: Kind = "compare"

    def __init__(self, oracle: Oracle, scale: float = 1.0):
        if oracle.answers != "score":
            raise ConfigError(
                f"preferences are made from scores, and this oracle answers {oracle.answers!r}; use it as "
                "it is"
            )
        if not (math.isfinite(scale) and scale > 0):
            raise ConfigError(f"the scale of preferences must be a finite number above 0, not {scale}")
        self.oracle = oracle
        self.scale = scale
        self.durable = oracle.durable
        self.cacheable = is_cacheable(oracle)
        self.names_price = names_price(oracle)
        self.names_cost, self.version = names_cost(oracle), version_of(oracle)
        self.name: str = getattr(oracle, "name", type(oracle).__name__)
        self._broken: OracleError | None = None

    @property
    def made_of(self) -> dict[str, dict[str, Any]]:
        return made_of(self.oracle)

    @property
    def metrics(self) -> dict[str, float]:
        return metrics_of(self.oracle)

    def price(self, question: Question) -> Price:
        return price_of(self.oracle, replace(question, kind="score"))

    def bind(self) -> None:
        bind(self.oracle)

    def close(self) -> None:
        close_oracle(self.oracle)

    def submit(self, questions: Sequence[Question]) -> list[str]:
        return self.oracle.submit([replace(question, kind="score") for question in questions])

    def collect(self, tickets: Sequence[str], seconds: float) -> list[tuple[str, Answer]]:
        """As the oracle's. Scores that nobody can use are an error once the sound answers beside them are
        handed out.

        Raises:
            OracleError: the oracle breaks the contract.
        """
        if self._broken is not None:
            raise self._broken
        there = []
        for ticket, answer in pairs_of(self.oracle.collect(tickets, seconds), self.name):
            try:
                there.append(
                    (ticket, self._compare(plain_answer(answer, "score", 2, self.name, f"ticket {ticket!r}")))
                )
            except OracleError as error:
                self._broken = error
        if self._broken is not None and not there:
            raise self._broken
        return there

    def _compare(self, answer: Answer) -> Answer:
        scores = tuple(
            value if mark == "ok" else None for value, mark in zip(answer.values, answer.marks, strict=True)
        )
        mark: Mark = next((mark for mark in ("failed", "abstain") if mark in answer.marks), "ok")
        if mark != "ok":
            return replace(
                answer, values=(0.5,), marks=(mark,), scores=() if scores == (None, None) else scores
            )
        first, second = answer.values
        scores = () if None in scores else scores
        if first == second:
            return replace(answer, values=(0.5,), marks=("tie",), scores=scores)
        return replace(
            answer, values=(_sigmoid((first - second) / self.scale),), marks=("ok",), scores=scores
        )


def _sigmoid(x: float) -> float:
    small = math.exp(-abs(x))
    return (1.0 if x >= 0 else small) / (1.0 + small)
