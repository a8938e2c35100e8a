"""What a run may spend: in queries, tokens and money.

The most that a question can cost is reserved when it is asked, and what it did cost counts once a step has taken its answer. So the limits are never
passed, whoever asks and however many at a time, and whether a question can be paid depends on recorded steps only.
"""

from dataclasses import dataclass

from oat.types import Price, Spent


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
        pairs = ((price.queries, self.queries), (price.tokens, self.tokens), (price.cost, self.cost))
        return all(limit is None or spent <= limit for spent, limit in pairs)

    def used_up(self, spent: Spent) -> str | None:
        """Why nothing more can be bought for now, or None; answers may turn out cheaper than what is set aside for them."""
        pairs = {"queries": (spent.price.queries, self.queries), "tokens": (spent.price.tokens, self.tokens), "cost": (spent.price.cost, self.cost)}
        for name, (used, limit) in pairs.items():
            if limit is not None and used >= limit:
                return f"{used} {name} are spent (stop.max_{name} {limit})"
        if spent.refused is not None and not self.allows(spent.price + spent.refused):
            limits = ", ".join(f"{used} of stop.max_{name} {limit}" for name, (used, limit) in pairs.items() if limit is not None)
            return f"what is left of the budget pays no further question; spent: {limits}"
        return None

    def beside(self, spent: Price, price: Price, section: str) -> str:
        """A price that is not allowed beside what was spent, for messages: in the units that it is too much in."""
        units = ("queries", "tokens", "cost")
        found = [(name, getattr(price, name), getattr(spent, name), limit) for name in units if (limit := getattr(self, name)) is not None]
        beyond = [
            f"{more} {name}, and {used} of {limit} are spent ({section}.max_{name})" for name, more, used, limit in found if used + more > limit
        ]
        return "; ".join(beyond)

    @property
    def is_limited(self) -> bool:
        return self != Budget()
