"""Budgets: what a run may spend, in queries, tokens and money.

The ledger reserves the most that a question can cost when it asks, so the limits are never passed, whoever
asks and however many at a time. The real cost counts once a step has taken the answer; with a limit in tokens
or money, where the real cost is far less, once the question's wave is answered (`ledger/waves.py`). Whether a
question can be paid depends on what is on record only.
"""

from dataclasses import dataclass

from oat.types import Price, Spent

_SLACK = 1e-9
"""Relative slack of a limit in money: sums of the same costs in another order differ by less."""


@dataclass(frozen=True)
class Budget:
    """The limits of one purpose; None is no limit.

    Attributes:
        cost: in the oracle's own currency.
    """

    queries: int | None = None
    tokens: int | None = None
    cost: float | None = None

    @classmethod
    def of(cls, price: Price) -> "Budget":
        """The budget that allows this price and no more."""
        return cls(price.queries, price.tokens, price.cost)

    def allows(self, price: Price) -> bool:
        """True if the limits allow this price as the sum of all that is spent."""
        pairs = (
            (price.queries, self.queries),
            (price.tokens, self.tokens),
            (price.cost, None if self.cost is None else self.cost * (1 + _SLACK)),
        )
        return all(limit is None or spent <= limit for spent, limit in pairs)

    def within(self, price: Price) -> Price:
        """The price, lowered to the limits."""
        queries, tokens = (
            min(most, limit) if limit is not None else most
            for most, limit in ((price.queries, self.queries), (price.tokens, self.tokens))
        )
        return Price(queries, tokens, price.cost if self.cost is None else min(price.cost, self.cost))

    def used_up(self, spent: Spent) -> str | None:
        """Why nothing more can be bought for now, or None. It is "for now" because answers may turn out
        cheaper than what is reserved for them."""
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
        """A price that is not allowed beside what was spent, in words: for each unit whose limit it would
        pass, how much it takes, how much is spent, and the setting.

        Args:
            section: of the configuration, which has the limits.
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
        """True if there is a limit in tokens or money, which only an answer shows the use of."""
        return self.tokens is not None or self.cost is not None


def in_money(cost: float) -> str:
    """A cost for people, in the oracle's own currency: two decimals, or three significant digits below 1."""
    return f"{cost:,.2f}" if cost == 0 or cost >= 1 else f"{cost:.3g}"


def _number(value: float) -> str:
    """A number to ten digits: the last ones of a sum of costs are rounding."""
    return f"{value:.10g}" if isinstance(value, float) else str(value)
