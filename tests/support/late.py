"""What tests of late answers share: an oracle that is paid less than it may cost and answers when chance says
so, and the loop's way of asking it."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from fixtures import make_group, make_questions

from oat.ledger.ledger import Ledger
from oat.testing import FakeOracle
from oat.types import Answer, Feedback, Group, Price, Question, Spent

MOST = 1.0
"""The most that a text may cost."""


def worth(question: Question) -> list[float]:
    return [float(len(text)) for text in question.candidates]


def cost(question: Question) -> float:
    """What a question costs: a share of the most of each text that follows from it, and adds up to sums that
    are rounded."""
    return sum(
        MOST * random.Random(f"{question.messages[0].content} {text}").random()
        for text in question.candidates
    )


class Slow(FakeOracle):
    """Scores, at a cost below its price; each answer comes after so many calls of `collect`, in either order.

    Args:
        delays: draws them; None: every answer is there at once.
        most: calls that an answer may need.
        share: of what `cost` says that a question costs, in money.
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
    """What steps saw: what they took, and what the conditions of a run read before each."""

    feedback: list[Feedback] = field(default_factory=list)
    spent: list[Spent] = field(default_factory=list)


def texts(occurrence: int) -> list[str]:
    """Of one to three responses, which come again under other prompts; few, so that questions are equal now
    and then."""
    draw = random.Random(occurrence)
    return [draw.choice("abcd") * draw.randrange(1, 4) for _ in range(draw.randrange(1, 4))]


def group(occurrence: int) -> Group:
    """Every fifth record has the prompt of another one."""
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
    """The loop: each step asks rounds of `size` questions until it has its own and those ahead, and takes
    `count`.

    Args:
        before: called with each step.
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
