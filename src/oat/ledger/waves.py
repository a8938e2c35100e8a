"""Waves: which questions are asked together where tokens or money limit what training may spend.

What an answer takes is known when it is there, and the most that it may take is often a hundred times as
much. So the questions of a round are asked in waves. A wave is the longest run of them, in recorded order,
whose most fits beside what all answers before took. It is on record before anything of it is sent, and the
next one is formed when every question of it has an answer on record, or has failed at its deadline; the first
one of a round, when all waves of the rounds before are settled. So what is granted follows from recorded
answers, in the order of their questions, and never from when they came: a run that is killed between waves,
or inside one, grants the same.

A question that does not fit when everything before it is settled is not paid, for good, since what is spent
never becomes less. Who awaits its values, because of an equal text, asks for them itself.

The other purposes, and a limit in queries alone, need no waves: an evaluation begins only when all of it
fits, and an answer takes the queries that it may.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from oat.ledger.intents import Awaited, Intent, rest, whole
from oat.ledger.store import Store
from oat.oracles.contract import nothing
from oat.types import UNASKED, Answer, Key, Price, Question, Spent
from oat.types.budget import Budget


class Waves:
    """The waves of one ledger.

    Args:
        budgets: by purpose.
        price: the most that a question can cost.

    Attributes:
        limited: the purposes whose questions are asked in waves.
        held: by purpose the questions that are in no wave yet, in recorded order.
        refusals: questions that were not paid since somebody looked, each with its price and what was spent
        then.
    """

    def __init__(self, store: Store, budgets: Mapping[str, Budget], price: Callable[[Question], Price]):
        self.store = store
        self.budgets = budgets
        self.price = price
        self.limited = {
            purpose for purpose, budget in budgets.items() if purpose == "train" and budget.is_known_late
        }
        self.held: dict[str, list[Intent]] = {}
        self.refusals: list[tuple[Intent, Price, Price]] = []
        self._prices: dict[int, Price] = {}
        self._ends: dict[str, int] = dict(
            store.db.execute("SELECT purpose, MAX(last) FROM waves GROUP BY purpose")
        )

    def begin(self) -> None:
        """Whatever was asked before the first wave of a purpose was granted by other rules; the caller holds
        the transaction."""
        for purpose in self.limited - self._ends.keys():
            (last,) = self.store.db.execute(
                "SELECT COALESCE(MAX(id), 0) FROM questions WHERE purpose = ?", (purpose,)
            ).fetchone()
            self._record(purpose, 0, last, None)

    def covers(self, purpose: str) -> bool:
        """Whether its questions are in waves; those of a run that lost its limit are in one at once."""
        return purpose in self._ends

    def is_held(self, row: Intent) -> bool:
        """Whether an unanswered question is in no wave yet."""
        purpose = row.question.key.purpose
        return self.covers(purpose) and row.id > self._ends[purpose]

    def hold(self, rows: Iterable[Intent]) -> None:
        """Take up questions without an answer, in recorded order."""
        for row in rows:
            self.held.setdefault(row.question.key.purpose, []).append(row)

    def is_ready(self, purpose: str) -> bool:
        """Whether the next wave can be formed."""
        if not self.held.get(purpose):
            return False
        sql = "SELECT EXISTS (SELECT 1 FROM waiting WHERE purpose = ? AND answered = 0 AND question <= ?)"
        return (
            purpose not in self.limited
            or not self.store.db.execute(sql, (purpose, self._ends[purpose])).fetchone()[0]
        )

    def next(self, purpose: str) -> list[Intent]:
        """Record the next wave, if it can be formed, and what cannot be paid before it; the caller holds the
        transaction.

        Returns:
            Its questions as they are to be asked; some only await what others bring.
        """
        wave: list[Intent] = []
        if not self.is_ready(purpose):
            return wave
        budget, spent = (
            (self.budgets[purpose], self._spent(purpose)) if purpose in self.limited else (Budget(), None)
        )
        most = spent or Price()
        for held in self.held[purpose]:
            row = self.as_asked(held)
            price = Price() if spent is None else self.price_of(row)
            is_next_round = spent is not None and wave and _round_of(row) != _round_of(wave[0])
            is_within = price == Price() or budget.allows(most + price)
            if is_next_round or (wave and not is_within):
                break
            if is_within:
                wave.append(row)
                most += price
            else:
                self.store.add_answers([(row.id, unpaid(row), None)])
                self.refusals.append((row, price, most))
        if wave:
            self._record(purpose, wave[0].id, wave[-1].id, spent)
        end = wave[-1].id if wave else self.held[purpose][-1].id
        self.held[purpose] = [row for row in self.held[purpose] if row.id > end]
        return wave

    def forget(self, purpose: str) -> None:
        """Nobody waits for its questions any more."""
        self.held.pop(purpose, None)

    def as_asked(self, row: Intent, is_unpaid: Callable[[Key], bool] | None = None) -> Intent:
        """A question as it is asked: what it would await of one that was not paid it asks for itself.

        Args:
            is_unpaid: of another question; by default as it is on record.
        """
        gone = {key for key in row.others if (is_unpaid or self._was_unpaid)(key)}
        if not gone:
            return row
        values = [
            None
            if isinstance(value, Awaited) and any(source.key in gone for source in value.sources)
            else value
            for value in row.cached
        ]
        return replace(row, cached=tuple(values))

    def price_of(self, row: Intent) -> Price:
        """The most that what is asked of a question can cost."""
        is_asked = row.is_sent and row.question.oracle != UNASKED
        return self.price(rest(row.question, row.cached)) if is_asked else Price()

    def outlook(self, purpose: str, step: int, refused: Price | None, row: Callable[[int], Intent]) -> Spent:
        """What is spent before a step that has taken nothing. It follows from the takes and the rounds of the
        steps before it, whatever has been answered or asked since: of what waits, what can never be paid
        beside what was taken is refused, and the first of the rest will be paid.

        Args:
            refused: the cheapest price that the step before could not pay.
            row: a question by its number.
        """
        budget, taken = self.budgets[purpose], self.store.taken_so_far(purpose)
        sql = "SELECT question FROM waiting WHERE purpose = ? AND step < ? ORDER BY question"
        rows = {id: row(id) for (id,) in self.store.db.execute(sql, (purpose, step)).fetchall()}
        self._prices = {
            id: self._prices[id] if id in self._prices else self.price_of(each) for id, each in rows.items()
        }
        keys, unpaid_keys = {each.question.key for each in rows.values()}, set[Key]()
        prices, refusals = [taken], [] if refused is None else [refused]
        for id, each in rows.items():
            asked = self.as_asked(
                each, lambda key: key in unpaid_keys or (key not in keys and self._was_unpaid(key))
            )
            price = self._prices[id] if asked is each else self.price_of(asked)
            if price != Price() and not budget.allows(taken + price):
                unpaid_keys.add(asked.question.key)
                refusals.append(price)
            else:
                prices.append(price)
        return Spent(
            budget.within(total(*prices)),
            min(refusals, key=in_order, default=None),
            len(rows) - len(unpaid_keys),
        )

    def _was_unpaid(self, key: Key) -> bool:
        return any(value.mark == "unpaid" for value in self.store.values(key) or ())

    def _spent(self, purpose: str) -> Price:
        """What all answers took, everything being settled: what was spent before the last wave that has it,
        and the answers since in their order."""
        sql = (
            "SELECT first, queries, tokens, cost FROM waves WHERE purpose = ? AND cost IS NOT NULL ORDER "
            "BY number DESC LIMIT 1"
        )
        first, *before = self.store.db.execute(sql, (purpose,)).fetchone() or (0, 0, 0, 0.0)
        sql = (
            "SELECT a.queries, a.tokens, a.cost FROM questions q JOIN answers a ON a.question = q.id "
            "WHERE q.id >= ? AND q.purpose = ? ORDER BY q.id"
        )
        return total(Price(*before), *(Price(*took) for took in self.store.db.execute(sql, (first, purpose))))

    def _record(self, purpose: str, first: int, last: int, spent: Price | None) -> None:
        number = self.store.db.execute("SELECT COUNT(*) FROM waves WHERE purpose = ?", (purpose,)).fetchone()[
            0
        ]
        took = (None, None, None) if spent is None else (spent.queries, spent.tokens, spent.cost)
        self.store.db.execute(
            "INSERT INTO waves VALUES (?, ?, ?, ?, ?, ?, ?)", (purpose, number, first, last, *took)
        )
        self._ends[purpose] = last


def total(*prices: Price) -> Price:
    """The sum; of money rounded once, so that the order does not matter."""
    return Price(
        sum(p.queries for p in prices), sum(p.tokens for p in prices), math.fsum(p.cost for p in prices)
    )


def in_order(price: Price) -> tuple[int, int, float]:
    """What prices are compared by."""
    return price.queries, price.tokens, price.cost


def unpaid(row: Intent) -> Answer:
    """The answer of a question that is not asked, since it cannot be paid; what is known of it stays."""
    return whole(
        row, nothing(rest(row.question, row.cached), "unpaid", row.question.oracle), missing="unpaid"
    )


def _round_of(row: Intent) -> tuple[int, int]:
    return row.question.key.step, row.question.key.round
