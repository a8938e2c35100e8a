"""The oracle's protocol: the class `Oracle`, with a default for every member that an oracle may leave out; and
`Wrapper`, for an oracle that asks another one."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from oat.types import Answer, Kind, Price, Question


class Oracle:
    """Answers questions. An answer may come late, in another order, or never.

    A subclass has `answers`, `submit` and `collect`; everything else has a default. The ledger calls `submit`,
    `collect` and `price` from the thread of the run; `oat check` and the start of a run read the rest before the
    first question.

    A user's oracle need not be a subclass: `oat.oracles.users` reads the same members of any object.
    """

    answers: Kind
    """The kind of question that it takes."""
    durable: bool = False
    """Whether tickets outlive this process: after a restart the ledger collects them again, and asks nothing
    twice."""
    name: str = ""
    """What messages call it; "" stands for the name of its class."""
    cacheable: bool = True
    """Whether its answers are functions of what a question says in text (messages, reference, columns and each
    candidate), so that the ledger may use them again. An oracle that also reads `ids` or `known` says False: two
    episodes whose last responses are equal may differ in these alone."""
    is_relative: bool = False
    """Whether its scores only order the candidates that are asked about together. Their mean says nothing then,
    and an evaluation refuses the oracle."""
    names_cost: bool = True
    """Whether its prices have money. The start of a run refuses a budget in money where they have none."""
    max_outage_s: float | None = None
    """Seconds for which it waits for its service before it ends the run; None where it has no service.
    `oracle.deadline_s` has to be longer."""
    version: str | None = None
    """What its answers depend on beside the question, as text: the ledger does not use answers of another version
    again. None where it does not say; a user's function or class then has the hash of its file (`registry.py`)."""
    made_of: Mapping[str, Mapping[str, Any]] = {}
    """By file and field, plain values of what `version` is about; the section `options` has what stands in no
    file. As long as all of it stays equal, a run that goes on keeps its answers, whatever `version` says; where a
    file has changed, it goes on only when that is accepted (`build/fingerprints.py`)."""

    @property
    def metrics(self) -> Mapping[str, float]:
        """Numbers by name (`oat.metrics`), as they stand now. Every row of metrics reads them."""
        return {}

    @property
    def names_price(self) -> bool:
        """Whether it says what a question can cost, which a budget in tokens or money needs: whether it has a
        `price` of its own."""
        return type(self).price is not Oracle.price

    def price(self, question: Question) -> Price:
        """The most that a question can cost, by default a query for each value. The ledger sets it aside before
        it asks, and refuses an answer that cost more. Must not ask anybody."""
        return Price(question.size)

    def check_columns(self, columns: Collection[str], has_reference: bool) -> None:
        """Hold the columns that it reads against those of the data; called before the first question, once for
        the prompts of training and once for those of evaluations.

        Raises:
            ConfigError: the data lack a column.
        """

    def bind(self) -> None:
        """Hear that a budget in tokens or money limits it, so that nothing that it may have to pay goes
        uncounted; called before the first question, and only then."""

    def submit(self, questions: Sequence[Question]) -> list[str]:
        """Take questions; returns one ticket each, different from all others that are open. Must not wait for
        answers."""
        raise NotImplementedError

    def collect(self, tickets: Sequence[str], seconds: float) -> list[tuple[str, Answer]]:
        """The answers that are there, or arrive within `seconds`, for some of the tickets, each with its ticket.

        Returns as soon as there is at least one. An answered ticket is not returned again in the same process; a
        durable oracle returns it again after a restart, since the kill may have fallen between the answer and its
        record.
        """
        raise NotImplementedError

    def close(self) -> None:
        """End what it holds (threads, processes, connections). A run calls it once, at its end; an object that
        was given from Python stays open, since it belongs to its giver."""


class _HandedOn:
    """A member of a wrapper that is read of the oracle within; the wrapper may set one of its own over it."""

    def __init__(self, member: str):
        self._member = member

    def __get__(self, wrapper: "Wrapper | None", owner: type) -> Any:
        return self if wrapper is None else wrapper.read(self._member)


class Wrapper(Oracle):
    """An oracle that asks another one: each member that a subclass does not define is that oracle's."""

    def __init__(self, oracle: Oracle):
        self.oracle = oracle

    def read(self, member: str) -> Any:
        """The value of a member of the oracle within."""
        return getattr(self.oracle, member)


MEMBERS = tuple(name for name in (*Oracle.__annotations__, *vars(Oracle)) if not name.startswith("_"))
"""The names of all members of an oracle."""
for _name in MEMBERS:
    setattr(Wrapper, _name, _HandedOn(_name))
