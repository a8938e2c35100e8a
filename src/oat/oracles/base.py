"""The oracle's protocol. An answer may come late, in another order, or never."""

from collections.abc import Sequence
from typing import Protocol

from oat.errors import OatError, OracleError
from oat.types import Answer, Kind, Price, Question


class Oracle(Protocol):
    """Answers questions.

    Attributes:
        answers: the kind of question it takes.
        durable: it keeps its tickets when this process dies, so that they are attached again and not asked again.

    Three members are optional:
        cacheable: bool, True where it is missing: its answers are functions of the question, so that they may be used again.
        price(question) -> Price: the most that the question can cost, for budgets. Where it is missing, that is a query for each value; a budget
            in tokens or money needs it.
        version: str, "" where it is missing: answers of another version are not used again. A user's function or class without one has the hash of
            the file it stands in (`registry.py`).
    """

    answers: Kind
    durable: bool

    def submit(self, questions: Sequence[Question]) -> list[str]:
        """Take questions; returns one ticket each. Must not wait for answers."""

    def collect(self, tickets: Sequence[str], seconds: float) -> list[tuple[str, Answer]]:
        """The answers that are there, or arrive within `seconds`, for some of the tickets, each with its ticket.

        Returns as soon as there is at least one. An answered ticket is not returned again in the same process; a durable oracle returns it
        again after a restart, since the kill may have fallen between the answer and its record.
        """


def is_cacheable(oracle: Oracle) -> bool:
    return bool(getattr(oracle, "cacheable", True))


def version_of(oracle: Oracle) -> str:
    return str(getattr(oracle, "version", ""))


def names_price(oracle: Oracle) -> bool:
    """Whether an oracle says itself what a question can cost."""
    return bool(getattr(oracle, "names_price", hasattr(oracle, "price")))


def price_of(oracle: Oracle, question: Question) -> Price:
    """The most that a question can cost.

    Raises:
        OracleError: the oracle does not say it.
    """
    own = getattr(oracle, "price", None)
    if own is None:
        return Price(question.size)
    try:
        price: Price = own(question)
    except OatError:
        raise
    except (Exception, SystemExit) as error:
        what = f"raised {type(error).__name__}: {error}"
        raise OracleError(
            f"`price` of oracle {question.oracle} {what}, asked about {question.key}; repair it, and run the same command again"
        ) from error
    if not isinstance(price, Price):
        raise OracleError(f"`price` of oracle {question.oracle} returned {str(price)[:80]}; return an oat.types.Price")
    return price
