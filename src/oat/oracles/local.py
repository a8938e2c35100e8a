"""The base of oracles that compute in this process."""

import time
from collections.abc import Sequence

from oat.oracles.base import Oracle
from oat.types import Answer, Kind, Mark, Question

Values = Sequence[Sequence[float | None]]
"""A list of values for each question; None is an abstention."""


class LocalOracle(Oracle):
    """The base of an oracle that computes its answers within `collect`, for all questions that are collected
    together. `collect` returns when all of these answers are computed.

    A subclass defines `values`, which computes them.

    Args:
        name: the oracle's name, for `Answer.by`.
    """

    answers: Kind = "score"

    def __init__(self, name: str):
        self.name = name
        self._pending: dict[str, tuple[Question, float]] = {}

    def values(self, questions: Sequence[Question]) -> Values:
        """Return a list of values for each question. For a scoring question these are the scores of its
        candidates; for a comparison it is one value, the probability that the first candidate wins."""
        raise NotImplementedError

    def submit(self, questions: Sequence[Question]) -> list[str]:
        now = time.monotonic()
        self._pending.update({str(question.key): (question, now) for question in questions})
        return [str(question.key) for question in questions]

    def collect(self, tickets: Sequence[str], seconds: float) -> list[tuple[str, Answer]]:
        due = [ticket for ticket in dict.fromkeys(tickets) if ticket in self._pending]
        if not due:
            return []
        asked = [self._pending[ticket] for ticket in due]
        found = self.values([question for question, _ in asked])
        for ticket in due:
            del self._pending[ticket]
        return [
            (ticket, self._answer(*asked_, own))
            for ticket, asked_, own in zip(due, asked, found, strict=True)
        ]

    def _answer(self, question: Question, since: float, values: Sequence[float | None]) -> Answer:
        marks: tuple[Mark, ...] = tuple("abstain" if value is None else "ok" for value in values)
        numbers = tuple(0.0 if value is None else value for value in values)
        return Answer(
            question.key, numbers, marks, queries=len(values), by=self.name, seconds=time.monotonic() - since
        )
