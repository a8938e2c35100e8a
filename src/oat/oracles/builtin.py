"""Oracles that ask nobody: the run knows the value when it makes the question.

`environment` answers with the reward of each sample's own episode. `recorded` answers with the order or the
scores in the data. `ensemble` is asked about pairs that an ensemble has chosen, and answers with the values
that the ensemble gave to the two responses. None of the three costs a query.
"""

from collections.abc import Sequence

from oat.errors import OracleError
from oat.oracles.base import Oracle
from oat.types import Answer, Kind, Mark, Price, Question

BUILTIN = ("environment", "recorded")
"""The names of the oracles that ask nobody and that a configuration may name. The data or the environment
have the value."""


class KnownOracle(Oracle):
    """Answers from `Question.known`: a scoring question with these values, a comparison with which of the two
    is greater; equal values are a tie."""

    cacheable = False
    where_asked = "in this process, asks nobody"

    def __init__(self, name: str, answers: Kind):
        self.name = name
        self.answers: Kind = answers
        self._open: dict[str, Question] = {}

    def price(self, question: Question) -> Price:
        return Price()

    def submit(self, questions: Sequence[Question]) -> list[str]:
        self._open.update({str(question.key): question for question in questions})
        return [str(question.key) for question in questions]

    def collect(self, tickets: Sequence[str], seconds: float) -> list[tuple[str, Answer]]:
        return [(ticket, self._answer(self._open.pop(ticket))) for ticket in tickets if ticket in self._open]

    def _answer(self, question: Question) -> Answer:
        known = question.known
        if len(known) != len(question.candidates):
            raise OracleError(
                f"the oracle {self.name} was asked about a sample without a known value (question "
                f"{question.key}); it answers only about samples "
                "of an environment, of recorded data, or chosen by an ensemble"
            )
        if question.kind == "score":
            fine: Mark = "ok"
            return Answer(question.key, known, (fine,) * len(known), queries=0, by=self.name)
        mark: Mark = "tie" if known[0] == known[1] else "ok"
        scores = known if self.name == "environment" else ()
        return Answer(
            question.key,
            (0.5 if mark == "tie" else float(known[0] > known[1]),),
            (mark,),
            queries=0,
            by=self.name,
            scores=scores,
        )
