"""The oracle's protocol: the class `Oracle`, with a default for every member that an oracle may leave out,
and `Wrapper`, the base of an oracle that asks another one."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from oat.types import Answer, Kind, Price, Question


class Oracle:
    """Answers questions. An answer may come late, in another order, or never.

    A subclass defines `answers`, `submit` and `collect`; every other member has a default. The ledger calls
    `submit`, `collect` and `price` on the run's thread. The start of a run, and `oat check`, read the other
    members before the first question.

    A user's oracle need not be a subclass: `oat.oracles.users` reads the same members of any object.
    """

    answers: Kind
    """The kind of question that it takes."""
    durable: bool = False
    """True if tickets outlive this process. After a restart the ledger collects them again; questions of an
    oracle that is not durable are asked again."""
    name: str = ""
    """Its name in messages; "" stands for the name of its class."""
    cacheable: bool = True
    """True if its answers are functions of what a question says in text (messages, reference, columns and
    each candidate), so that the ledger may use them again. An oracle that also reads `ids` or `known` says
    False: two episodes with the same last response may differ in these alone."""
    is_relative: bool = False
    """True if its scores only order the candidates that are asked about together. Their mean says nothing
    then, and an evaluation refuses the oracle."""
    names_cost: bool = True
    """True if its prices have money. Otherwise the start of a run refuses a budget in money."""
    max_outage_s: float | None = None
    """Seconds for which it waits for its service before it ends the run; None: it has no service.
    `oracle.deadline_s` has to be longer."""
    version: str | None = None
    """Names everything that its answers depend on beside the question. The ledger does not use answers of
    another version again. None: it does not say, and a user's function or class gets the hash of its file
    (`oracles/make.py`)."""
    made_of: Mapping[str, Mapping[str, Any]] = {}
    """The parts of what `version` is about, plain values by file and field; the section `options` holds what
    stands in no file. As long as all of it stays equal, a continued run keeps its answers, whatever `version`
    says. After a file has changed, a run goes on only when the user accepts that
    (`build/fingerprints.py`)."""

    where_asked: str = "in this process"
    """Where it answers, for `oat check`: with the model and the address, if it has them."""
    when_it_abstains: str = ""
    """What a user should look at when it abstains, for warnings; "" where nothing is known beside its
    data."""

    @property
    def metrics(self) -> Mapping[str, float]:
        """Numbers by name (`oat.metrics`), as they stand now. Every row of metrics reads them."""
        return {}

    @property
    def names_price(self) -> bool:
        """True if it says what a question can cost, as a budget in tokens or money needs; by default, if its
        class defines `price`."""
        return type(self).price is not Oracle.price

    def price(self, question: Question) -> Price:
        """The most that a question can cost, by default a query for each value. The ledger sets this aside
        before it asks, and refuses an answer that took more. Must not ask anybody."""
        return Price(question.size)

    def check_columns(self, columns: Collection[str], has_reference: bool) -> None:
        """Check that the data have the columns that it reads. The start of a run calls this before the first
        question, for the prompts of training and for those of evaluations.

        Raises:
            ConfigError: the data lack a column.
        """

    def bind(self) -> None:
        """Take note that a budget in tokens or money limits it, so that it counts everything that it may have
        to pay. The start of a run calls this before the first question, if there is such a budget."""

    def submit(self, questions: Sequence[Question]) -> list[str]:
        """Take questions and return one ticket each, different from all others that are open. Must not wait
        for answers."""
        raise NotImplementedError

    def collect(self, tickets: Sequence[str], seconds: float) -> list[tuple[str, Answer]]:
        """Return the answers that are there, or arrive within `seconds`, for some of the tickets, each with
        its ticket.

        Returns as soon as there is at least one. Within a process an answered ticket is not returned again.
        After a restart a durable oracle returns it again, since the kill may have fallen between the answer
        and its record.
        """
        raise NotImplementedError

    def close(self) -> None:
        """End what it holds (threads, processes, connections). A run calls this once, at its end, except for
        an object that was given from Python: its giver closes it."""


class _HandedOn:
    """A member of a wrapper that is read from the wrapped oracle. It is no data descriptor, so a wrapper may
    set an attribute of its own in its place."""

    def __init__(self, member: str):
        self._member = member

    def __get__(self, wrapper: "Wrapper | None", owner: type) -> Any:
        return self if wrapper is None else wrapper.read(self._member)


class Wrapper(Oracle):
    """Asks another oracle. Each member that a subclass does not define is the wrapped oracle's."""

    def __init__(self, oracle: Oracle):
        self.oracle = oracle

    def read(self, member: str) -> Any:
        """The value of a member of the wrapped oracle."""
        return getattr(self.oracle, member)


MEMBERS = tuple(name for name in (*Oracle.__annotations__, *vars(Oracle)) if not name.startswith("_"))
"""The names of all members of an oracle."""
for _name in MEMBERS:
    setattr(Wrapper, _name, _HandedOn(_name))
