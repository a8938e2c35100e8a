"""The oracle's protocol: the class `Oracle`, with a default for every member that an oracle may leave out,
and `Wrapper`, the base of an oracle that asks another one."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from oat.types import Answer, Kind, Price, Question


class Oracle:
    """Answers questions. An answer may come late, in another order, or never.

    A subclass defines `answers`, `submit` and `collect`; every other member has a default. The ledger uses
    `submit`, `collect`, `price` and `metrics` throughout the run, on the run's thread. The start of a run,
    and `oat check`, read the other members before the first question; `close` is called at the end.

    A user's oracle need not be a subclass: `oat.oracles.users` reads the same members of any object.
    """

    answers: Kind
    """The kind of question that the oracle takes."""
    durable: bool = False
    """True if tickets stay valid after this process has ended. After a restart the ledger collects the
    answers to a durable oracle's open tickets, and submits the open questions of any other oracle again."""
    name: str = ""
    """The oracle's name in messages; "": the name of its class."""
    cacheable: bool = True
    """True if an answer depends only on the texts of a question (messages, reference, columns and each
    candidate), so that the ledger may use it again for the same texts. An oracle that also reads `ids` or
    `known` sets False: two episodes with the same last response may differ in these alone."""
    is_relative: bool = False
    """True if scores are comparable only among the candidates that are asked about together. Their mean is
    meaningless then, so an evaluation by this oracle is refused."""
    names_cost: bool = True
    """True if prices include money (`Price.cost`). If False, the start of a run refuses a budget in money."""
    max_outage_s: float | None = None
    """Seconds without any answer from the oracle's service after which the oracle ends the run; None: it has
    no service. `oracle.deadline_s` has to be longer."""
    version: str | None = None
    """A text that differs whenever anything besides the question that answers depend on differs. The ledger
    does not use answers of another version again. None: the oracle states no version; a user's function or
    class then gets the hash of its file (`oracles/make.py`)."""
    made_of: Mapping[str, Mapping[str, Any]] = {}
    """The facts that `version` depends on, as plain values: by file and field, or by field in the section
    `options` if they are in no file. If a run is continued with an oracle whose `made_of` is unchanged and
    not empty, it keeps the old version and may use old answers again, even if `version` differs. If a file
    has changed since the oracle answered, the run goes on only if the user accepts the change
    (`build/fingerprints.py`)."""

    where_asked: str = "in this process"
    """Where the oracle answers, in words for `oat check`, with the model and the address if there are any."""
    when_it_abstains: str = ""
    """What a user should look at when the oracle abstains, for warnings; "": its data."""

    @property
    def metrics(self) -> Mapping[str, float]:
        """The current values of the metrics that the oracle reports, by name (`oat.metrics`). They go into
        every row of metrics."""
        return {}

    @property
    def names_price(self) -> bool:
        """True if `price` says what a question can cost, which a budget in tokens or money needs. By default
        True if the class defines `price`."""
        return type(self).price is not Oracle.price

    def price(self, question: Question) -> Price:
        """Return the most that a question can cost; by default one query for each value of the answer. The
        ledger sets this price aside before it asks; an answer that cost more is an error. This method must
        not ask a service."""
        return Price(question.size)

    def check_columns(self, columns: Collection[str], has_reference: bool) -> None:
        """Check that the data have the columns that the oracle reads. The start of a run calls this before
        the first question, for the prompts of training and for those of evaluations.

        Raises:
            ConfigError: the data lack a column.
        """

    def bind(self) -> None:
        """Tell the oracle that a budget in tokens or money limits it, so that it has to count everything that
        may have been paid for. The start of a run calls this before the first question, if there is such a
        budget."""

    def submit(self, questions: Sequence[Question]) -> list[str]:
        """Take questions and return one ticket for each, different from all other open tickets. This method
        must not wait for answers."""
        raise NotImplementedError

    def collect(self, tickets: Sequence[str], seconds: float) -> list[tuple[str, Answer]]:
        """Return the answers to those of `tickets` that are answered, each with its ticket. If there are
        none, wait at most `seconds` for the first.

        Within a process each ticket is returned once. After a restart a durable oracle returns an answered
        ticket again, since the process may have been killed before the ledger recorded the answer.
        """
        raise NotImplementedError

    def close(self) -> None:
        """End the oracle's threads, processes and connections. A run calls this once, at its end, but not for
        an object that was given from Python: the code that made the object closes it."""


class _HandedOn:
    """A member of a wrapper whose value is read from the wrapped oracle. This descriptor has no `__set__`, so
    a wrapper may set an attribute of the same name, which then takes its place."""

    def __init__(self, member: str):
        self._member = member

    def __get__(self, wrapper: "Wrapper | None", owner: type) -> Any:
        return self if wrapper is None else wrapper.read(self._member)


class Wrapper(Oracle):
    """Asks another oracle. Each member that a subclass does not define is the wrapped oracle's."""

    def __init__(self, oracle: Oracle):
        self.oracle = oracle

    def read(self, member: str) -> Any:
        """Return the value of a member of the wrapped oracle."""
        return getattr(self.oracle, member)


MEMBERS = tuple(name for name in (*Oracle.__annotations__, *vars(Oracle)) if not name.startswith("_"))
"""The names of all members of an oracle."""
for _name in MEMBERS:
    setattr(Wrapper, _name, _HandedOn(_name))
