"""The open questions of a ledger: those that are recorded and that no step has taken. This table is the only
place in memory that knows what becomes of one. docs/ledger.md draws its states.

The ledger's database has the same questions in its table `waiting`, and the table here is made of it when a
ledger is opened. What only memory has is the ticket of an oracle that keeps no questions.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum

from oat.ledger.intents import Intent, ValueAddress
from oat.types import Key, Price, Question
from oat.types.questions import Budget

CacheKey = tuple[str, str, str]
"""Purpose, oracle, and a hash of the remaining parts of the key: the columns `purpose`, `oracle` and `item`
of the table `cache`."""
Ticket = tuple[str, str]
"""The address of an oracle, and the ticket that it gave."""


class Stage(Enum):
    """The state of an open question."""

    HELD = "held"
    """It waits for a later wave of the budget."""
    DUE = "due"
    """An oracle is to be asked for values."""
    SENT = "sent"
    """An oracle has it, under a ticket."""
    AWAITING = "awaiting"
    """No oracle is asked any more. Answers to equal questions will bring values."""
    ANSWERED = "answered"
    """Its answer is complete and recorded. It may have failed or be unpaid."""


START, TAKEN = "recorded", "taken"

CHANGES: dict[tuple[Stage | str, Stage | str], str] = {
    (START, Stage.HELD): "the purpose is asked in waves",
    (START, Stage.DUE): "a value is to be asked for",
    (START, Stage.AWAITING): "equal questions bring all values that are unknown",
    (START, Stage.ANSWERED): "all values are known, or it is unpaid, or asked of nobody",
    (Stage.HELD, Stage.DUE): "its wave is recorded",
    (Stage.HELD, Stage.AWAITING): "its wave is recorded, and equal questions bring its values",
    (Stage.HELD, Stage.ANSWERED): "the budget does not allow it",
    (Stage.DUE, Stage.SENT): "the oracle gave a ticket",
    (Stage.DUE, Stage.ANSWERED): "its evaluation failed",
    (Stage.SENT, Stage.ANSWERED): "the answer came, the deadline passed, or its evaluation failed",
    (Stage.SENT, Stage.AWAITING): "the answer came, and equal questions bring the other values",
    (Stage.SENT, Stage.DUE): "the answer broke the contract",
    (Stage.AWAITING, Stage.ANSWERED): "the last value came, or its evaluation failed",
    (Stage.ANSWERED, TAKEN): "a step took it, or an evaluation that failed was closed",
}
"""The changes of a question's state, each with its reason."""

RECOVERED: dict[tuple[Stage, Stage], str] = {
    (Stage.HELD, Stage.HELD): "",
    (Stage.DUE, Stage.DUE): "",
    (Stage.DUE, Stage.SENT): "the kill came when its ticket was just recorded",
    (Stage.SENT, Stage.SENT): "the oracle keeps questions (`durable`)",
    (Stage.SENT, Stage.DUE): "it does not",
    (Stage.AWAITING, Stage.AWAITING): "",
    (
        Stage.AWAITING,
        Stage.DUE,
    ): "its oracle, not asked yet, has changed: answers to others bring no value",
    (Stage.ANSWERED, Stage.ANSWERED): "",
}
"""The changes that a restart makes."""


@dataclass(frozen=True, eq=False)
class Sent:
    """What an oracle was sent.

    Attributes:
        question: the part of the question that was sent.
        since: the time at which it was sent, in seconds on the monotonic clock.
        most: the highest price that its answer may have; no limits if the purpose has no budget.
    """

    ticket: Ticket
    question: Question
    since: float
    most: Budget

    @property
    def oracle(self) -> str:
        return self.ticket[0]


@dataclass(eq=False)
class OpenQuestion:
    """A row of the table.

    Attributes:
        intent: the question as it was recorded.
        asked: the question as it is asked. A value that it was to get from an unpaid question, or from an
            oracle that has changed, is asked for.
        asks: the queries that it asks, each with the address at which its value will arrive. Equal questions
            may await these values.
        lacks: the keys of questions whose answers it still awaits, its own among them until it is answered.
        sent: in the state `SENT`, what was sent.
        price: the highest price of what is asked, once it is known.
    """

    intent: Intent
    asked: Intent
    stage: Stage
    asks: Sequence[tuple[CacheKey, ValueAddress]] = ()
    lacks: Collection[Key] = ()
    sent: Sent | None = None
    price: Price | None = None

    @property
    def id(self) -> int:
        return self.intent.id

    @property
    def purpose(self) -> str:
        return self.intent.question.key.purpose


