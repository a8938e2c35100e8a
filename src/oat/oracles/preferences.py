"""Preferences made from scores."""

import math
from collections.abc import Sequence
from dataclasses import replace

from oat.errors import ConfigError, OracleError
from oat.oracles.base import Oracle, Wrapper
from oat.oracles.contract import pairs_of, plain_answer
from oat.types import Answer, Kind, Mark, Price, Question, StepUnit


class Preferences(Wrapper):
    """An oracle that makes comparisons from the scores of another oracle (Bradley and Terry, 1952).

        p = sigmoid((r_first - r_second) / scale)

    Equal scores are a tie (0.5). If at least one score has the mark "failed", the comparison is "failed".
    Otherwise, if at least one score has "abstain", the comparison is "abstain". A comparison costs as much as
    its two scores.

    The answer also has the two scores (`Answer.scores`), with None for a missing one. If both are missing, it
    has no scores. Rewards of steps are left out; the scores of a mixture's sources stay
    (`Answer.sources`).

    Args:
        oracle: the oracle that scores.
        scale: the difference of scores at which the odds are e to 1; above 0.

    Raises:
        ConfigError: the oracle does not score, or the scale is not a finite number above 0.
    """

    answers: Kind = "compare"
    gives_steps: StepUnit | None = None
    reads_group = False
    """A pair is always asked as a whole."""

    def __init__(self, oracle: Oracle, scale: float = 1.0):
        if oracle.answers != "score":
            raise ConfigError(
                f"preferences are made from scores, and this oracle answers {oracle.answers!r}; use it as "
                "it is"
            )
        if not (math.isfinite(scale) and scale > 0):
            raise ConfigError(f"the scale of preferences must be a finite number above 0, not {scale}")
        super().__init__(oracle)
        self.scale = scale
        self.name = oracle.name or type(oracle).__name__
        self._broken: OracleError | None = None
        self._open: set[str] = set()

    def price(self, question: Question) -> Price:
        return self.oracle.price(replace(question, kind="score"))

    def submit(self, questions: Sequence[Question]) -> list[str]:
        tickets = self.oracle.submit([replace(question, kind="score") for question in questions])
        if isinstance(tickets, list | tuple):  # or the ledger refuses them
            self._open.update(ticket for ticket in tickets if isinstance(ticket, str))
        return tickets

    def collect(self, tickets: Sequence[str], seconds: float) -> list[tuple[str, Answer]]:
        """Collect scores, and return the comparisons made from them. If an answer of the scoring oracle
        cannot be used, return the comparisons made from its other answers, and raise at every later call. If
        no other answer can be used, raise at this call too. As the ledger does, ignore the second answer to a
        ticket, and that to a ticket that nobody waits for.

        Raises:
            OracleError: the scoring oracle breaks the contract.
        """
        if self._broken is not None:
            raise self._broken
        there = []
        unit = self.oracle.gives_steps
        waiting = self._open | {*tickets}
        for ticket, answer in pairs_of(self.oracle.collect(tickets, seconds), self.name):
            if ticket not in waiting:
                continue
            waiting.discard(ticket)
            self._open.discard(ticket)
            try:
                there.append(
                    (
                        ticket,
                        self._compare(
                            plain_answer(answer, "score", 2, self.name, f"ticket {ticket!r}", unit=unit)
                        ),
                    )
                )
            except OracleError as error:
                self._broken = error
        if self._broken is not None and not there:
            raise self._broken
        return there

    def drop(self, tickets: Sequence[str]) -> None:
        self._open.difference_update(tickets)
        self.oracle.drop(tickets)

    def _compare(self, given: Answer) -> Answer:
        answer = replace(given, steps=(), step_unit="characters")
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
