"""Sends questions to oracles, fetches their answers, and records questions past their deadline as failed.

After a restart some questions have no answer. If their oracle kept them, the answers are fetched by the old
tickets. Otherwise the questions are submitted again before the next new take of their purpose. A take that is
recorded already submits nothing.

Records answers with their labels, and completes answers that await values.

The first answer of a question wins. A question may have been recorded as awaiting values from an equal
question (`ledger/cache.py`). When the equal question is answered, the same transaction also completes the
answer that awaits its values.

The rounds that a ledger still works with, in memory: their trajectories and their waiting questions.
"""

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

from oat.errors import OracleError
from oat.ledger.intents import Intent, whole
from oat.ledger.store import Store
from oat.oracles.base import Oracle
from oat.oracles.contract import calling, checked, nothing, pairs_of, tickets_of
from oat.seeds import Seeds
from oat.types import Answer, Group, Item, Key, Question
from oat.types.questions import Budget

Place = tuple[str, int, int]
"""The address of a round: purpose, step, round."""


class OpenRounds:
    """The questions that no step has taken, and the trajectories of their rounds, held in memory. What is not
    in memory is read from the store when it is needed. The store's lock guards both maps.

    Attributes:
        groups: the groups of each round that is in memory.
        intents: the questions that are in memory, by id.
    """

    def __init__(self, store: Store):
        self.store = store
        self.groups: dict[Place, list[Group]] = {}
        self.intents: dict[int, Intent] = {}

    def add(self, place: Place, groups: Sequence[Group], intents: Sequence[Intent]) -> None:
        """Add a round that was just recorded."""
        with self.store.lock:
            self.groups[place] = list(groups)
            self.intents.update({intent.id: intent for intent in intents})

    def intent(self, id: int) -> Intent:
        """Return the waiting question with this id, its token ids included."""
        with self.store.lock:
            if id not in self.intents:
                self.intents[id] = self.with_ids(self.store.by_id(id))
            return self.intents[id]

    def close(self, id: int) -> Intent:
        """Remove the question with this id from memory, and return it. A step takes the question."""
        with self.store.lock:
            return self.intents.pop(id) if id in self.intents else self.store.by_id(id)

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

    Attributes:
        awaiting: for the key of an unanswered question, the intents that await values from its answer, by
            intent id.
    """

    def __init__(self, store: Store, seeds: Seeds, labels: Literal["threshold", "bernoulli"]):
        self.store = store
        self.seeds = seeds
        self.labels = labels
        self.awaiting: dict[Key, dict[int, Intent]] = {}

    def record(self, answers: Sequence[tuple[Intent, Answer]]) -> None:
        """Record answers of oracles. Some questions await values from these answers. In the same transaction,
        complete the answer to each such question that awaits no further value."""
        with self.store.lock, self.store:
            self.add(answers)
            intents: dict[int, Intent] = {}
            for _, answer in answers:
                intents |= self.awaiting.pop(answer.key, {})
            self.complete(intents.values())

    def add(self, answers: Iterable[tuple[Intent, Answer]]) -> None:
        """Record answers with their labels. The caller holds the transaction."""
        self.store.add_answers(
            [(intent.id, answer, self._label(intent.question, answer)) for intent, answer in answers]
        )

    def complete(self, intents: Iterable[Intent]) -> None:
        """Complete the answer to each question whose awaited values are all recorded. Add the remaining
        questions to `awaiting`. The caller holds the transaction."""
        for intent in intents:
            keys = intent.others | ({intent.question.key} if intent.is_sent else set())
            found = {key: self.store.values(key) for key in keys}
            brought = {key: values for key, values in found.items() if values is not None}
            for key in found.keys() - brought.keys():
                self.awaiting.setdefault(key, {})[intent.id] = intent
            if len(brought) < len(found):
                continue
            if intent.is_sent:
                self.store.complete(intent.id, whole(intent, self.store.answer(intent)[0], brought))
            else:
                empty = Answer(intent.question.key, (), (), queries=0, by=intent.question.oracle)
                self.add([(intent, whole(intent, empty, brought))])

    def forget(self, purpose: str) -> None:
        """Remove the intents of a purpose from `awaiting`."""
        self.awaiting = {key: intents for key, intents in self.awaiting.items() if key.purpose != purpose}

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


Ticket = tuple[str, str]
"""The address of an oracle, and the ticket that it gave."""
_CHOSEN_BY = {
    "train": "oracle.name",
    "eval": "evaluation.oracle, or else oracle.name",
    "gold": "evaluation.gold",
}
"""The setting that chooses the oracle of a purpose, for messages."""


@dataclass(frozen=True, eq=False)
class Pending:
    """A question that was sent to an oracle and has no answer yet.

    Attributes:
        question: the part of the question that was sent.
        since: the time at which it was sent, in seconds on the monotonic clock.
        most: the highest price that its answer may have; no limits if the purpose has no budget.
    """

    intent: Intent
    question: Question
    oracle: str
    since: float
    most: Budget


class Outstanding:
    """Sends questions to oracles and fetches their answers. The store's lock guards what is in memory. It is
    not held while an oracle is asked for answers.

    Args:
        budgets: the budgets, by purpose.
        deadline_s: a question fails if it has no answer this number of seconds after it was submitted.
        check_interrupt: a function that may raise. It is called each time an oracle has been asked for
            answers, before these are recorded.

    Attributes:
        pending: the questions that were sent to oracles and have no answer yet.
        lost: questions from before a restart that have no answer and that their oracles did not keep.
        reasked: number of submissions that repeat an earlier one after a restart.
    """

    def __init__(
        self,
        store: Store,
        oracles: Mapping[str, Oracle],
        rounds: OpenRounds,
        settling: Settling,
        budgets: Mapping[str, Budget],
        deadline_s: float,
        check_interrupt: Callable[[], None],
    ):
        self.store = store
        self.oracles = oracles
        self.rounds = rounds
        self.settling = settling
        self.budgets = budgets
        self.deadline_s = deadline_s
        self.check_interrupt = check_interrupt
        self.pending: dict[Ticket, Pending] = {}
        self.lost: list[Intent] = []
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

    def submit(self, intents: Sequence[Intent]) -> None:
        """Send questions to their oracles, in one call for each oracle. A question for scores is sent with
        only those candidates whose values are unknown.

        The caller holds the store's lock.

        Raises:
            OracleError: an oracle raises, or returns tickets that break the contract.
        """
        for name in sorted({intent.question.oracle for intent in intents}):
            oracle = self.oracle(name)
            mine = [self.rounds.with_ids(intent) for intent in intents if intent.question.oracle == name]
            sent = [intent.rest for intent in mine]
            open_tickets = {ticket for owner, ticket in self.pending if owner == name}
            with _naming_setting(sent[0].key.purpose):
                tickets = tickets_of(calling(name, oracle.submit, sent), len(mine), name, open_tickets)
            if oracle.durable:
                now = time.time()
                with self.store:
                    self.store.set_tickets(
                        [(ticket, now, intent.id) for ticket, intent in zip(tickets, mine, strict=True)]
                    )
            self.pending.update(
                {
                    (name, ticket): self._pending(intent, question)
                    for ticket, intent, question in zip(tickets, mine, sent, strict=True)
                }
            )

    def is_kept(self, intent: Intent) -> bool:
        """Return True if the question has a recorded ticket and its oracle is durable. Such an oracle keeps
        questions across restarts."""
        oracle = self.oracles.get(intent.question.oracle)
        return oracle is not None and oracle.durable and intent.ticket is not None

    def resume(self, intent: Intent) -> None:
        """Resume an unanswered question after a restart.

        If the oracle kept the question, its answer is fetched by the old ticket, with the old deadline.
        Otherwise the question is `lost` until `ask_again` submits it. If no part of the question has to be
        sent, nothing is done.
        """
        if self.is_kept(intent):
            age = max(0.0, time.time() - intent.sent) if intent.sent is not None else 0.0
            ticket = (intent.question.oracle, str(intent.ticket))
            self.pending[ticket] = self._pending(intent, intent.rest, age)
        elif intent.is_sent:
            self.lost.append(intent)

    def ask_again(self, purpose: str) -> None:
        """Submit again those questions in `lost` that belong to a purpose. The ledger does not call this for
        a step whose answers are recorded as taken. So a finished run and a replay ask nothing."""
        with self.store.lock:
            lost = [intent for intent in self.lost if intent.question.key.purpose == purpose]
            if not lost:
                return
            self.lost = [intent for intent in self.lost if intent.question.key.purpose != purpose]
            self.reasked += len(lost)
            with self.store:
                self.store.count_again(intent.id for intent in lost)
            self.submit(lost)

    def of(self, purpose: str) -> dict[Ticket, Pending]:
        """Return the pending questions of a purpose, by ticket."""
        with self.store.lock:
            return {key: p for key, p in self.pending.items() if p.question.key.purpose == purpose}

    def rounds_pending(self) -> set[Place]:
        """Return the rounds that have pending questions."""
        with self.store.lock:
            return {place_of(p.intent) for p in self.pending.values()}

    def next_deadline(self, purpose: str) -> float:
        """Return the deadline of the oldest pending question of a purpose, in seconds on the monotonic
        clock."""
        return min((p.since for p in self.of(purpose).values()), default=0.0) + self.deadline_s

    def collect(self, waiting: Mapping[Ticket, Pending], patience: float) -> bool:
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
                answered = [
                    (self.pending.pop((name, ticket)), answer)
                    for ticket, answer in arrived
                    if (name, ticket) in self.pending
                ]
                if answered:
                    self._record(answered)
                    has_come = True
        if not has_come:
            now = time.monotonic()
            due = [key for key, pending in waiting.items() if now >= pending.since + self.deadline_s]
            with self.store.lock:
                overdue = [self.pending.pop(key) for key in due if key in self.pending]
                self._record([(pending, _failed(pending)) for pending in overdue])
        return has_come

    def forget(self, purpose: str) -> None:
        """Drop the pending and lost questions of a purpose. Their answers are not fetched any more."""
        with self.store.lock:
            self.pending = {key: p for key, p in self.pending.items() if p.question.key.purpose != purpose}
            self.lost = [intent for intent in self.lost if intent.question.key.purpose != purpose]

    def _pending(self, intent: Intent, question: Question, age: float = 0.0) -> Pending:
        is_limited = self.budgets.get(question.key.purpose, Budget()).is_limited
        most = Budget.of(self.oracle(question.oracle).price(question)) if is_limited else Budget()
        return Pending(intent, question, question.oracle, time.monotonic() - age, most)

    def _record(self, answered: Sequence[tuple[Pending, Any]]) -> None:
        if not answered:
            return
        answers = []
        broken = []
        for pending, answer in answered:
            try:
                unit = self.oracle(pending.oracle).gives_steps
                with _naming_setting(pending.question.key.purpose):
                    sound = checked(answer, pending.question, pending.oracle, pending.most, unit)
                answers.append((pending.intent, whole(pending.intent, sound)))
            except OracleError as error:
                broken.append(error)
        self.settling.record(answers)
        if broken:
            raise broken[0]


@contextmanager
def _naming_setting(purpose: str) -> Iterator[None]:
    """A context that adds the setting that chose the oracle of a purpose to an `OracleError` about it."""
    try:
        yield
    except OracleError as error:
        if type(error) is not OracleError or purpose not in _CHOSEN_BY:
            raise
        raise OracleError(f"{error} ({_CHOSEN_BY[purpose]})") from error.__cause__ or error


def _failed(pending: Pending) -> Answer:
    """Return the answer of a question that failed at its deadline.

    The oracle may still work on the question and charge for it. So if the purpose has a budget, the answer
    has the question's highest price.
    """
    most = pending.most
    answer = nothing(pending.question, "failed", pending.oracle, time.monotonic() - pending.since)
    return replace(answer, queries=most.queries or 0, tokens=most.tokens or 0, cost=most.cost or 0.0)
