"""Sends open questions to oracles, fetches their answers, and records questions past their deadline as
failed. `ledger/open_questions.py` has what becomes of each question.

After a restart some questions have no answer. If their oracle kept them, the answers are fetched by the old
tickets. Otherwise the questions are submitted again before the next new take of their purpose. A take that is
recorded already submits nothing.

Records answers with their labels, and completes answers that await values.

The first answer of a question wins. A question may have been recorded as awaiting values from an equal
question (`ledger/cache.py`). When the equal question is answered, the same transaction also completes the
answer that awaits its values.

The trajectories of rounds that a ledger still works with, in memory.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

from oat.errors import OracleError
from oat.ledger.intents import AWAITED, Intent, whole
from oat.ledger.open_questions import OpenQuestion, OpenQuestions, Sent, Stage, Ticket
from oat.ledger.store import Store
from oat.oracles.base import Oracle
from oat.oracles.contract import calling, checked, nothing, pairs_of, tickets_of
from oat.seeds import Seeds
from oat.types import Answer, Group, Item, Question
from oat.types.questions import Budget

Place = tuple[str, int, int]
"""The address of a round: purpose, step, round."""


class OpenRounds:
    """The trajectories of rounds, held in memory. What is not in memory is read from the store when it is
    needed. The store's lock guards them.

    Attributes:
        groups: the groups of each round that is in memory.
    """

    def __init__(self, store: Store, open_questions: OpenQuestions):
        self.store = store
        self.open = open_questions
        self.groups: dict[Place, list[Group]] = {}

    def add(self, place: Place, groups: Sequence[Group]) -> None:
        """Add a round that was just recorded."""
        with self.store.lock:
            self.groups[place] = list(groups)

    def intent(self, id: int) -> Intent:
        """Return the open question with this id, its token ids included."""
        with self.store.lock:
            row = self.open.rows[id]
            row.intent = self.with_ids(row.intent)
            return row.intent

    def with_ids(self, intent: Intent) -> Intent:
        """Return `intent` with the token ids of its candidates and the row of its prompt. In the store, only
        the groups of its round have these."""
        if intent.question.ids:
            return intent
        group = self.group(intent)
        ids = tuple(group.trajectories[pick].completion for pick in intent.question.picks)
        return replace(intent, question=replace(intent.question, ids=ids, row=group.prompt.row))

    def group(self, intent: Intent) -> Group:
        """Return the group that a question is about.

        Raises:
            LedgerError: the group's trajectories were dropped, or are damaged.
        """
        return self._of_round(place_of(intent))[intent.member]

    def num_groups(self, place: Place) -> int:
        """Return the number of groups of a round.

        Raises:
            LedgerError: the round's trajectories were dropped, or are damaged.
        """
        return len(self._of_round(place))

    def _of_round(self, place: Place) -> list[Group]:
        with self.store.lock:
            if place not in self.groups:
                self.groups[place] = self.store.groups(*place)
            return self.groups[place]

    def item(self, intent: Intent, answer: Answer, label: int | None) -> Item:
        """Return what a step learns from: an answered question with its group, answer and label."""
        return Item(self.group(intent), intent.question, answer, label)

    def forget(self, needed: Collection[Place]) -> None:
        """Drop the trajectories of all rounds except those in `needed`."""
        with self.store.lock:
            self.groups = {place: groups for place, groups in self.groups.items() if place in needed}


def place_of(intent: Intent) -> Place:
    key = intent.question.key
    return key.purpose, key.step, key.round


class Settling:
    """Records answers, and completes the answers that await values from them.

    Args:
        labels: how the probability of a comparison becomes a label. "threshold": the more probable candidate
            wins. "bernoulli": the first candidate wins with that probability, drawn from a generator of the
            question's own. In both cases a probability of exactly one half gives no label.
    """

    def __init__(
        self,
        store: Store,
        open_questions: OpenQuestions,
        seeds: Seeds,
        labels: Literal["threshold", "bernoulli"],
    ):
        self.store = store
        self.open = open_questions
        self.seeds = seeds
        self.labels = labels

    def record(self, answers: Sequence[tuple[OpenQuestion, Answer]]) -> None:
        """Record answers of oracles. Some questions await values from these answers. In the same transaction,
        complete the answer to each such question that awaits no further value."""
        with self.store.lock, self.store:
            self.add(answers)
            self.complete(self.open.awaiting(answer.key for _, answer in answers))

    def add(self, answers: Sequence[tuple[OpenQuestion, Answer]]) -> None:
        """Record answers with their labels. The caller holds the transaction."""
        self.store.add_answers(
            [(row.id, answer, self._label(row.intent.question, answer)) for row, answer in answers]
        )
        for row, answer in answers:
            stage = Stage.AWAITING if AWAITED in answer.marks else Stage.ANSWERED
            if row.stage is not stage:
                self.open.move(row, stage)

    def complete(self, rows: Iterable[OpenQuestion]) -> None:
        """Complete the answer to each question whose awaited values are all recorded. The others go on
        awaiting the rest. The caller holds the transaction."""
        for row in rows:
            intent = row.asked
            keys = intent.others | ({intent.question.key} if intent.is_sent else set())
            found = {key: self.store.values(key) for key in keys}
            brought = {key: values for key, values in found.items() if values is not None}
            self.open.await_keys(row, found.keys() - brought.keys())
            if len(brought) < len(found):
                continue
            if intent.is_sent:
                self.store.complete(intent.id, whole(intent, self.store.answer(intent)[0], brought))
                self.open.move(row, Stage.ANSWERED)
            else:
                empty = Answer(intent.question.key, (), (), queries=0, by=intent.question.oracle)
                self.add([(row, whole(intent, empty, brought))])

    def _label(self, question: Question, answer: Answer) -> int | None:
        """Return the index of the candidate that won a comparison. Return None if no candidate won, or if the
        question is for scores."""
        if question.kind != "compare" or answer.marks[0] != "ok":
            return None
        probability = answer.values[0]
        if probability == 0.5:
            return None
        if self.labels == "bernoulli":
            return 0 if self.seeds.at("label", str(question.key)).random() < probability else 1
        return int(probability < 0.5)


def unanswered(intent: Intent, mark: Literal["failed", "unpaid"]) -> Answer:
    """Return the answer to record for a question that no oracle answers. It has the question's known values;
    every other value gets the mark `mark`."""
    return whole(intent, nothing(intent.rest, mark, intent.question.oracle), missing=mark)


def close_unanswered(store: Store, *purposes: str) -> None:
    """Record the unanswered questions of these purposes as failed. In the recorded answers of these
    purposes, mark the values that are still awaited as failed. The caller holds the transaction."""
    store.add_answers(
        (intent.id, unanswered(intent, "failed"), None)
        for intent in store.unanswered()
        if intent.question.key.purpose in purposes
    )
    for purpose in purposes:
        store.fail_awaited(purpose)


_CHOSEN_BY = {
    "train": "oracle.name",
    "eval": "evaluation.oracle, or else oracle.name",
    "gold": "evaluation.gold",
}
"""The setting that chooses the oracle of a purpose, for messages."""


class Outstanding:
    """Sends questions to oracles and fetches their answers. The store's lock guards what is in memory. It is
    not held while an oracle is asked for answers.

    Args:
        budgets: the budgets, by purpose.
        deadline_s: a question fails if it has no answer this number of seconds after it was submitted.
        check_interrupt: a function that may raise. It is called each time an oracle has been asked for
            answers, before these are recorded.

    Attributes:
        reasked: number of questions that were submitted once more, since a kill came before their answers,
            their answers broke the contract, or the first submission failed.
    """

    def __init__(
        self,
        store: Store,
        open_questions: OpenQuestions,
        oracles: Mapping[str, Oracle],
        rounds: OpenRounds,
        settling: Settling,
        budgets: Mapping[str, Budget],
        deadline_s: float,
        check_interrupt: Callable[[], None],
    ):
        self.store = store
        self.open = open_questions
        self.oracles = oracles
        self.rounds = rounds
        self.settling = settling
        self.budgets = budgets
        self.deadline_s = deadline_s
        self.check_interrupt = check_interrupt
        self.reasked = store.asked_again()

    def oracle(self, name: str) -> Oracle:
        """Return the oracle at an address.

        Raises:
            OracleError: the run has no oracle at this address.
        """
        if name not in self.oracles:
            raise OracleError(
                f"a question is addressed to the oracle {name!r}, which this run does not have; it has "
                f"{', '.join(self.oracles)}"
            )
        return self.oracles[name]

    def submit(self, rows: Sequence[OpenQuestion]) -> None:
        """Send questions to their oracles, in one call for each oracle. A question for scores is sent with
        only those candidates whose values are unknown.

        The caller holds the store's lock.

        Raises:
            OracleError: an oracle raises, or returns tickets that break the contract.
        """
        for name in sorted({row.intent.question.oracle for row in rows}):
            oracle = self.oracle(name)
            mine = [row for row in rows if row.intent.question.oracle == name]
            sent = [self.rounds.with_ids(row.asked).rest for row in mine]
            open_tickets = self.open.tickets(name)
            with _naming_setting(sent[0].key.purpose):
                tickets = tickets_of(calling(name, oracle.submit, sent), len(mine), name, open_tickets)
            if oracle.durable:
                now = time.time()
                with self.store:
                    self.store.set_tickets(
                        [(ticket, now, row.id) for ticket, row in zip(tickets, mine, strict=True)]
                    )
            for ticket, row, question in zip(tickets, mine, sent, strict=True):
                self.open.move(row, Stage.SENT, self._sent((name, ticket), question))

    def is_kept(self, intent: Intent) -> bool:
        """Return True if the question has a recorded ticket and its oracle is durable. Such an oracle keeps
        questions across restarts."""
        oracle = self.oracles.get(intent.question.oracle)
        return oracle is not None and oracle.durable and intent.ticket is not None

    def resume(self, row: OpenQuestion) -> None:
        """Resume, after a restart, a question whose oracle kept it: its answer is fetched by the old ticket,
        with the old deadline."""
        intent = row.asked
        age = max(0.0, time.time() - intent.sent) if intent.sent is not None else 0.0
        ticket = (intent.question.oracle, str(intent.ticket))
        self.open.move(row, Stage.SENT, self._sent(ticket, intent.rest, age))

    def ask_again(self, purpose: str) -> None:
        """Submit the questions of a purpose that are due since an earlier process of the run. The ledger does
        not call this for a step whose answers are recorded as taken. So a finished run and a replay ask
        nothing."""
        with self.store.lock:
            lost = self.open.of(purpose, Stage.DUE)
            if not lost:
                return
            self.reasked += len(lost)
            with self.store:
                self.store.count_again(row.id for row in lost)
            self.submit(lost)

    def of(self, purpose: str) -> dict[Ticket, Sent]:
        """Return what oracles were sent for a purpose and have not answered, by ticket."""
        with self.store.lock:
            rows = self.open.of(purpose, Stage.SENT)
            return {row.sent.ticket: row.sent for row in rows if row.sent is not None}

    def rounds_pending(self) -> set[Place]:
        """Return the rounds of which oracles have questions."""
        with self.store.lock:
            return {place_of(row.intent) for row in self.open.at(Stage.SENT)}

    def next_deadline(self, purpose: str) -> float:
        """Return the deadline of the question that an oracle has had longest, in seconds on the monotonic
        clock."""
        return min((sent.since for sent in self.of(purpose).values()), default=0.0) + self.deadline_s

    def collect(self, waiting: Mapping[Ticket, Sent], patience: float) -> bool:
        """Ask each oracle once for answers, and record the answers of an oracle in one transaction. If no
        oracle returns an answer, record the questions past their deadline as failed.

        Args:
            waiting: the questions to fetch answers for.
            patience: the longest time that an oracle may wait for its first answer, in seconds. If there are
                several oracles, each may wait at most 1 s.

        Returns:
            True if an answer came.

        Raises:
            OracleError: an oracle raises, or gives an answer that breaks the contract. Sound answers that
                came with a broken one are recorded first.
        """
        has_come = False
        names = sorted({oracle for oracle, _ in waiting})
        for name in names:
            tickets = [ticket for oracle, ticket in waiting if oracle == name]
            seconds = min(patience, 1.0) if len(names) > 1 else patience
            with _naming_setting(waiting[name, tickets[0]].question.key.purpose):
                arrived = pairs_of(calling(name, self.oracle(name).collect, tickets, seconds), name)
            self.check_interrupt()
            with self.store.lock:
                first: dict[Ticket, Any] = {}
                for ticket, answer in arrived:
                    first.setdefault((name, ticket), answer)
                has_come |= bool(first) and self._record([*first.items()])
        if not has_come:
            now = time.monotonic()
            due = [(key, sent) for key, sent in waiting.items() if now >= sent.since + self.deadline_s]
            with self.store.lock:
                self._record([(key, _failed(sent)) for key, sent in due])
            self.drop(key for key, _ in due)
        return has_come

    def drop(self, tickets: Iterable[Ticket]) -> None:
        """Tell oracles that nobody waits any more for the answers to these tickets."""
        dropped = defaultdict[str, list[str]](list)
        for oracle, ticket in tickets:
            dropped[oracle].append(ticket)
        for name, own in dropped.items():
            calling(name, self.oracle(name).drop, own)

    def _sent(self, ticket: Ticket, question: Question, age: float = 0.0) -> Sent:
        is_limited = self.budgets.get(question.key.purpose, Budget()).is_limited
        most = Budget.of(self.oracle(question.oracle).price(question)) if is_limited else Budget()
        return Sent(ticket, question, time.monotonic() - age, most)

    def _record(self, answered: Sequence[tuple[Ticket, Any]]) -> bool:
        """Record the answers to questions that oracles have under these tickets. Return True if there are
        such questions. A question whose answer breaks the contract is due again."""
        found = [(row, answer) for ticket, answer in answered if (row := self.open.under(ticket)) is not None]
        if not found:
            return False
        answers = []
        broken = []
        for row, answer in found:
            sent = row.sent
            assert sent is not None, "a question under a ticket was sent"
            try:
                unit = self.oracle(sent.oracle).gives_steps
                with _naming_setting(row.purpose):
                    sound = checked(answer, sent.question, sent.oracle, sent.most, unit)
                answers.append((row, whole(row.asked, sound)))
            except OracleError as error:
                broken.append(error)
                self.open.move(row, Stage.DUE)
        self.settling.record(answers)
        if broken:
            raise broken[0]
        return True


@contextmanager
def _naming_setting(purpose: str) -> Iterator[None]:
    """A context that adds the setting that chose the oracle of a purpose to an `OracleError` about it."""
    try:
        yield
    except OracleError as error:
        if type(error) is not OracleError or purpose not in _CHOSEN_BY:
            raise
        raise OracleError(f"{error} ({_CHOSEN_BY[purpose]})") from error.__cause__ or error


def _failed(sent: Sent) -> Answer:
    """Return the answer of a question that failed at its deadline.

    The oracle may still work on the question and charge for it. So if the purpose has a budget, the answer
    has the question's highest price.
    """
    most = sent.most
    answer = nothing(sent.question, "failed", sent.oracle, time.monotonic() - sent.since)
    return replace(answer, queries=most.queries or 0, tokens=most.tokens or 0, cost=most.cost or 0.0)
