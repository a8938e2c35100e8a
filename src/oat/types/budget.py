"""Budgets: the limits of a run's spending, in queries, tokens and money.

When the ledger asks a question, it reserves the most that the answer can cost. So the limits hold however
many questions are asked at a time. Later the real price replaces the reserved price:
* without a limit in tokens or money, when a step takes the answer;
* with such a limit, as soon as all questions of the wave are answered (`ledger/waves.py`).

Only the records of the ledger decide if a question can be paid.
"""

from dataclasses import dataclass

from oat.types import Price, Spent

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
