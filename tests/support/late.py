"""Helpers for tests of late answers: an oracle with random delays whose cost is below its price, and the
loop's way of asking it."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from fixtures import make_group, make_questions

from oat.ledger.ledger import Ledger
from oat.testing import FakeOracle
from oat.types import Answer, Feedback, Group, Price, Question, Spent

MOST = 1.0
"""The highest cost of one text."""


def worth(question: Question) -> list[float]:
    return [float(len(text)) for text in question.candidates]


def cost(question: Question) -> float:
    """Return the cost of a question: for each text a share of `MOST` that depends on the text only. Sums of
    such costs are rounded."""
    return sum(
        MOST * random.Random(f"{question.messages[0].content} {text}").random()
        for text in question.candidates
    )


class Slow(FakeOracle):
    """An oracle of scores whose cost is below its price. Each answer comes after a random number of calls of
    `collect`. Answers that come together are in either order.

    Args:
        delays: the generator of the delays; None: every answer is there at once.
        most: a delay is below this number of calls.
        share: the fraction of `cost` that a question costs in money.
    """

    def __init__(self, delays: random.Random | None = None, most: int = 4, share: float = 1.0):
        self.share = share
        late = (lambda question: 0) if delays is None else lambda question: delays.randrange(most)
        super().__init__(worth, late=late, newest_first=delays is not None and delays.random() < 0.5)

    def price(self, question: Question) -> Price:
        return Price(question.size, 10 * question.size, MOST * question.size)

    def collect(self, tickets: Sequence[str], seconds: float) -> list[tuple[str, Answer]]:
        return super().collect(tickets, 0.0)  # answers wait for calls, not for time

    def _answer(self, question: Question) -> Answer:
        return replace(super()._answer(question), tokens=question.size, cost=self.share * cost(question))


@dataclass
class Played:
    """A record of steps: the feedback that each took, and the account of money and questions before each."""

    feedback: list[Feedback] = field(default_factory=list)
    spent: list[Spent] = field(default_factory=list)


def texts(occurrence: int) -> list[str]:
    """Return one to three short responses. There are few different texts, so some questions are equal."""
    draw = random.Random(occurrence)
    return [draw.choice("abcd") * draw.randrange(1, 4) for _ in range(draw.randrange(1, 4))]


def group(occurrence: int) -> Group:
    """Return a group of the record `occurrence`. Every fifth record has the same prompt."""
    made = make_group(occurrence % 5, *texts(occurrence))
    return replace(made, prompt=replace(made.prompt, occurrence=occurrence))


def play(
    ledger: Ledger,
    *,
    steps: int,
    count: int,
    ahead: int = 0,
    size: int | None = None,
    before: Callable[[int], None] = lambda step: None,
) -> Played:
    """Run the loop. Each step asks rounds of `size` questions until it has enough for itself and for the
    questions ahead, and then takes `count` answers.

    Args:
        before: called with the number of each step, before it begins.
    """
    found = Played()
    size = size or count
    due = 0
    asked = 0
    for step in range(steps):
        before(step)
        found.spent.append(ledger.spent_before(step))
        due += count
        target, round = min(due + ahead, steps * count), 0
        bound, is_replayed = (
            0 if ledger.is_spent(step) else due if ledger.is_spent(step, ahead=True) else target,
            ledger.has_taken(step),
        )
        while ledger.recalls(step, round) if is_replayed else ledger.asked(step, round) < bound:
            groups = [group(asked + place) for place in range(size)]
            if not ledger.recalls(step, round):
                ledger.ask(step, round, groups, make_questions(groups, "score", step, round, oracle="o"))
            round, asked = round + 1, asked + size
        found.feedback.append(ledger.take_feedback(step, count))
    return found
