"""Oracles whose answers come when a test chooses."""

import math
from collections.abc import Sequence
from typing import Any

from fixtures import make_questions

from oat.ledger.ledger import Ledger
from oat.oracles.base import Oracle
from oat.oracles.callables import CallableOracle
from oat.types import Answer, Group, Kind, Question


class Clock:
    """A clock whose time passes only while something waits for it."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return 1e9 + self.now


class Post(Oracle):
    """An oracle of comparisons with chosen delays in seconds, one per prompt. The newest answers come first.
    A delay of None means that the answer never comes.

    Attributes:
        asked: occurrences of the prompts in the order of submission, over all restarts that share the list.
    """

    answers: Kind = "compare"

    def __init__(
        self, clock: Clock, delays: dict[int, float | None], *, p: float = 0.8, durable: bool = False
    ):
        self.clock = clock
        self.delays = delays
        self.p = p
        self.durable = durable
        self.asked: list[int] = []
        self.open: dict[str, tuple[Question, float]] = {}

    def submit(self, questions: Sequence[Question]) -> list[str]:
        tickets = []
        for question in questions:
            delay = self.delays.get(question.key.occurrence, 0.0)
            tickets.append(f"letter {len(self.asked)}")
            self.asked.append(question.key.occurrence)
            self.open[tickets[-1]] = (question, math.inf if delay is None else self.clock.now + delay)
        return tickets

    def collect(self, tickets: Sequence[str], seconds: float) -> list[tuple[str, Answer]]:
        open = {ticket: self.open[ticket] for ticket in tickets if ticket in self.open}
        first = min((arrival for _, arrival in open.values()), default=math.inf)
        self.clock.now += min(seconds, max(0.0, first - self.clock.now))
        arrived = [ticket for ticket, (_, arrival) in open.items() if arrival <= self.clock.now]
        return [
            (ticket, Answer(self.open.pop(ticket)[0].key, (self.p,), ("ok",), 1, by="post"))
            for ticket in reversed(arrived)
        ]


def ask(
    ledger: Ledger,
    step: int,
    *groups: Group,
    round: int = 0,
    kind: Kind = "compare",
    oracle: str = "o",
    purpose: str = "train",
) -> None:
    ledger.ask(
        step,
        round,
        groups,
        make_questions(list(groups), kind, step, round, oracle=oracle, purpose=purpose),
        purpose,
    )


def occurrences(feedback: Any) -> list[int]:
    return [item.question.key.occurrence for item in feedback.items]


def length(prompts: Sequence[str], completions: Sequence[str], **columns: Any) -> list[float]:
    return [float(len(text)) for text in completions]


def rewards() -> Oracle:
    return CallableOracle(length, "length")
