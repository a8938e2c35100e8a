"""Questions about samples, their prices, and their answers."""

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from oat.types.conversation import Message
from oat.types.sampling import Group

Kind = Literal["compare", "score"]
Mark = Literal["ok", "tie", "abstain", "failed", "unpaid"]

UNASKED = "none"
"""The oracle of questions that are not asked; they cost nothing and have no winner."""
ENSEMBLE = "ensemble"
"""The oracle of questions that the ensemble answers itself; it never learns from them."""


@dataclass(frozen=True, order=True)
class Key:
    """The address of a question in a run's ledger. A group of training has one question, so (purpose, step,
    round, occurrence) tells them apart; `index` numbers the questions about one prompt of an evaluation."""

    purpose: str
    step: int
    round: int
    occurrence: int
    index: int = 0

    def __str__(self) -> str:
        return f"{self.purpose}/{self.step}/{self.round}/{self.occurrence}/{self.index}"


@dataclass(frozen=True)
class Question:
    """One question about one group.

    A question of the kind `compare` has two candidates, and its answer is the probability that the first
    wins; one of the kind `score` has any number of candidates, and a value for each.

    Attributes:
        candidates: the texts asked about.
        picks: for each candidate, its place among the group's trajectories.
        oracle: the address; empty until the collector fills it, "none" for a question that is not asked and
        has no winner.
        known: one value a candidate that is known beforehand, for the oracles that ask nobody; empty without.
        features: (candidates, D) float32, one row a candidate, for the ensemble's learning.
        is_chat: as in `Prompt`.
        ids: for each candidate the ids that follow its prompt, (T,) int32; empty in a question that comes
        back from the ledger.
    """

    key: Key
    kind: Kind
    messages: tuple[Message, ...]
    candidates: tuple[str, ...]
    picks: tuple[int, ...]
    reference: str | None = None
    columns: dict[str, Any] = field(default_factory=dict)
    oracle: str = ""
    known: tuple[float, ...] = ()
    features: np.ndarray | None = field(default=None, compare=False)
    is_chat: bool = False
    ids: tuple[np.ndarray, ...] = field(default=(), compare=False)

    @property
    def size(self) -> int:
        """The number of values of its answer."""
        return 1 if self.kind == "compare" else len(self.candidates)

    @classmethod
    def about(
        cls, group: "Group", key: Key, kind: Kind, picks: tuple[int, ...], oracle: str = ""
    ) -> "Question":
        """The question about some of a group's samples."""
        prompt, asked = group.prompt, [group.trajectories[pick] for pick in picks]
        known = tuple(trajectory.reward for trajectory in asked if trajectory.reward is not None)
        content = (
            prompt.messages,
            tuple(t.text for t in asked),
            picks,
            prompt.reference,
            dict(prompt.columns),
            oracle,
            known,
        )
        return cls(key, kind, *content, is_chat=prompt.is_chat, ids=tuple(t.completion for t in asked))


@dataclass(frozen=True)
class Price:
    """What answers cost: queries (one a scored candidate, one a compared pair), tokens, and money in the
    oracle's own currency."""

    queries: int = 0
    tokens: int = 0
    cost: float = 0.0

    def __add__(self, other: "Price") -> "Price":
        return Price(self.queries + other.queries, self.tokens + other.tokens, self.cost + other.cost)


@dataclass(frozen=True)
class Spent:
    """What a run had spent when a step had taken its answers.

    Attributes:
        price: of the answers that were taken, and the most that open questions may still cost.
        refused: the price of the cheapest question, taken by that step or still waiting, that the budget did
        not allow; None when all were paid.
        open: questions that are paid for and that no step has taken.
    """

    price: Price = field(default_factory=Price)
    refused: Price | None = None
    open: int = 0


@dataclass(frozen=True)
class Answer:
    """The answer to one question.

    Attributes:
        values: one probability (compare), or one score a candidate (score); a value whose mark is not "ok" is
            not used.
        marks: one a value. "tie" has no winner; "abstain" and "failed" have no value. "unpaid", which no
            oracle says, was never asked, because the budget was spent.
        queries: priced items: one a scored candidate, one a compared pair.
        cost: money, in the oracle's own currency.
        by: the oracle that answered.
        seconds: from submission to answer.
        scores: of the two candidates of a comparison that was made of scores, None for one without; empty
            otherwise.
    """

    key: Key
    values: tuple[float, ...]
    marks: tuple[Mark, ...]
    queries: int
    cost: float = 0.0
    by: str = ""
    seconds: float = 0.0
    tokens: int = 0
    scores: tuple[float | None, ...] = ()


@dataclass(frozen=True, eq=False)
class Item:
    """A question whose answer is final, with the group it is about.

    Attributes:
        label: compare: which candidate won, 0 or 1, drawn once by the ledger; None when there is no winner.
        score: always None.
    """

    group: Group
    question: Question
    answer: Answer
    label: int | None


@dataclass(frozen=True, eq=False)
class Feedback:
    """The answered questions that a step learns from, in the order in which the ledger recorded them.

    Attributes:
        step: the step that takes them; also the version of the policy's weights before this step's update.
        queries: priced items of the answers that this step and all before it took.
        expired: answers that came too late for this step to learn from.
        older: items of earlier steps that this one learns from again (the replay buffer), oldest first;
            metrics are of `items` alone.
        cost: of the same answers as `queries`, in the oracle's own currency.
    """

    step: int
    items: tuple[Item, ...]
    queries: int
    expired: int = 0
    older: tuple[Item, ...] = ()
    cost: float = 0.0

    @property
    def learned(self) -> tuple[Item, ...]:
        return (*self.older, *self.items)
