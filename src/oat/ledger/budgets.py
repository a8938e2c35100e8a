"""What questions cost, what of it can be paid, and what is left: the budgets of a ledger's purposes beside
what is on record.

Whether a question can be paid is decided when it is recorded, beside the most that everything that waits may
cost; or, where it is asked in a wave, when its turn comes. Whether anything more can be bought follows from
takes and rounds before a step, and not from what has come since: so a run that is continued asks, and ends,
where the unbroken one does.
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
    """What one ledger may spend, by purpose: what questions cost at most, and which of them the budgets
    allow.

    Args:
        oracle: by its address.
        row: a question by its number.
    """

    def __init__(
        self,
        store: Store,
        waves: Waves,
        oracle: Callable[[str], Oracle],
        cache: Cache,
        row: Callable[[int], Intent],
    ):
        self.store = store
        self.waves = waves
        self.budgets = waves.budgets
        self._oracle = oracle
        self._cache = cache
        self._row = row
        self._warned = set[str]()

    def quotes(self, purpose: str, questions: Sequence[Question]) -> tuple[list[Quote], list[bool]]:
        """For each question what is known and what the rest may cost, and whether the budget allows it; in
        waves, that is decided later."""
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
        """The most that questions would cost if they were asked now; what is known costs nothing."""
        asking = dict(self._cache.asking)
        price = Price()
        for question in questions:
            quote, own = self._quote(question, asking)
            asking.update(own)
            price += quote.price
        return price

    def refused(self, rows: Iterable[Intent]) -> Price | None:
        """The price of the cheapest of these questions, none of which was paid."""
        return min(map(self._price_of, rows), key=in_order, default=None)

    def is_spent(self, step: int, *, ahead: bool = False) -> bool:
        """Whether training could buy nothing more when the step before had taken its answers.

        Args:
            ahead: of questions that the step itself does not need; nor then, if what waits may take all that
            is left.
        """
        spent = self.spent_before(step)
        if "train" in self.waves.limited and not self.store.has_take("train", step):
            if ahead and self.store.has_take("train", step - 1):
                spent = self._outlook(step, "train")
            elif not ahead and spent != Spent():
                spent = replace(spent, price=self.store.taken_so_far("train"))
        return self.budgets.get("train", Budget()).used_up(spent) is not None

    def spent_before(self, step: int, purpose: str = "train") -> Spent:
        """What was spent when the step before had taken its answers. Where this step has asked or taken, the
        run went on: nothing is used up then.

        Answers that have come since change none of it, so a run that is continued ends where the unbroken one
        does.
        """
        if (
            not self.store.has_take(purpose, step - 1)
            or self.store.has_round(purpose, step, 0)
            or self.store.has_take(purpose, step)
        ):
            return Spent()
        if purpose in self.waves.limited:
            return self._outlook(step, purpose)
        unpaid = [self._price_of(self._row(id)) for id in self.store.unpaid_ids(purpose)]
        prices = [*filter(None, [self.store.take_refused(purpose, step - 1)]), *unpaid]
        return Spent(
            self.store.committed(purpose),
            min(prices, key=in_order, default=None),
            self.store.num_open(purpose),
        )

    def say_unpaid(self, question: Question, price: Price, spent: Price) -> None:
        """Warn of the first question that is not paid; later ones are counted."""
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
                "it; such questions are counted "
                "(answers/unpaid_frac)"
            )

    def _outlook(self, step: int, purpose: str) -> Spent:
        return self.waves.outlook(purpose, step, self.store.take_refused(purpose, step - 1), self._row)

    def _quote(self, question: Question, asking: Asking) -> tuple[Quote, Asking]:
        """What is known of a question, and what the rest may cost; and who asks for its items, if it is
        asked."""
        if question.oracle == UNASKED:
            return Quote(), {}
        oracle = self._oracle(question.oracle)
        cached, own = self._cache.find(question, asking)
        price = oracle.price(rest(question, cached)) if None in cached else Price()
        return Quote(cached if any(cached) else (), price), own

    def _price_of(self, row: Intent) -> Price:
        return self.waves.price_of(self.waves.as_asked(row))
