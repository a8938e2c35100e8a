"""The ledger: what was asked, what came back, and which step learned from it.

A round of questions is on disk, with its trajectories, before anything is sent. A batch of answers is one
transaction, and the first answer of a question wins. Which rows a step trains on, in which order, is recorded
before it trains; a step that has a record gets it and waits for nothing. So a run that is killed and
continued learns from the same rows in the same order. What was asked and not answered before a kill is asked
again by the first step that has no record, unless its oracle is durable.

What is known from earlier answers, or asked by an equal question already, is not asked (`ledger/cache.py`),
and what the budget does not allow is neither (`ledger/budgets.py`); both are decided and recorded with the
intent. Questions that await an equal one's answer get it in the transaction that records it. Where tokens or
money limit training, the questions of a round are asked in waves, and what cannot be paid shows when its turn
comes (`ledger/waves.py`).

Covered: a kill at any moment; many threads that ask. Not covered: two processes writing one ledger.
"""

import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from threading import RLock
from types import MappingProxyType
from typing import Any, Literal

from oat.control.silence import warn_of_silence
from oat.errors import OracleError
from oat.ledger.asked import Asked, Known, rest, whole
from oat.ledger.budgets import Spending
from oat.ledger.cache import Cache
from oat.ledger.store import Store
from oat.ledger.versions import changes, take_up
from oat.ledger.waves import Waves, unpaid
from oat.oracles.base import Oracle, is_cacheable, metrics_of, price_of, version_of
from oat.oracles.contract import calling, checked, nothing, pairs_of, tickets_of
from oat.seeds import Seeds
from oat.types import UNASKED, Answer, Feedback, Group, Item, Key, Price, Question, Spent
from oat.types.budget import Budget

_Found = tuple[Asked, Answer, int | None]
"""A question, its answer and its label."""


@dataclass(frozen=True, eq=False)
class _Pending:
    """A question that an oracle has.

    Attributes:
        question: what it was sent: of a half-known question the rest.
        most: that it may cost.
    """

    asked: Asked
    question: Question
    oracle: str
    since: float
    most: Budget


