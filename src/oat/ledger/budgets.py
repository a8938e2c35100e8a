"""Checks the prices of questions against budgets: what questions cost, which of them are paid, what is left.

A question is paid or refused when it is recorded. It is paid if three prices together fit the budget of its
purpose: its own highest price, the price of all answers taken so far, and the highest price of every question
that waits. A question that costs nothing is always paid. If a question is asked in a wave
(`ledger/waves.py`), it is paid or refused later, when its wave is formed.

Whether training can buy anything more depends on what the steps before took and asked, not on answers that
have come since. So a continued run ends at the same step as the unbroken one, and asks the same questions.
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
        oracle: returns the oracle at an address.
        intent: returns a waiting question by its id.
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
        """Return the terms on which questions are recorded.

        Returns:
            Two lists with an entry for each question: its quote, and True if the budget allows it. Questions
            that are asked in waves are all allowed here, since `Waves.next` decides about them.
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
        """Return the highest price of these questions if they were asked now; known values cost nothing."""
        asking = dict(self._cache.asking)
        price = Price()
        for question in questions:
            quote, own = self._quote(question, asking)
            asking.update(own)
            price += quote.price
        return price

    def refused(self, intents: Iterable[Intent]) -> Price | None:
        """Return the price of the cheapest of these unpaid questions; None if there are none."""
        return min(map(self._price_of, intents), key=in_order, default=None)

    def is_spent(self, step: int, *, ahead: bool = False) -> bool:
        """True if training could buy nothing more at the time when the step before had taken its answers.

        Args:
            ahead: True if the questions would be asked ahead of this step. Then waiting questions count at
                their highest price even if they are asked in waves, since they may take all that is left.
        """
        spent = self.spent_before(step)
        if "train" in self.waves.limited and not self.store.has_take("train", step):
            if ahead and self.store.has_take("train", step - 1):
                spent = self._outlook(step, "train")
            elif not ahead and spent != Spent():
                spent = replace(spent, price=self.store.taken_so_far("train"))
        return self.budgets.get("train", Budget()).used_up(spent) is not None

    def spent_before(self, step: int, purpose: str = "train") -> Spent:
        """Return the spending at the time when the step before had taken its answers. Return an empty `Spent`
        if that step has no record, or if this step has already asked or taken questions, since the run then
        went on.

        Answers that have come since change nothing here, so a continued run ends where the unbroken one does.
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
        """Warn of the first question of a purpose that is not paid; later ones are only counted."""
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
        """Return the quote of a question; and, for each query that the question would ask itself, the
        addresses of all values that would then be asked for under that query's cache key."""
        if question.oracle == UNASKED:
            return Quote(), {}
        oracle = self._oracle(question.oracle)
        cached, own = self._cache.find(question, asking)
        price = oracle.price(rest(question, cached)) if None in cached else Price()
        return Quote(cached if any(cached) else (), price), own

    def _price_of(self, intent: Intent) -> Price:
        return self.waves.price_of(self.waves.as_asked(intent))
