"""Checks the prices of questions against budgets.

When a question is recorded, it is paid or refused. It is paid if the sum of three prices fits the budget of
its purpose:

* the question's own highest price,
* the price of all answers that steps have taken,
* the highest price of every question that no step has taken.

A question that costs nothing is always paid. If questions are asked in waves (`BudgetedBatches`), each is
paid or refused later, when its wave is formed.

Before a step of training, the ledger also decides whether training can buy anything more. This depends only
on what earlier steps took and asked. The times at which answers came do not matter, so a continued run ends
at the same step as the unbroken one.

Waves: questions that are sent together, if tokens or money limit training.

The highest price of a question is often a hundred times the real price of its answer. The real price comes
only with the answer. So the questions of a round are asked in waves:

* A wave starts at the first question of the round that is in no wave yet. The following questions join it, in
  recorded order, as long as the budget that earlier answers left can pay all their highest prices. The wave
  is recorded before any of it is sent.
* The next wave is formed only after every question of the previous wave is settled: its answer is recorded,
  or it has failed at its deadline. A round's first wave also waits for all waves of earlier rounds.
* If the first question does not fit, it is unpaid and is never asked, because the budget left can only become
  smaller. If a later question was to get a value from an unpaid question, the later question asks for this
  value itself.

So the recorded answers and the order of the questions decide which questions are paid. The times of the
answers do not matter, and a kill changes nothing. Evaluations are not asked in waves, because an evaluation
begins only if its highest price fits.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from oat.errors import warn
from oat.ledger.cache import Asks, Cache
from oat.ledger.intents import Awaited, Intent, Quote, ValueAddress, rest
from oat.ledger.open_questions import CacheKey, OpenQuestion, OpenQuestions, Stage
from oat.ledger.outstanding import unanswered
from oat.ledger.store import Store
from oat.oracles.base import Oracle
from oat.types import UNASKED, Key, Price, Question, Spent
from oat.types.questions import Budget


class Wave(NamedTuple):
    """What `BudgetedBatches.next` formed.

    Attributes:
        rows: the questions of the wave; empty if none was formed.
        refusals: questions before them that the budget does not allow, each with its highest price and the
            spending before it.
    """

    rows: list[OpenQuestion]
    refusals: list[tuple[Question, Price, Price]]


class BudgetedBatches:
    """The waves of one ledger. The caller holds the store's lock.

    Args:
        open_questions: the open questions. `HELD` are those that are in no wave yet.
        budgets: the budgets, by purpose.
        price: a function that returns the highest price of a question.

    Attributes:
        limited: the purposes that are asked in waves because of a limit in tokens or money.
    """

    def __init__(
        self,
        store: Store,
        open_questions: OpenQuestions,
        budgets: Mapping[str, Budget],
        price: Callable[[Question], Price],
    ):
        self.store = store
        self.open = open_questions
        self.budgets = budgets
        self.price = price
        self.limited = {
            purpose for purpose, budget in budgets.items() if purpose == "train" and budget.is_known_late
        }
        self._ends: dict[str, int] = dict(store.rows("SELECT purpose, MAX(last) FROM waves GROUP BY purpose"))

    def begin(self) -> None:
        """For each limited purpose that has no wave, record a first wave without a price. All questions that
        the purpose has asked so far belong to it. In a new run it is empty. The caller holds the
        transaction."""
        for purpose in self.limited - self._ends.keys():
            (last,) = self.store.db.execute(
                "SELECT COALESCE(MAX(id), 0) FROM questions WHERE purpose = ?", (purpose,)
            ).fetchone()
            self._record(purpose, 0, last, None)

    def covers(self, purpose: str) -> bool:
        """Return True if questions of a purpose are asked in waves.

        This stays True if a continued run no longer has a limit in tokens or money. Then all questions that
        are in no wave yet form one wave.
        """
        return purpose in self._ends

    def is_held(self, intent: Intent) -> bool:
        """Return True if this unanswered question must wait for a later wave."""
        purpose = intent.question.key.purpose
        return self.covers(purpose) and intent.id > self._ends[purpose]

    def is_ready(self, purpose: str) -> bool:
        """Return True if a purpose has questions that are in no wave yet, and its next wave can be formed:
        all earlier waves are settled, or the purpose has no limit in tokens or money."""
        if not self.open.has(purpose, Stage.HELD):
            return False
        sql = "SELECT EXISTS (SELECT 1 FROM waiting WHERE purpose = ? AND answered = 0 AND question <= ?)"
        return (
            purpose not in self.limited
            or not self.store.db.execute(sql, (purpose, self._ends[purpose])).fetchone()[0]
        )

    def next(self, purpose: str) -> Wave:
        """Form and record the next wave of a purpose. If the previous wave is not settled, do nothing.

        Held questions are those that are in no wave yet. The wave begins with the first of them that fits
        the budget. Those before it are recorded as unpaid. The caller holds the transaction.

        Returns:
            The questions of the wave, with what is asked (`as_asked`). A question has nothing to send if
            other questions or earlier answers bring all of its values.
        """
        wave, refusals = list[OpenQuestion](), list[tuple[Question, Price, Price]]()
        if not self.is_ready(purpose):
            return Wave(wave, refusals)
        is_limited = purpose in self.limited
        budget = self.budgets[purpose] if is_limited else Budget()
        spent = self._spent(purpose) if is_limited else None
        most = spent or Price()
        for row in self.open.of(purpose, Stage.HELD):
            intent = self.as_asked(row.intent)
            price = Price() if spent is None else self.price_of(intent)
            is_next_round = spent is not None and wave and _round_of(intent) != _round_of(wave[0].intent)
            is_within = price == Price() or budget.allows(most + price)
            if is_next_round or (wave and not is_within):
                break
            if is_within:
                row.asked = intent
                wave.append(row)
                most += price
            else:
                self.store.add_answers([(intent.id, unanswered(intent, "unpaid"), None)])
                self.open.move(row, Stage.ANSWERED)
                refusals.append((intent.question, price, most))
        if wave:
            self._record(purpose, wave[0].id, wave[-1].id, spent)
        for row in wave:
            self.open.move(row, Stage.DUE if row.asked.is_sent else Stage.AWAITING)
        return Wave(wave, refusals)

    def as_asked(self, intent: Intent, is_unpaid: Callable[[Key], bool] | None = None) -> Intent:
        """Return a question as it is asked: each value that it awaits from an unpaid question becomes a
        value to ask for.

        Args:
            is_unpaid: a function that returns True for the key of an unpaid question; None: use the ledger's
                record.
        """
        gone = {key for key in intent.others if (is_unpaid or self._was_unpaid)(key)}
        if not gone:
            return intent
        values = [
            None
            if isinstance(value, Awaited) and any(address.key in gone for address in value.brought_by)
            else value
            for value in intent.cached
        ]
        return replace(intent, cached=tuple(values))

    def price_of(self, intent: Intent) -> Price:
        """Return the highest price of the part of a question that is sent to an oracle; 0 if nothing is
        sent."""
        is_asked = intent.is_sent and intent.question.oracle != UNASKED
        return self.price(intent.rest) if is_asked else Price()

    def projected(
        self, purpose: str, step: int, refused: Price | None, intent: Callable[[int], Intent]
    ) -> Spent:
        """Return the spending before a step that has no take yet, for a purpose that is asked in waves. The
        result depends only on what earlier steps took and asked.

        The spending is the price of all taken answers, plus the highest prices of the questions that earlier
        steps asked and that still wait. A waiting question counts as refused, and adds nothing, if its
        highest price and the price of all taken answers together exceed the budget. If the spending exceeds a
        limit of the budget, it is lowered to this limit.

        Args:
            refused: the price of the cheapest question that the previous step could not pay; None if it could
                pay all.
            intent: a function that returns a waiting question by its id.
        """
        budget = self.budgets[purpose]
        taken = self.store.taken_so_far(purpose)
        sql = "SELECT question FROM waiting WHERE purpose = ? AND step < ? ORDER BY question"
        intents = {id: intent(id) for (id,) in self.store.db.execute(sql, (purpose, step)).fetchall()}
        keys = {each.question.key for each in intents.values()}
        unpaid_keys = set[Key]()
        prices = [taken]
        refusals = [] if refused is None else [refused]
        for id, each in intents.items():
            asked = self.as_asked(
                each, lambda key: key in unpaid_keys or (key not in keys and self._was_unpaid(key))
            )
            price = self._known_price(id, each) if asked is each else self.price_of(asked)
            if price != Price() and not budget.allows(taken + price):
                unpaid_keys.add(asked.question.key)
                refusals.append(price)
            else:
                prices.append(price)
        return Spent(
            budget.within(total(*prices)),
            min(refusals, key=in_order, default=None),
            len(intents) - len(unpaid_keys),
        )

    def _known_price(self, id: int, intent: Intent) -> Price:
        row = self.open.rows[id]
        if row.price is None:
            row.price = self.price_of(intent)
        return row.price

    def _was_unpaid(self, key: Key) -> bool:
        return any(value.mark == "unpaid" for value in self.store.values(key) or ())

    def _spent(self, purpose: str) -> Price:
        """Return the price of a purpose's answers so far. All waves must be settled.

        A wave may be recorded with the price of all answers before it. So this price is read from the newest
        wave that has one, and the prices of the answers from that wave on are added."""
        wave = (
            "SELECT first, queries, tokens, cost FROM waves WHERE purpose = ? AND cost IS NOT NULL "
            "ORDER BY number DESC LIMIT 1"
        )
        first, *before = self.store.db.execute(wave, (purpose,)).fetchone() or (0, 0, 0, 0.0)
        since = (
            "SELECT a.queries, a.tokens, a.cost FROM questions q JOIN answers a ON a.question = q.id "
            "WHERE q.id >= ? AND q.purpose = ? ORDER BY q.id"
        )
        rows = self.store.db.execute(since, (first, purpose))
        return total(Price(*before), *(Price(*row) for row in rows))

    def _record(self, purpose: str, first: int, last: int, spent: Price | None) -> None:
        count = "SELECT COUNT(*) FROM waves WHERE purpose = ?"
        (number,) = self.store.db.execute(count, (purpose,)).fetchone()
        took = (None, None, None) if spent is None else (spent.queries, spent.tokens, spent.cost)
        self.store.db.execute(
            "INSERT INTO waves VALUES (?, ?, ?, ?, ?, ?, ?)", (purpose, number, first, last, *took)
        )
        self._ends[purpose] = last


def total(*prices: Price) -> Price:
    """Return the sum of prices. Money is rounded once, so the order of the prices does not matter."""
    return Price(
        sum(p.queries for p in prices), sum(p.tokens for p in prices), math.fsum(p.cost for p in prices)
    )


def in_order(price: Price) -> tuple[int, int, float]:
    """Return the sort key of a price: queries, then tokens, then money."""
    return price.queries, price.tokens, price.cost


def _round_of(intent: Intent) -> tuple[int, int]:
    return intent.question.key.step, intent.question.key.round


class Terms(NamedTuple):
    """The terms on which a question is recorded.

    Attributes:
        is_paid: True if the budget allows the question. A question that waits for a wave is checked later.
        asks: the queries that it asks; empty if it is not paid.
    """

    quote: Quote
    is_paid: bool
    asks: Asks


class Spending:
    """Prices questions, and checks the prices against the budgets of their purposes.

    Args:
        oracle: a function that returns the oracle at an address.
        intent: a function that returns a waiting question by its id.
    """

    def __init__(
        self,
        store: Store,
        waves: BudgetedBatches,
        oracle: Callable[[str], Oracle],
        cache: Cache,
        intent: Callable[[int], Intent],
    ):
        self.store = store
        self.waves = waves
        self.budgets = waves.budgets
        self._oracle = oracle
        self._cache = cache
        self._intent = intent
        self._warned = set[str]()

    def terms(self, purpose: str, questions: Sequence[Question]) -> list[Terms]:
        """Return the terms of these questions, which the ledger is about to record."""
        budget = Budget() if purpose in self.waves.limited else self.budgets.get(purpose, Budget())
        found = []
        committed = self.store.committed(purpose)
        asking = _Asking(self.waves.open)
        for question in questions:
            quote, asks = self._quote(question, asking)
            is_paid = (
                not budget.is_limited or quote.price == Price() or budget.allows(committed + quote.price)
            )
            if is_paid:
                asking.add(asks)
                committed += quote.price
                found.append(Terms(quote, True, asks))
            else:
                self.say_unpaid(question, quote.price, committed)
                found.append(Terms(Quote(quote.cached), False, []))
        return found

    def price(self, questions: Sequence[Question]) -> Price:
        """Return the sum of the highest prices of these questions if they were asked now. Values that are
        known or awaited cost nothing."""
        asking = _Asking(self.waves.open)
        price = Price()
        for question in questions:
            quote, asks = self._quote(question, asking)
            asking.add(asks)
            price += quote.price
        return price

    def refused(self, intents: Iterable[Intent]) -> Price | None:
        """Return the price of the cheapest of some unpaid questions; None if there are none."""
        return min(map(self._price_of, intents), key=in_order, default=None)

    def is_spent(self, step: int, *, ahead: bool = False) -> bool:
        """Return True if, before this step, the budget of training pays for no further question. Only what
        earlier steps took and asked counts.

        Args:
            ahead: True if the question would be asked ahead, for a later step. If training asks in waves,
                waiting questions count only if this is True, each at its highest price.
        """
        spent = self.spent_before(step)
        if "train" in self.waves.limited and not self.store.has_take("train", step):
            if ahead and self.store.has_take("train", step - 1):
                spent = self._outlook(step, "train")
            elif not ahead and spent != Spent():
                spent = replace(spent, price=self.store.taken_so_far("train"))
        return self.budgets.get("train", Budget()).used_up(spent) is not None

    def spent_before(self, step: int, purpose: str = "train") -> Spent:
        """Return the spending right after step `step - 1` took its answers. Answers that came later do not
        count.

        Return an empty `Spent` in two cases: no take of step `step - 1` is recorded, or questions of step
        `step` itself have already been asked or taken.
        """
        if (
            not self.store.has_take(purpose, step - 1)
            or self.store.has_round(purpose, step, 0)
            or self.store.has_take(purpose, step)
        ):
            return Spent()
        if purpose in self.waves.limited:
            return self._outlook(step, purpose)
        unpaid = [self._price_of(self._intent(id)) for id in self.store.unpaid_ids(purpose)]
        prices = [*filter(None, [self.store.take_refused(purpose, step - 1)]), *unpaid]
        return Spent(
            self.store.committed(purpose),
            min(prices, key=in_order, default=None),
            self.store.num_open(purpose),
        )

    def say_unpaid(self, question: Question, price: Price, spent: Price) -> None:
        """Warn of an unpaid question. Only the first such question of a purpose gives a warning.

        Args:
            price: the question's highest price.
            spent: the spending before the question.
        """
        purpose = question.key.purpose
        if purpose not in self._warned:
            self._warned.add(purpose)
            beside = self.budgets[purpose].beside(
                spent, price, "stop" if purpose == "train" else "evaluation"
            )
            step = question.key.step
            where = f"step {step + 1}" if purpose == "train" else f"the evaluation after {step} steps"
            warn(
                f"{where}: a question is not asked, since it may take {beside}. Nothing is learned from "
                "it; such questions are counted (answers/unpaid_frac)"
            )

    def _outlook(self, step: int, purpose: str) -> Spent:
        return self.waves.projected(purpose, step, self.store.take_refused(purpose, step - 1), self._intent)

    def _quote(self, question: Question, asking: "_Asking") -> tuple[Quote, Asks]:
        """Return the quote of a question, and the queries that the question would send, as `Cache.find`
        returns them."""
        if question.oracle == UNASKED:
            return Quote(), []
        oracle = self._oracle(question.oracle)
        cached, own = self._cache.find(question, asking)
        price = oracle.price(rest(question, cached)) if None in cached else Price()
        return Quote(cached if any(cached) else (), price), own

    def _price_of(self, intent: Intent) -> Price:
        return self.waves.price_of(self.waves.as_asked(intent))


class _Asking:
    """The queries that open questions ask, and those of questions that are about to be recorded."""

    def __init__(self, open_questions: OpenQuestions):
        self._open = open_questions
        self._new: dict[CacheKey, list[ValueAddress]] = {}

    def add(self, asks: Asks) -> None:
        for key, address in asks:
            self._new.setdefault(key, []).append(address)

    def __call__(self, key: CacheKey) -> tuple[ValueAddress, ...]:
        return (*self._open.asking(key), *self._new.get(key, ()))
