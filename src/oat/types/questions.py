"""Questions about samples, their prices, and their answers.

Budgets: the limits of a run's spending, in queries, tokens and money.

When the ledger asks a question, it reserves the most that the answer can cost. So the limits hold however
many questions are asked at a time. Later the real price replaces the reserved price:
* without a limit in tokens or money, when a step takes the answer;
* with such a limit, as soon as all questions of the wave are answered (`ledger/budgets.py`).

Only the records of the ledger decide if a question can be paid.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from oat.types.sampling import Group, Message

Kind = Literal["compare", "score"]
Mark = Literal["ok", "tie", "abstain", "failed", "unpaid"]
Steps = tuple[tuple[int, float], ...]
"""The rewards of the steps of one response: pairs of a step's end and its reward, with ascending ends. An end
is an exclusive offset: a step with end 5 is complete after the first 5 characters or tokens."""
StepUnit = Literal["characters", "tokens"]
"""What the ends of steps count: characters (of Python's strings) of a candidate's text, or tokens of its ids
(`Question.ids`)."""

UNASKED = "none"
"""Value of `Question.oracle` for a question that is put to no oracle. The question costs nothing and has no
winner."""
ENSEMBLE = "ensemble"
"""Name of the oracle in questions that the ensemble answers. The ensemble never learns from its own
answers."""


@dataclass(frozen=True, order=True)
class Key:
    """The address of a question in a run's ledger. In training each group has at most one question, so
    purpose, step, round and the prompt's occurrence identify the question. In an evaluation, `index` numbers
    the questions about one prompt."""

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

    A question of kind `compare` has two candidates; its answer is the probability that the first one wins. A
    question of kind `score` has any number of candidates; its answer has a value for each of them.

    Attributes:
        candidates: the texts of the responses that the question is about.
        picks: for each candidate, its index in the group's trajectories.
        oracle: address of the oracle; empty until the collector sets it; "none" if the question is put to no
            oracle.
        known: values that the candidates have already, such as recorded scores, one per candidate; empty if
            they have none. Some oracles answer from them. None: a candidate of an episode without a reward.
        features: (candidates, D) float32, from which the ensemble learns; None without an ensemble.
        is_chat: as in `Prompt`.
        ids: for each candidate, the ids after its prompt, (T,) int32; empty in a question that was read from
            the ledger.
        row: `Prompt.row` of the question's prompt, for messages; None if it is not known.
        notes: numbers about the question from the explorer that chose it, by name (`Explorer.choose`). The
            ledger records them.
    """

    key: Key
    kind: Kind
    messages: tuple[Message, ...]
    candidates: tuple[str, ...]
    picks: tuple[int, ...]
    reference: str | None = None
    columns: dict[str, Any] = field(default_factory=dict)
    oracle: str = ""
    known: tuple[float | None, ...] = ()
    features: np.ndarray | None = field(default=None, compare=False)
    is_chat: bool = False
    ids: tuple[np.ndarray, ...] = field(default=(), compare=False)
    row: int | None = field(default=None, compare=False)
    notes: dict[str, float] = field(default_factory=dict, compare=False)

    @property
    def size(self) -> int:
        """Number of values in the question's answer."""
        return 1 if self.kind == "compare" else len(self.candidates)

    @classmethod
    def about(
        cls, group: "Group", key: Key, kind: Kind, picks: tuple[int, ...], oracle: str = ""
    ) -> "Question":
        """Make a question about the trajectories of a group whose indices are `picks`."""
        prompt, asked = group.prompt, [group.trajectories[pick] for pick in picks]
        rewards = tuple(trajectory.reward for trajectory in asked)
        known = rewards if any(reward is not None for reward in rewards) else ()
        content = (
            prompt.messages,
            tuple(t.text for t in asked),
            picks,
            prompt.reference,
            dict(prompt.columns),
            oracle,
            known,
        )
        ids = tuple(t.completion for t in asked)
        return cls(key, kind, *content, is_chat=prompt.is_chat, ids=ids, row=prompt.row)


@dataclass(frozen=True)
class Price:
    """The price of answers: queries (one per scored candidate or compared pair), tokens, and money in the
    oracle's own currency."""

    queries: int = 0
    tokens: int = 0
    cost: float = 0.0

    def __add__(self, other: "Price") -> "Price":
        return Price(self.queries + other.queries, self.tokens + other.tokens, self.cost + other.cost)


@dataclass(frozen=True)
class Spent:
    """The spending of a purpose at the moment when a step has taken its answers.

    Attributes:
        price: the price of all answers taken so far, plus the most that open questions may still cost; at
            most the budget.
        refused: lowest price of the questions that the budget did not allow, among the questions that the
            step took and those that wait for a later step. None if the budget allowed all of them.
        open: number of questions that no step has taken yet and that the budget can still pay.
    """

    price: Price = field(default_factory=Price)
    refused: Price | None = None
    open: int = 0


@dataclass(frozen=True)
class Answer:
    """The answer to one question.

    Attributes:
        values: one probability (compare), or one score per candidate (score). A value whose mark is
            neither "ok" nor "tie" is not used.
        marks: one mark per value. "tie": there is no winner. "abstain", "failed": there is no value.
            "unpaid": the budget did not allow the question, and no oracle was asked.
        queries: number of priced items: one per scored candidate or compared pair.
        cost: money, in the oracle's own currency.
        by: name of the oracle that answered.
        seconds: time from submission to answer.
        tokens: number of tokens that the answer took.
        scores: the scores from which a comparison was made, one per candidate, None for a candidate without a
            score. Empty for any other answer.
        steps: for each candidate, the rewards of the steps of its response. A candidate's entry is empty if
            its response has one number only. The value of any other candidate is the exact sum
            (`math.fsum`) of its steps' rewards. Empty if no candidate has steps, and for a comparison.
        step_unit: what the ends of all `steps` count.
        sources: by source, its own score of each candidate, as the source gave it: without weight and
            without normalisation. None for a candidate without such a score. Empty if the oracle does not
            add up the scores of several sources.
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
    steps: tuple[Steps, ...] = ()
    step_unit: StepUnit = "characters"
    sources: dict[str, tuple[float | None, ...]] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, eq=False)
class Item:
    """A question with its final answer, and the group that it is about.

    Attributes:
        label: index of the candidate that won a comparison, 0 or 1; the ledger sets it once. None for scores,
            and for a comparison without a winner.
    """

    group: Group
    question: Question
    answer: Answer
    label: int | None


IsUsable = Callable[[Item], bool]
"""A function that says whether an answered question teaches the algorithm something
(`Objective.is_usable`)."""


@dataclass(frozen=True, eq=False)
class Feedback:
    """The answered questions that a step learns from, in the order in which the ledger recorded them.

    Attributes:
        step: the step that takes the answers; also the version of the policy's weights before its update.
        items: the questions that this step takes and learns from.
        queries: number of priced items in the answers that this step and all earlier steps took.
        expired: number of answers that came too late for this step to learn from.
        older: items of earlier steps that this step learns from again (the replay buffer), oldest first.
        cost: money that the answers counted in `queries` cost, in the oracle's own currency.
        thrown_away: questions that the step takes but does not learn from (dynamic sampling,
            `sampling.refill_rounds`), in the order in which they were asked. They are unusable, or were asked
            after the last question that the step needed.
        pairs: number of compared pairs for which this step and all earlier steps took paid answers.
    """

    step: int
    items: tuple[Item, ...]
    queries: int
    expired: int = 0
    older: tuple[Item, ...] = ()
    cost: float = 0.0
    thrown_away: tuple[Item, ...] = ()
    pairs: int = 0

    @property
    def learned(self) -> tuple[Item, ...]:
        return (*self.older, *self.items)

    @property
    def asked(self) -> tuple[Item, ...]:
        """All questions that the step takes, also those that were thrown away."""
        return (*self.items, *self.thrown_away)


_SLACK = 1e-9
"""Relative slack of a limit in money. Sums of the same costs in different orders differ by less."""


@dataclass(frozen=True)
class Budget:
    """The limits of one purpose; None means no limit.

    Attributes:
        cost: limit in money, in the oracle's own currency.
    """

    queries: int | None = None
    tokens: int | None = None
    cost: float | None = None

    @classmethod
    def of(cls, price: Price) -> "Budget":
        """Return the budget that allows exactly this price."""
        return cls(price.queries, price.tokens, price.cost)

    def allows(self, price: Price) -> bool:
        """Return True if the limits allow a total spending of `price`."""
        pairs = (
            (price.queries, self.queries),
            (price.tokens, self.tokens),
            (price.cost, None if self.cost is None else self.cost * (1 + _SLACK)),
        )
        return all(limit is None or spent <= limit for spent, limit in pairs)

    def within(self, price: Price) -> Price:
        """Return the price with queries, tokens and money each cut to its limit."""
        queries, tokens = (
            min(most, limit) if limit is not None else most
            for most, limit in ((price.queries, self.queries), (price.tokens, self.tokens))
        )
        return Price(queries, tokens, price.cost if self.cost is None else min(price.cost, self.cost))

    def used_up(self, spent: Spent) -> str | None:
        """Return the reason why nothing can be bought now; None if a question can be bought.

        A later question may be bought if answers turn out cheaper than their reserved price.
        """
        pairs = {
            "queries": (spent.price.queries, self.queries),
            "tokens": (spent.price.tokens, self.tokens),
            "cost": (spent.price.cost, self.cost),
        }
        for name, (used, limit) in pairs.items():
            if limit is not None and used >= (limit * (1 - _SLACK) if name == "cost" else limit):
                return f"{_number(used)} {name} are spent (stop.max_{name} {_number(limit)})"
        if spent.refused is not None and not self.allows(spent.price + spent.refused):
            limits = ", ".join(
                f"{_number(used)} of stop.max_{name} {_number(limit)}"
                for name, (used, limit) in pairs.items()
                if limit is not None
            )
            return f"what is left of the budget pays no further question; spent: {limits}"
        return None

    def beside(self, spent: Price, price: Price, section: str) -> str:
        """Return a text for a message: the limits that a price would exceed if it were added to what is
        spent. For each such limit the text has the price, the amount spent, the limit, and the setting.

        Args:
            section: the section of the configuration that has the limits.
        """
        units = ("queries", "tokens", "cost")
        found = [
            (name, getattr(price, name), getattr(spent, name), limit)
            for name in units
            if (limit := getattr(self, name)) is not None
        ]
        return "; ".join(
            (
                f"{_number(more)} {name}, and {_number(used)} of {_number(limit)} are spent "
                f"({section}.max_{name})"
            )
            for name, more, used, limit in found
            if used + more > limit
        )

    @property
    def is_limited(self) -> bool:
        return self != Budget()

    @property
    def is_known_late(self) -> bool:
        """True if tokens or money are limited. How much of them a question takes is known only from its
        answer."""
        return self.tokens is not None or self.cost is not None


def in_money(cost: float) -> str:
    """Return a cost as text, in the oracle's own currency. A cost between 0 and 1 has at most three
    significant digits; any other cost has two decimals."""
    return f"{cost:,.2f}" if cost == 0 or cost >= 1 else f"{cost:.3g}"


def _number(value: float) -> str:
    """Return a number as text. A float gets ten digits, since the further digits of a sum are rounding
    errors."""
    return f"{value:.10g}" if isinstance(value, float) else str(value)
