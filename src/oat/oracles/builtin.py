"""Oracles that ask nobody, because the run has the values before it asks. No answer of theirs costs a query.

* `environment` answers with the rewards of episodes. An episode that has none, because the environment was
  late, gets the mark "failed".
* `recorded` answers with the order, or the scores, that the data have.
* `ensemble` answers questions about pairs with the belief of an ensemble.
"""

from collections.abc import Sequence

from oat.errors import OracleError
from oat.oracles.base import Oracle
from oat.types import ENSEMBLE, Answer, Kind, Mark, Price, Question

BUILTIN = ("environment", "recorded")
"""The names of oracles of this module that a configuration may use."""


class KnownOracle(Oracle):
    """An oracle that answers from `Question.known`, one value per candidate. A score is this value. In a
    comparison the candidate with the greater value wins, and equal values are a tie."""

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
        return [(ticket, self.answer(self._open.pop(ticket))) for ticket in tickets if ticket in self._open]

    def answer(self, question: Question) -> Answer:
        known = question.known
        if self.name == "environment" and not known:
            known = (None,) * len(question.candidates)
        if len(known) != len(question.candidates):
            raise OracleError(
                f"the oracle {self.name} was asked about a sample without a known value (question "
                f"{question.key}); it answers only about samples "
                "of an environment, of recorded data, or chosen by an ensemble"
            )
        marks: list[Mark] = ["failed" if value is None else "ok" for value in known]
        values = tuple(0.0 if value is None else value for value in known)
        if question.kind == "score":
            return Answer(question.key, values, tuple(marks), queries=0, by=self.name)
        mark: Mark = "failed" if "failed" in marks else "tie" if values[0] == values[1] else "ok"
        return Answer(
            question.key,
            (float(values[0] > values[1]) if mark == "ok" else 0.5,),
            (mark,),
            queries=0,
            by=self.name,
            scores=known if self.name == "environment" else (),
        )


class BeliefOracle(KnownOracle):
    """The oracle that answers with an ensemble's belief: the first number of `Question.known` is the
    probability that the first candidate wins."""

    def __init__(self) -> None:
        super().__init__(ENSEMBLE, "compare")

    def answer(self, question: Question) -> Answer:
        values = [0.5 if value is None else value for value in question.known[:1]]
        if len(values) != 1 or not 0 <= values[0] <= 1:
            raise OracleError(
                f"question {question.key} is for the ensemble, and `known` is {question.known}; an explorer "
                "puts there the probability that each of the two candidates wins"
            )
        return Answer(question.key, (values[0],), ("ok",), queries=0, by=self.name)
