"""The oracle's protocol. An answer may come late, in another order, or never."""

from collections.abc import Collection, Sequence
from typing import Any, Protocol, runtime_checkable

from oat.errors import OatError, OracleError, shown, warn
from oat.plugins.calls import bare, raising
from oat.plugins.loading import given
from oat.types import Answer, Kind, Price, Question


class Oracle(Protocol):
    """Answers questions.

    Attributes:
        answers: the kind of question it takes.
        durable: it keeps its tickets when this process dies, so that they are attached again and not asked
        again.

    Eight members are optional:
        cacheable: bool, True where it is missing: its answers are functions of what a question says in text
            (messages, reference, columns, and each candidate), so that they may be used again. One that also
            reads `ids` or `known` says False: turns before the last differ in them alone. price(question) ->
            Price: the most that the question can cost, for budgets. Where it is missing, that is a query for
            each value; a budget in tokens or money needs it. names_cost: bool, True where it is missing: its
            prices have money. bind(): hear, before the first question, that a budget in tokens or money
            limits it, so that nothing it may have to pay goes uncounted. version: str, "" where it is
            missing: answers of another version are not used again. A user's function or class without one has
            the hash of the file it stands in (`registry.py`). made_of: plain values by file and field, empty
            where it is missing: what is read of the files that the version is about. Where all of it is what
            it was, answers of before stay known, whatever the version says; where a file has changed, a run
            goes on only when that is accepted. The section `options` has what else the version is about.
            metrics: numbers by name (`oat.metrics`), as they stand now; every step's row has them. close():
            end what it holds (threads, processes, connections). A run calls it at its end, but for an object
            that was given from Python, which is its giver's.
    """

    answers: Kind
    durable: bool

    def submit(self, questions: Sequence[Question]) -> list[str]:
        """Take questions; returns one ticket each. Must not wait for answers."""

    def collect(self, tickets: Sequence[str], seconds: float) -> list[tuple[str, Answer]]:
        """The answers that are there, or arrive within `seconds`, for some of the tickets, each with its
        ticket.

        Returns as soon as there is at least one. An answered ticket is not returned again in the same
        process; a durable oracle returns it again after a restart, since the kill may have fallen between the
        answer and its record.
        """


@runtime_checkable
class ChecksColumns(Protocol):
    """An oracle that knows which columns it needs."""

    def check_columns(self, columns: Collection[str], has_reference: bool) -> None:
        """Hold what it needs against the columns of the data.

        Raises:
            ConfigError: the data lack a column.
        """


def is_cacheable(oracle: Oracle) -> bool:
    return bool(_member(oracle, "cacheable", True))


def is_relative(oracle: Oracle) -> bool:
    """Whether its scores only order the candidates that are asked about together, so that their mean says
    nothing."""
    return bool(_member(oracle, "is_relative", False))


def version_of(oracle: Oracle) -> str:
    return str(_member(oracle, "version", ""))


def says_version(oracle: Oracle) -> bool:
    return _member(oracle, "version", None) is not None


def made_of(oracle: Oracle) -> dict[str, dict[str, Any]]:
    return dict(_member(oracle, "made_of", {}))


def _member(oracle: Oracle, name: str, default: Any) -> Any:
    """What an oracle may say of itself.

    Raises:
        OracleError: its code raises.
    """
    with raising(
        lambda what: OracleError(
            f"`{name}` of oracle {type(oracle).__name__} {what}; give a value, or leave it out"
        )
    ):
        return getattr(oracle, name, default)


def metrics_of(oracle: Oracle) -> dict[str, float]:
    with raising(
        lambda what: OracleError(
            f"`metrics` of oracle {type(oracle).__name__} {what}; give numbers by name, or leave it out"
        )
    ):
        return dict(getattr(oracle, "metrics", {}))


def close_oracle(oracle: Oracle) -> None:
    """End what an oracle holds. What it raises is said, and disturbs nothing."""
    close = _member(oracle, "close", None)
    if close is None or any(oracle is each for each in given.values()):
        return
    try:
        with raising(lambda what: OracleError(bare(what))):
            close()
    except OatError as error:
        name = getattr(oracle, "name", None)
        warn(
            f"oracle {name if isinstance(name, str) else type(oracle).__name__} could not be closed: {error}"
        )


def outage_of(oracle: Oracle) -> float | None:
    """Seconds for which an oracle waits for its service; None where it has none."""
    found = _member(oracle, "max_outage_s", None)
    return found if isinstance(found, float | int) else None


def bind(oracle: Oracle) -> None:
    """Tell an oracle that a budget in tokens or money limits it."""
    tell = _member(oracle, "bind", None)
    if tell is not None:
        with raising(
            lambda what: OracleError(
                f"`bind` of oracle {type(oracle).__name__} {what}; repair it, and run the same command again"
            )
        ):
            tell()


def names_price(oracle: Oracle) -> bool:
    """Whether an oracle says itself what a question can cost."""
    return bool(_member(oracle, "names_price", _member(oracle, "price", None) is not None))


def names_cost(oracle: Oracle) -> bool:
    """Whether an oracle knows what a question costs in money."""
    return names_price(oracle) and bool(_member(oracle, "names_cost", True))


def price_of(oracle: Oracle, question: Question) -> Price:
    """The most that a question can cost.

    Raises:
        OracleError: the oracle does not say it.
    """
    own = _member(oracle, "price", None)
    if own is None:
        return Price(question.size)

    def refuse(what: str) -> OracleError:
        return OracleError(
            f"`price` of oracle {question.oracle} {what}, asked about {question.key}; repair it, and run "
            "the same command again"
        )

    with raising(refuse):
        price: Price = own(question)
    if not isinstance(price, Price):
        raise OracleError(
            f"`price` of oracle {question.oracle} returned {shown(price)}; return an oat.types.Price"
        )
    return price
