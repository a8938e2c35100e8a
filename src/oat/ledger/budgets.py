"""Checks the prices of questions against budgets.

When a question is recorded, it is paid or refused. It is paid if the sum of three prices fits the budget of
its purpose:

* the question's own highest price,
* the price of all answers that steps have taken,
* the highest price of every question that no step has taken.

A question that costs nothing is always paid. If questions are asked in waves (`ledger/waves.py`), each is
paid or refused later, when its wave is formed.

Before a step of training, the ledger also decides whether training can buy anything more. This depends only
on what earlier steps took and asked. The times at which answers came do not matter, so a continued run ends
at the same step as the unbroken one.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from oat.errors import warn
from oat.ledger.cache import Asking, Cache
from oat.ledger.intents import Intent, Quote, rest
from oat.ledger.store import Store
from oat.ledger.waves import Waves, in_order
from oat.oracles.base import Oracle
from oat.types import UNASKED, Price, Question, Spent
from oat.types.budget import Budget


class Spending:
    """Prices questions, and checks the prices against the budgets of their purposes.

    Args:
        oracle: a function that returns the oracle at an address.
        intent: a function that returns a waiting question by its id.
    """

    def __init__(
        self,
        store: Store,
        waves: Waves,
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

    def quotes(self, purpose: str, questions: Sequence[Question]) -> tuple[list[Quote], list[bool]]:
        """Quote these questions, which the ledger is about to record, and check their prices.

        Returns:
            Two lists with an entry for each question: its quote, and True if the budget allows the question.
            If the purpose is asked in waves, the second list is all True, and `Waves.next` checks the budget
            later.
        """
        budget = Budget() if purpose in self.waves.limited else self.budgets.get(purpose, Budget())
        quotes = []
        paid = []
        committed = self.store.committed(purpose)
        asking = self._cache.asking
        for question in questions:
            quote, own = self._quote(question, asking)
            paid.append(
                not budget.is_limited or quote.price == Price() or budget.allows(committed + quote.price)
            )
            if not paid[-1]:
                self.say_unpaid(question, quote.price, committed)
            asking.update(own if paid[-1] else {})
            quotes.append(quote if paid[-1] else Quote(quote.cached))
            committed += quotes[-1].price
        return quotes, paid

    def price(self, questions: Sequence[Question]) -> Price:
        """Return the sum of the highest prices of these questions if they were asked now. Values that are
        known or awaited cost nothing."""
        asking = dict(self._cache.asking)
        price = Price()
        for question in questions:
            quote, own = self._quote(question, asking)
            asking.update(own)
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
        return self.waves.outlook(purpose, step, self.store.take_refused(purpose, step - 1), self._intent)

    def _quote(self, question: Question, asking: Asking) -> tuple[Quote, Asking]:
        """Return the quote of a question, and the queries that the question would send, as `Cache.find`
        returns them."""
        if question.oracle == UNASKED:
            return Quote(), {}
        oracle = self._oracle(question.oracle)
        cached, own = self._cache.find(question, asking)
        price = oracle.price(rest(question, cached)) if None in cached else Price()
        return Quote(cached if any(cached) else (), price), own

    def _price_of(self, intent: Intent) -> Price:
        return self.waves.price_of(self.waves.as_asked(intent))
