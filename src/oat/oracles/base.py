"""The oracle's protocol: the class `Oracle`, which has a default for every optional member, and `Wrapper`,
the base of an oracle that asks another one."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from oat.types import Answer, Kind, Message, Opening, Price, Question, StepUnit
from oat.types.part import RunFacts


class Mean(float):
    """A metric of an oracle that is a mean. Means of several processes can be put together, since each knows
    its count.

    Args:
        total: the sum; the metric is `total / count`, and 0 if the count is 0.
    """

    def __new__(cls, total: float, count: float = 1.0) -> "Mean":
        mean = super().__new__(cls, total / count if count else 0.0)
        mean.total, mean.count = float(total), float(count)
        return mean

    total: float
    count: float


class Oracle:
    """An oracle, which answers questions. Answers may come late, in any order, or never.

    A subclass defines `answers`, `submit` and `collect`; every other member has a default. The ledger uses
    `submit`, `collect`, `drop`, `price` and `metrics` during the run, on the run's thread. A run and `oat
    check` read the other members before the first question. A run calls `close` at its end.

    A user's oracle need not be a subclass: `oat.oracles.users` reads the same members of any object.
    """

    answers: Kind
    """The kind of question that the oracle takes."""
    durable: bool = False
    """True if tickets stay valid after this process has ended. After a restart, the ledger collects the
    answers to the open tickets of a durable oracle. To any other oracle it submits the open questions
    again."""
    name: str = ""
    """The oracle's name in messages; "": the name of its class."""
    cacheable: bool = True
    """True if an answer depends only on the texts of a question: messages, reference, columns and candidates.
    The ledger may then use the answer for another question with the same texts. An oracle that also reads
    `ids` or `known` must set False: two episodes with the same last response may differ in these."""
    reads_group: bool = False
    """True if the score of a candidate may depend on the question's other candidates. The ledger then asks
    about every candidate of a question, equal ones too, and uses no score again. Other questions, which
    happen to be asked at the same time, may not matter."""
    gives_steps: StepUnit | None = None
    """"characters" or "tokens" if answers to questions for scores may have rewards of the steps of a response
    (`Answer.steps`), whose ends count characters or tokens; None if each candidate has one number only. If it
    is "tokens", `cacheable` must be False, since equal texts may have different tokens."""
    sources: Sequence[str] | None = ()
    """Labels of the sources whose own scores the answers may have (`Answer.sources`). None: not known."""
    is_relative: bool = False
    """True if a score can be compared only with the scores of the same group, round or wave. An evaluation by
    this oracle is refused, because its mean score means nothing."""
    names_cost: bool = True
    """True if prices include money (`Price.cost`). If False, a run with a budget in money is refused at its
    start."""
    max_outage_s: float | None = None
    """If the oracle's service gives no answer for this many seconds, the oracle ends the run. None: the
    oracle has no service. `oracle.deadline_s` has to be longer."""
    version: str | None = None
    """A text that identifies what decides the answer to a question, for example the model. The ledger uses an
    answer again only if this version gave it. None: the oracle states no version. The version of a user's
    function or class is then the hash of its file (`oracles/make.py`)."""
    made_of: Mapping[str, Mapping[str, Any]] = {}
    """The facts that `version` depends on, as plain values. The outer key is a file, or "options" for
    facts that are in no file. The inner key names the fact. A continued run compares the facts with the
    recorded ones (`assemble/fingerprints.py`):

    * If the facts are unchanged and not empty, the recorded version stays, even if `version` differs.
    * If a file has changed since the oracle answered, the run goes on only if the user accepts the change.
    """

    where_asked: str = "in this process"
    """The place where the oracle answers, in words for `oat check`. If there is a model or an address, the
    text names it."""
    when_it_abstains: str = ""
    """The likely cause if the oracle abstains, and what to check, in words for warnings. "": warnings tell
    the user to check the reference and the columns of the data."""

    @property
    def metrics(self) -> Mapping[str, float]:
        """The current values of the metrics that the oracle reports, by name (`oat.metrics`). They go into
        every row of metrics. If several processes ask the oracle, a `Mean` becomes the mean over all of them,
        and other numbers are added up."""
        return {}

    @property
    def names_price(self) -> bool:
        """True if `price` states the most that a question can cost. A budget in tokens or money needs this.
        By default it is True if the class defines `price`."""
        return type(self).price is not Oracle.price

    def price(self, question: Question) -> Price:
        """Return the most that a question can cost; by default one query for each value of the answer. This
        method must not ask a service.

        If the purpose has a budget, the ledger sets this price aside before it asks. An answer that then
        costs more is an error.
        """
        return Price(question.size)

    def check_columns(self, columns: Collection[str], has_reference: bool) -> None:
        """Check that the data have the columns that the oracle reads. A run calls this at its start, for the
        prompts of training and for those of evaluations.

        Raises:
            ConfigError: the data lack a column.
        """

    def tell_opening(self, opening: Callable[[Sequence[Message]], Opening]) -> None:
        """Tell the oracle how prompts begin their responses. Some chat templates do so, as with `<think>`, so
        that the response lacks it. A run calls this at its start, after `check_columns`.

        Args:
            opening: returns what the prompt of a question with these messages has written of the response.
        """

    def bind(self) -> None:
        """Tell the oracle that a budget in tokens or money limits it. The oracle then counts every try that
        may have to be paid for. A run with such a budget calls this at its start."""

    def tell(self, run: RunFacts) -> None:
        """Tell the oracle about the run that asks it. A run calls this once, before it reads other
        members."""

    def submit(self, questions: Sequence[Question]) -> list[str]:
        """Take questions, and return one ticket for each. A ticket must differ from all other open tickets.
        This method must not wait for answers."""
        raise NotImplementedError

    def collect(self, tickets: Sequence[str], seconds: float) -> list[tuple[str, Answer]]:
        """Return answers to questions of `tickets`, each with its ticket. If none of these is answered yet,
        wait at most `seconds` for the first answer.

        Return each ticket once in a process. After a restart, a durable oracle returns the answered tickets
        again if it is asked for them: the previous process may have been killed before the ledger recorded
        their answers.
        """
        raise NotImplementedError

    def drop(self, tickets: Sequence[str]) -> None:
        """Learn that nobody waits for the answers to these tickets any more: their deadline has passed, or
        their evaluation failed. The oracle may stop its work on them. The run ignores answers that come
        nevertheless. This method must not wait."""

    def close(self) -> None:
        """End the oracle's threads, processes and connections. A run calls this once, at its end. If the
        oracle was given from Python as an object, the run does not close it: the code that made the object
        does."""


class _HandedOn:
    """A descriptor for one member of a wrapper. It returns this member of the wrapped oracle, unless the
    wrapper itself sets an attribute of this name."""

    def __init__(self, member: str):
        self._member = member

    def __get__(self, wrapper: "Wrapper | None", owner: type) -> Any:
        return self if wrapper is None else wrapper.read(self._member)


class Wrapper(Oracle):
    """The base of an oracle that asks another oracle. If a subclass does not define a member, the member is
    the wrapped oracle's."""

    def __init__(self, oracle: Oracle):
        self.oracle = oracle

    def read(self, member: str) -> Any:
        """Return the wrapped oracle's attribute with the name `member`."""
        return getattr(self.oracle, member)


MEMBERS = tuple(name for name in (*Oracle.__annotations__, *vars(Oracle)) if not name.startswith("_"))
"""The names of all members of an oracle."""
for _name in MEMBERS:
    setattr(Wrapper, _name, _HandedOn(_name))