class Ledger:
    """Asks, remembers, and hands out.

    Args:
        oracles: by address.
        labels: how the probability of a comparison becomes a label: above one half, or drawn with it from the
        question's own generator.
        deadline_s: seconds after its submission at which a question counts as failed.
        max_wait_s: seconds that a step of training waits for answers before it goes on with what it has;
        None: it waits for each of its questions.
        max_age: steps after its round at which an answer is too old to learn from; None is never.
        budgets: what may be spent, by purpose.
        repeats: answers of an item before they are used again; 0 asks every time.
        keep_groups: trajectories stay when nothing will read them again.
        known_versions: of oracles of which it is known that they are what they were in this version, whatever
        they say themselves.
        check_interrupt: called when an oracle has answered, before that is recorded; it may raise.
        release: called when it is closed, since nobody asks its oracles any more.
    """

    def __init__(
        self,
        store: Store,
        oracles: Mapping[str, Oracle],
        seeds: Seeds,
        *,
        labels: Literal["threshold", "bernoulli"],
        deadline_s: float,
        max_wait_s: float | None = None,
        max_age: int | None = None,
        budgets: Mapping[str, Budget] | None = None,
        repeats: int = 1,
        keep_groups: bool = False,
        known_versions: Mapping[str, str] = MappingProxyType({}),
        check_interrupt: Callable[[], None] = lambda: None,
        release: Callable[[], None] = lambda: None,
    ):
        self.store = store
        self.oracles = oracles
        self.seeds = seeds
        self.labels = labels
        self.deadline_s = deadline_s
        self.max_wait_s = math.inf if max_wait_s is None else max_wait_s
        self.max_age = max_age
        self.budgets = budgets or {}
        self.check_interrupt, self.release = check_interrupt, release
        versions = {name: known_versions.get(name) or version_of(oracle) for name, oracle in oracles.items()}
        self.cache, self.keep_groups = Cache(store, repeats, versions) if repeats else None, keep_groups
        self.pending: dict[tuple[str, str], _Pending] = {}
        self.groups: dict[tuple[str, int, int], list[Group]] = {}
        self.waiting: dict[int, Asked] = {}
        self.awaiting: dict[Key, dict[int, Asked]] = {}
        self.lost: list[Asked] = []
        self.reasked = store.asked_again()
        self.warned: set[str] = set()
        self.waves = Waves(
            store, self.budgets, lambda question: price_of(self._oracle(question.oracle), question)
        )
        self.spending = Spending(store, self.waves, self._oracle, self.cache, self._row)
        self._writing, self._collecting = RLock(), RLock()
        self._recover(take_up(store, versions))

    @property
    def reported(self) -> dict[str, float]:
        """What its oracles say of themselves, as metrics; of several that report the same, the one that
        training asks."""
        return {
            name: value
            for oracle in [*self.oracles.values()][::-1]
            for name, value in metrics_of(oracle).items()
        }

    def asked(self, step: int, round: int, purpose: str = "train") -> int:
        """Questions in recorded rounds before (step, round): a count at the cursor, whatever a replay finds
        beyond it."""
        return self.store.asked(purpose, step, round)

    def recalls(self, step: int, round: int, purpose: str = "train") -> bool:
        """Whether this round is on disk, so that nothing needs sampling or asking."""
        return self.store.has_round(purpose, step, round)

    def has_taken(self, step: int, purpose: str = "train") -> bool:
        """Whether what this step learns from is recorded."""
        return self.store.has_take(purpose, step)

    def ask(
        self,
        step: int,
        round: int,
        groups: Sequence[Group],
        questions: Sequence[Question],
        purpose: str = "train",
    ) -> None:
        """Record a round of intents with its trajectories, then submit what is neither known nor beyond the
        budget; in waves, the first of them."""
        member_of = {group.prompt.occurrence: number for number, group in enumerate(groups)}
        members = [member_of[question.key.occurrence] for question in questions]
        with self._writing:
            with self.store:
                quotes, paid = self.spending.quotes(purpose, questions)
                recorded = self.store.add_round(purpose, step, round, groups, questions, members, quotes)
                known = [_known(row, is_paid) for row, is_paid in zip(recorded, paid, strict=True)]
                found = [
                    (row.id, answer, self._label(row.question, answer))
                    for row, answer in zip(recorded, known, strict=True)
                    if answer
                ]
                self.store.add_answers(found)
                asked = [row for row, answer in zip(recorded, known, strict=True) if answer is None]
                if self.waves.covers(purpose):
                    self.waves.hold(asked)
                    asked = self._next_wave(purpose)
                else:
                    self._await([row for row in asked if row.others])
            self.groups[purpose, step, round] = list(groups)
            self.waiting.update({row.id: row for row in recorded})
            self._submit([row for row in asked if row.is_sent])

    def take(self, step: int, count: int, purpose: str = "train") -> Feedback:
        """The answers a step learns from: its record if it has one, else those of the next `count` questions
        in the order they were asked, which are recorded first.

        It waits until each of these is answered or past its deadline, so that what it takes does not depend
        on when answers come. With `max_wait_s` a step of training takes the first `count` that are answered
        instead: it waits until there are as many, or the time is over. Answers to questions that are older
        than `max_age` are recorded as too late, and not handed out.
        """
        if not self.has_taken(step, purpose):
            oldest = 0 if self.max_age is None or purpose != "train" else step - self.max_age
            self._settle(purpose, step, count, oldest, self.max_wait_s if purpose == "train" else math.inf)
            with self._writing, self.store:
                expired = self.store.takeable_ids(purpose, oldest - 1, -1)
                ids = self.store.takeable_ids(purpose, step, count, oldest)
                found = self._found(ids)
                self.store.add_take(
                    purpose,
                    step,
                    ids,
                    expired,
                    self.spending.refused(row for row, answer, _ in found if "unpaid" in answer.marks),
                )
                self._keep(found, step)
                self._close([row for row, *_ in found] + [self._closed(id) for id in expired])
        else:
            found = self.store.answers(self.store.taken(purpose, step))
        items = tuple(self._item(*each) for each in found)
        warn_of_silence(self.warned, purpose, step, items)
        self._forget()
        price = self.store.take_price(purpose, step)
        return Feedback(step, items, price.queries, self.store.num_expired(purpose, step), cost=price.cost)

    def changes(self, row: int, *, is_evaluated: bool) -> int:
        """How many changes of an oracle came before what a row of metrics tells of."""
        return changes(self.store, row, is_evaluated=is_evaluated)

    def num_taken(self, step: int) -> int:
        """Questions that a step of training took, by its record."""
        return self.store.num_taken("train", step)

    def taken(self, step: int) -> tuple[Item, ...]:
        """What a step of training took, by its record."""
        items = tuple(self._item(*each) for each in self.store.answers(self.store.taken("train", step)))
        self._forget()
        return items

    def give_up(self, step: int, purpose: str) -> None:
        """Close a step of a purpose that failed: nobody waits any more for what is unanswered, which counts
        as failed, and the record of the step has no answers. Those that came are known to later questions;
        what an oracle still says is left aside."""
        with self._collecting, self._writing:
            with self.store:
                close_unanswered(self.store, purpose)
                closed = self.store.takeable_ids(purpose, step, -1)
                self.store.add_take(purpose, step, [], closed)
                found = self._found(closed)
                self._keep(found, step)
                self._close([row for row, *_ in found])
            self.waves.forget(purpose)
            self.pending = {key: p for key, p in self.pending.items() if p.question.key.purpose != purpose}
            self.lost = [row for row in self.lost if row.question.key.purpose != purpose]
            self.awaiting = {key: rows for key, rows in self.awaiting.items() if key.purpose != purpose}
        self._forget()

    def price(self, questions: Sequence[Question]) -> Price:
        """The most that questions would cost if they were asked now; what is known costs nothing."""
        with self._writing:
            return self.spending.price(questions)

    def refuse(self, step: int, purpose: str, price: Price) -> None:
        """Record that a step asks nothing, since so much cannot be paid."""
        with self._writing, self.store:
            self.store.add_take(purpose, step, [], refused=price)

    def refused(self, step: int, purpose: str) -> Price | None:
        """What could not be paid by the newest record of a purpose up to this step."""
        return self.store.last_refused(purpose, step)

    def is_spent(self, step: int, *, ahead: bool = False) -> bool:
        """As `Spending.is_spent`."""
        return self.spending.is_spent(step, ahead=ahead)

    def committed(self, purpose: str) -> Price:
        """What was taken, and the most that everything asked since may still take."""
        return self.store.committed(purpose)

    def spent_before(self, step: int, purpose: str = "train") -> Spent:
        """As `Spending.spent_before`."""
        return self.spending.spent_before(step, purpose)

    def drop(self, step: int) -> None:
        """No step before this one will be replayed: drop the trajectories that only earlier ones read; its
        row may still ask for the step before."""
        if not self.keep_groups:
            with self._writing, self.store:
                self.store.drop_groups(step - 1)

    def close(self) -> None:
        self.store.close()
        self.release()

    def _recover(self, changed: Collection[str]) -> None:
        """After a restart: attach the tickets of durable oracles, whose deadlines go on; the other
        unanswered intents are lost until a step needs new answers. Nobody awaits an answer that an oracle
        may have given before it changed, and what is known from then is asked again, where no budget is
        set aside for less."""
        unanswered = []
        with self.store:
            self.waves.begin()
        for row in self.store.unanswered():
            if self.waves.is_held(row):
                self.waves.hold([row])
                continue
            row, oracle = self.waves.as_asked(row), row.question.oracle
            is_kept = oracle in self.oracles and self.oracles[oracle].durable and row.ticket is not None
            if (
                oracle in changed
                and not is_kept
                and not self.budgets.get(row.question.key.purpose, Budget()).is_limited
            ):
                row = replace(row, cached=())
            if is_kept:
                age = max(0.0, time.time() - row.sent) if row.sent is not None else 0.0
                self.pending[oracle, str(row.ticket)] = self._as_sent(
                    row, rest(row.question, row.cached), age
                )
            elif row.is_sent:
                self.lost.append(row)
            unanswered.append(row)
        self._await(
            row for row in [*unanswered, *map(self.waves.as_asked, self.store.waiting(-1))] if row.others
        )
        if self.cache is not None:
            gone = {
                id
                for purpose in self.budgets.keys() - self.waves.limited
                for id in self.store.unpaid_ids(purpose)
            }
            asking = [
                row
                for row in self.store.waiting(-1, 0, 1, 2)
                if row.id not in gone and row.question.oracle not in changed
            ]
            self.cache.resume(row for row in asking if self._is_cached(row.question))

    def _found(self, ids: Sequence[int]) -> list[_Found]:
        """Answered questions with their answers; they wait no more."""
        return self.store.answers([self._closed(id) for id in ids])

    def _closed(self, id: int) -> Asked:
        """A question that waits no more."""
        return self.waiting.pop(id) if id in self.waiting else self.store.by_id(id)

    def _row(self, id: int) -> Asked:
        """A question that waits."""
        if id not in self.waiting:
            self.waiting[id] = self._with_ids(self.store.by_id(id))
        return self.waiting[id]

    def _keep(self, found: Sequence[_Found], step: int) -> None:
        for row, answer, _ in found:
            if self.cache is not None and self._is_cached(row.question):
                self.cache.keep(row, answer, step)

    def _is_cached(self, question: Question) -> bool:
        return question.oracle in self.oracles and is_cacheable(self.oracles[question.oracle])

    def _close(self, taken: Sequence[Asked]) -> None:
        """Nobody awaits the answers of these any more."""
        if self.cache is not None:
            self.cache.forget({row.question.key for row in taken})

    def _await(self, rows: Iterable[Asked]) -> None:
        """Complete the answers of which everything is there now; the other questions await what is missing.
        The caller holds the transaction."""
        for row in rows:
            found = {
                key: self.store.values(key)
                for key in row.others | ({row.question.key} if row.is_sent else set())
            }
            brought = {key: values for key, values in found.items() if values is not None}
            for key in found.keys() - brought.keys():
                self.awaiting.setdefault(key, {})[row.id] = row
            if len(brought) < len(found):
                continue
            if row.is_sent:
                self.store.complete(row.id, whole(row, self.store.answer(row)[0], brought))
            else:
                answer = whole(
                    row, Answer(row.question.key, (), (), queries=0, by=row.question.oracle), brought
                )
                self.store.add_answers([(row.id, answer, self._label(row.question, answer))])

    def _bring(self, answered: Iterable[Key]) -> None:
        """Give what has just been answered to the questions that await it; the caller holds the
        transaction."""
        rows: dict[int, Asked] = {}
        for key in answered:
            rows |= self.awaiting.pop(key, {})
        self._await(rows.values())

    def _ask_again(self, purpose: str) -> None:
        """Submit what was lost of a purpose. Steps that have a record need none of it, so a finished run, or
        a replay of one, asks nothing."""
        with self._writing:
            lost = [row for row in self.lost if row.question.key.purpose == purpose]
            if not lost:
                return
            self.lost = [row for row in self.lost if row.question.key.purpose != purpose]
            self.reasked += len(lost)
            with self.store:
                self.store.count_again(row.id for row in lost)
            self._submit(lost)

    def _advance(self, purpose: str) -> None:
        """Ask the next wave, if the one before is settled."""
        with self._writing:
            if self.waves.is_ready(purpose):
                with self.store:
                    wave = self._next_wave(purpose)
                self._submit([row for row in wave if row.is_sent])

    def _next_wave(self, purpose: str) -> list[Asked]:
        """The next wave of which anything is to be sent, where there is one, on record; the caller holds the
        transaction."""
        sent: list[Asked] = []
        while not sent and (wave := self.waves.next(purpose)):
            self._await([row for row in wave if row.others])
            sent = [row for row in wave if row.is_sent]
        for row, price, spent in self.waves.refusals:
            self.spending.say_unpaid(row.question, price, spent)
        self.waves.refusals.clear()
        return sent

    def _with_ids(self, row: Asked) -> Asked:
        """A question with its token ids, also after a restart."""
        if row.question.ids:
            return row
        samples = self._group(row).trajectories
        return replace(
            row,
            question=replace(
                row.question, ids=tuple(samples[pick].completion for pick in row.question.picks)
            ),
        )

    def _submit(self, rows: Sequence[Asked]) -> None:
        for name in sorted({row.question.oracle for row in rows}):
            oracle, mine = (
                self._oracle(name),
                [self._with_ids(row) for row in rows if row.question.oracle == name],
            )
            sent = [rest(row.question, row.cached) for row in mine]
            known = {ticket for owner, ticket in list(self.pending) if owner == name}
            tickets = tickets_of(calling(name, oracle.submit, sent), len(mine), name, known)
            if oracle.durable:
                with self.store:
                    self.store.set_tickets(
                        [(ticket, time.time(), row.id) for ticket, row in zip(tickets, mine, strict=True)]
                    )
            self.pending.update(
                {
                    (name, ticket): self._as_sent(row, question)
                    for ticket, row, question in zip(tickets, mine, sent, strict=True)
                }
            )

    def _as_sent(self, row: Asked, question: Question, age: float = 0.0) -> _Pending:
        is_limited = self.budgets.get(question.key.purpose, Budget()).is_limited
        most = Budget.of(price_of(self._oracle(question.oracle), question)) if is_limited else Budget()
        return _Pending(row, question, question.oracle, time.monotonic() - age, most)

    def _oracle(self, name: str) -> Oracle:
        if name not in self.oracles:
            raise OracleError(
                f"a question is addressed to the oracle {name!r}, which this run does not have; it has "
                f"{', '.join(self.oracles)}"
            )
        return self.oracles[name]

    def _settle(self, purpose: str, step: int, count: int, oldest: int, seconds: float) -> None:
        """Take in what has come, also beyond what the step needs, and wait for what it lacks. What was not
        paid is no answer to wait for."""
        self._ask_again(purpose)
        until, patience = time.monotonic() + seconds, 0.0
        while True:
            with self._collecting:
                self._advance(purpose)
                waiting = self._waiting(purpose)
                has_come = self._collect(waiting, patience)
                is_enough = self._is_enough(purpose, step, count, oldest)
                if (
                    (is_enough and not has_come)
                    or not waiting
                    or (time.monotonic() >= until and not has_come)
                ):
                    return
                expiry = (
                    min((p.since for p in self._waiting(purpose).values()), default=0.0) + self.deadline_s
                )
                patience = 0.0 if is_enough else max(0.0, min(until, expiry) - time.monotonic())

    def _is_enough(self, purpose: str, step: int, count: int, oldest: int) -> bool:
        """Whether a step need not wait: its questions are answered; or, where it does not wait for each, as
        many others."""
        if self.max_wait_s == math.inf:
            return not self.store.lacks(purpose, step, count, oldest)
        return self.store.num_takeable(purpose, step, oldest) >= count

    def _waiting(self, purpose: str) -> dict[tuple[str, str], _Pending]:
        return {key: p for key, p in list(self.pending.items()) if p.question.key.purpose == purpose}

    def _collect(self, waiting: Mapping[tuple[str, str], _Pending], patience: float) -> bool:
        """One round over the oracles: what is there, or arrives in so many seconds, in one transaction an
        oracle. Where nothing comes, what is past its deadline has failed.

        Returns:
            Whether anything came.
        """
        names, has_come = sorted({oracle for oracle, _ in waiting}), False
        for name in names:
            tickets = [ticket for oracle, ticket in waiting if oracle == name]
            arrived = pairs_of(
                calling(
                    name,
                    self._oracle(name).collect,
                    tickets,
                    min(patience, 1.0) if len(names) > 1 else patience,
                ),
                name,
            )
            self.check_interrupt()
            answered = [
                (self.pending.pop((name, ticket)), answer)
                for ticket, answer in arrived
                if (name, ticket) in self.pending
            ]
            if answered:
                self._record(answered)
                has_come = True
        if not has_come:
            overdue = [
                key
                for key, p in waiting.items()
                if key in self.pending and time.monotonic() >= p.since + self.deadline_s
            ]
            self._record([(late := self.pending.pop(key), _failed(late)) for key in overdue])
        return has_come

    def _record(self, answered: Sequence[tuple[_Pending, Any]]) -> None:
        if not answered:
            return
        rows, broken = [], []
        for pending, answer in answered:
            try:
                full = whole(pending.asked, checked(answer, pending.question, pending.oracle, pending.most))
            except OracleError as error:
                broken.append(error)
            else:
                rows.append((pending.asked.id, full, self._label(pending.asked.question, full)))
        with self._writing, self.store:
            self.store.add_answers(rows)
            self._bring(answer.key for _, answer, _ in rows)
        if broken:
            raise broken[0]

    def _label(self, question: Question, answer: Answer) -> int | None:
        if question.kind != "compare" or answer.marks[0] != "ok":
            return None
        probability = answer.values[0]
        if probability == 0.5:
            return None
        if self.labels == "bernoulli":
            return 0 if self.seeds.at("label", str(question.key)).random() < probability else 1
        return int(probability < 0.5)

    def _item(self, row: Asked, answer: Answer, label: int | None) -> Item:
        return Item(self._group(row), row.question, answer, label)

    def _group(self, row: Asked) -> Group:
        key = row.question.key
        place = (key.purpose, key.step, key.round)
        groups = self.groups.get(place)
        if groups is None:
            groups = self.groups[place] = self.store.groups(*place)
        return groups[row.member]

    def _forget(self) -> None:
        """Drop from memory the rounds that no waiting question belongs to."""
        waiting = {
            (p.question.key.purpose, p.question.key.step, p.question.key.round)
            for p in list(self.pending.values())
        }
        self.groups = {place: groups for place, groups in self.groups.items() if place in waiting}


