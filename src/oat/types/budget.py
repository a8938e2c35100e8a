"""What a run may spend: in queries, tokens and money.

The most that a question can cost is reserved when it is asked, so the limits are never passed, whoever asks
and however many at a time. What it did cost counts once a step has taken its answer; with a limit in tokens
or money, where that is far less, once its wave is answered (`ledger/waves.py`). Whether a question can be
paid depends on what is on record only.
"""

from dataclasses import dataclass

from oat.types import Price, Spent

_SLACK = 1e-9
"""Of a limit in money: sums of the same costs in another order differ by less."""


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
        """As much as this, and no more."""
        return cls(price.queries, price.tokens, price.cost)

    def allows(self, price: Price) -> bool:
        """Whether so much may be spent altogether."""
        pairs = (
            (price.queries, self.queries),
            (price.tokens, self.tokens),
            (price.cost, None if self.cost is None else self.cost * (1 + _SLACK)),
        )
        return all(limit is None or spent <= limit for spent, limit in pairs)

    def within(self, price: Price) -> Price:
        """As much of it as may be spent."""
        queries, tokens = (
            min(most, limit) if limit is not None else most
            for most, limit in ((price.queries, self.queries), (price.tokens, self.tokens))
        )
        return Price(queries, tokens, price.cost if self.cost is None else min(price.cost, self.cost))

    def used_up(self, spent: Spent) -> str | None:
        """Why nothing more can be bought for now, or None; answers may turn out cheaper than what is set
        aside for them."""
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
        """A price that is not allowed beside what was spent, for messages: in the units that it is too much
        in."""
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
        """Whether what a question takes of it is known only from its answer: tokens and money."""
        return self.tokens is not None or self.cost is not None


def in_money(cost: float) -> str:
    """A cost for people, in the oracle's own currency: two decimals, and below 1 three digits, however small
    they are."""
    return f"{cost:,.2f}" if cost == 0 or cost >= 1 else f"{cost:.3g}"


def _number(value: float) -> str:
    """Without the last digits of sums of costs, which are rounding."""
    return f"{value:.10g}" if isinstance(value, float) else str(value)