@dataclass(eq=False)
class OpenQuestions:
    """The table. The store's lock guards it. The private maps are indexes of the rows.

    Attributes:
        rows: the open questions by id, in the order in which they were recorded.
    """

    rows: dict[int, OpenQuestion] = field(default_factory=dict)
    _stages: dict[tuple[str, Stage], dict[int, OpenQuestion]] = field(default_factory=dict)
    _tickets: dict[Ticket, OpenQuestion] = field(default_factory=dict)
    _awaited: dict[Key, dict[int, OpenQuestion]] = field(default_factory=dict)
    _asking: dict[CacheKey, tuple[ValueAddress, ...]] = field(default_factory=dict)

    def add(
        self,
        intent: Intent,
        stage: Stage,
        asks: Sequence[tuple[CacheKey, ValueAddress]] = (),
        *,
        asked: Intent | None = None,
    ) -> OpenQuestion:
        """Add a question that was just recorded, or that was open before a restart."""
        row = OpenQuestion(intent, asked or intent, stage, asks)
        self.rows[row.id] = row
        self._stages.setdefault((row.purpose, stage), {})[row.id] = row
        for key, address in asks:
            self._asking[key] = (*self._asking.get(key, ()), address)
        return row

    def move(self, row: OpenQuestion, stage: Stage, sent: Sent | None = None) -> None:
        """Change the state of a question.

        Args:
            sent: for `SENT`, what was sent.
        """
        assert (row.stage, stage) in CHANGES, f"no question goes from {row.stage} to {stage}"
        self._set(row, stage, sent)

    def fail(self, purpose: str) -> None:
        """Make all questions of a purpose `ANSWERED`. They are recorded as failed."""
        for row in [row for row in self.rows.values() if row.purpose == purpose]:
            self.await_keys(row, ())
            if row.stage is not Stage.ANSWERED:
                self.move(row, Stage.ANSWERED)

    def close(self, id: int) -> Intent:
        """Remove a question that a step takes, and return it."""
        row = self.rows[id]
        assert row.stage is Stage.ANSWERED, f"a question that is {row.stage} was taken"
        del self.rows[id]
        self._leave_stage(row)
        for key, address in row.asks:
            left = tuple(other for other in self._asking[key] if other != address)
            self._asking[key] = left
            if not left:
                del self._asking[key]
        return row.intent

    def await_keys(self, row: OpenQuestion, keys: Collection[Key]) -> None:
        """Set the keys of the questions whose answers a question still awaits."""
        for key in row.lacks:
            rows = self._awaited[key]
            del rows[row.id]
            if not rows:
                del self._awaited[key]
        row.lacks = keys
        for key in keys:
            self._awaited.setdefault(key, {})[row.id] = row

    def awaiting(self, keys: Iterable[Key]) -> list[OpenQuestion]:
        """Return the questions that await an answer to one of these questions."""
        found = {id: row for key in keys for id, row in self._awaited.get(key, {}).items()}
        return [*found.values()]

    def of(self, purpose: str, stage: Stage) -> list[OpenQuestion]:
        """Return the questions of a purpose that are in one state."""
        return [*self._stages.get((purpose, stage), {}).values()]

    def at(self, stage: Stage) -> Iterator[OpenQuestion]:
        """Yield the questions of all purposes that are in one state."""
        for (_, other), rows in self._stages.items():
            if other is stage:
                yield from rows.values()

    def has(self, purpose: str, stage: Stage) -> bool:
        """Return True if a question of a purpose is in this state."""
        return bool(self._stages.get((purpose, stage)))

    def tickets(self, oracle: str) -> set[str]:
        """Return the tickets under which an oracle has questions."""
        return {ticket for owner, ticket in self._tickets if owner == oracle}

    def under(self, ticket: Ticket) -> OpenQuestion | None:
        """Return the question that an oracle has under a ticket; None if it has none that is open."""
        return self._tickets.get(ticket)

    def asking(self, key: CacheKey) -> tuple[ValueAddress, ...]:
        """Return one address for each time that a query is asked, from the oldest question to the newest.
        Each address says where an answer will have a value of the query."""
        return self._asking.get(key, ())

    def _leave_stage(self, row: OpenQuestion) -> None:
        rows = self._stages[row.purpose, row.stage]
        del rows[row.id]
        if not rows:
            del self._stages[row.purpose, row.stage]

    def _set(self, row: OpenQuestion, stage: Stage, sent: Sent | None) -> None:
        self._leave_stage(row)
        if row.sent is not None:
            self._tickets.pop(row.sent.ticket, None)
        row.stage, row.sent = stage, sent
        self._stages.setdefault((row.purpose, stage), {})[row.id] = row
        if sent is not None:
            self._tickets[sent.ticket] = row