def close_unanswered(store: Store, *purposes: str) -> None:
    """What was asked for these purposes and nobody has answered counts as failed; the caller holds the
    transaction."""
    rows = [row for row in store.unanswered() if row.question.key.purpose in purposes]
    answers = [
        whole(row, nothing(rest(row.question, row.cached), "failed", row.question.oracle), missing="failed")
        for row in rows
    ]
    store.add_answers([(row.id, answer, None) for row, answer in zip(rows, answers, strict=True)])
    for purpose in purposes:
        store.fail_awaited(purpose)


def _known(row: Asked, is_paid: bool) -> Answer | None:
    """The answer of a question that nobody is asked; None: somebody is, for this one or for an equal one."""
    question = row.question
    if question.oracle == UNASKED:
        return nothing(question, "tie", UNASKED)
    if not is_paid:
        return unpaid(row)
    if not row.cached or not all(isinstance(value, Known) for value in row.cached):
        return None
    return whole(row, Answer(question.key, (), (), queries=0, by=question.oracle))


def _failed(pending: _Pending) -> Answer:
    """Past its deadline. What its oracle is at may still be paid, so that where there is a budget it counts
    at its most."""
    most = pending.most
    answer = nothing(pending.question, "failed", pending.oracle, time.monotonic() - pending.since)
    return replace(answer, queries=most.queries or 0, tokens=most.tokens or 0, cost=most.cost or 0.0)
