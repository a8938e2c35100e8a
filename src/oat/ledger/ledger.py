"""The ledger: what was asked, what came back, and which step learned from it.

A round of questions is on disk, with its trajectories, before anything is sent. A batch of answers is one
transaction, and the first answer of a question wins (`ledger/settling.py`). Which rows a step trains on, in
which order, is recorded before it trains; a step that has a record gets it and waits for nothing. So a run
that is killed and continued learns from the same rows in the same order. What was asked and not answered
before a kill is asked again by the first step that has no record, unless its oracle is durable
(`ledger/outstanding.py`).

What is known from earlier answers, or asked by an equal question already, is not asked (`ledger/cache.py`),
and what the budget does not allow is neither (`ledger/budgets.py`); both are decided and recorded with the
intent. Questions that await an equal one's answer get it in the transaction that records it. Where tokens or
money limit training, the questions of a round are asked in waves, and what cannot be paid shows when its turn
comes (`ledger/waves.py`).

Covered: a kill at any moment; many threads that ask. Not covered: two processes writing one ledger.
"""

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from threading import RLock
from types import MappingProxyType
from typing import Literal

from oat.control.silence import warn_of_silence
from oat.ledger.budgets import Spending
from oat.ledger.cache import Cache
from oat.ledger.intents import Intent, Known, whole
from oat.ledger.open_rounds import OpenRounds
from oat.ledger.outstanding import Outstanding
from oat.ledger.settling import Settling, close_unanswered
from oat.ledger.store import Store
from oat.ledger.versions import changes, take_up
from oat.ledger.waves import Waves, unpaid
from oat.oracles.base import Oracle
from oat.oracles.contract import nothing
from oat.seeds import Seeds
from oat.types import UNASKED, Answer, Feedback, Group, Item, Price, Question, Spent
from oat.types.budget import Budget

_Found = tuple[Intent, Answer, int | None]
"""A question, its answer and its label."""


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
        self.max_wait_s = math.inf if max_wait_s is None else max_wait_s
        self.max_age = max_age
        self.budgets = budgets or {}
        self.keep_groups = keep_groups
        self.release = release
        versions = {
            name: known_versions.get(name) or oracle.version or "" for name, oracle in oracles.items()
        }
        cacheable = {name for name, oracle in oracles.items() if oracle.cacheable}
        self.cache = Cache(store, repeats, versions, cacheable)
        self.rounds = OpenRounds(store)
        self.settling = Settling(store, seeds, labels)
        self.outstanding = Outstanding(
            store, oracles, self.rounds, self.settling, self.budgets, deadline_s, check_interrupt
        )
        oracle_of = self.outstanding.oracle
        self.waves = Waves(store, self.budgets, lambda question: oracle_of(question.oracle).price(question))
        self.spending = Spending(store, self.waves, oracle_of, self.cache, self.rounds.question)
        self.warned: set[str] = set()
        self._collecting = RLock()
        self._recover(take_up(store, versions))

    @property
    def reasked(self) -> int:
        """Questions that were asked once more, since a kill came between them and their answers."""
        return self.outstanding.reasked

    @property
    def reported(self) -> dict[str, float]:
        """What its oracles say of themselves, as metrics; of several that report the same, the one that
        training asks."""
        return {
            name: value for oracle in [*self.oracles.values()][::-1] for name, value in oracle.metrics.items()
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
        with self.store.lock:
            with self.store:
                quotes, paid = self.spending.quotes(purpose, questions)
                recorded = self.store.add_round(purpose, step, round, groups, questions, members, quotes)
                known = [_known(row, is_paid) for row, is_paid in zip(recorded, paid, strict=True)]
                answers = list(zip(recorded, known, strict=True))
                self.settling.add([(row, answer) for row, answer in answers if answer is not None])
                asked = [row for row, answer in answers if answer is None]
                if self.waves.covers(purpose):
                    self.waves.hold(asked)
                    asked = self._next_wave(purpose)
                else:
                    self.settling.complete([row for row in asked if row.others])
            self.rounds.add((purpose, step, round), groups, recorded)
            self.outstanding.submit([row for row in asked if row.is_sent])

    def take_feedback(self, step: int, count: int, purpose: str = "train") -> Feedback:
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
            with self.store.lock, self.store:
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
                self._close(found, step, expired)
        else:
            found = self.store.answers(self.store.taken(purpose, step))
        items = tuple(self.rounds.item(*each) for each in found)
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
        items = tuple(self.rounds.item(*each) for each in self.store.answers(self.store.taken("train", step)))
        self._forget()
        return items

    def give_up(self, step: int, purpose: str) -> None:
        """Close a step of a purpose that failed: nobody waits any more for what is unanswered, which counts
        as failed, and the record of the step has no answers. Those that came are known to later questions;
        what an oracle still says is left aside."""
        with self._collecting, self.store.lock:
            with self.store:
                close_unanswered(self.store, purpose)
                closed = self.store.takeable_ids(purpose, step, -1)
                self.store.add_take(purpose, step, [], closed)
                self._close(self._found(closed), step)
            self.waves.forget(purpose)
            self.outstanding.forget(purpose)
            self.settling.forget(purpose)
        self._forget()

    def price(self, questions: Sequence[Question]) -> Price:
        """The most that questions would cost if they were asked now; what is known costs nothing."""
        with self.store.lock:
            return self.spending.price(questions)

    def refuse(self, step: int, purpose: str, price: Price) -> None:
        """Record that a step asks nothing, since so much cannot be paid."""
        with self.store.lock, self.store:
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
            with self.store.lock, self.store:
                self.store.drop_groups(step - 1)

    def close(self) -> None:
        self.store.close()
        self.release()

    def _recover(self, changed: Collection[str]) -> None:
        """After a restart: attach the tickets of durable oracles, whose deadlines go on; the other
        unanswered intents are lost until a step needs new answers. Nobody awaits an answer that an oracle
        may have given before it changed, and what is known from then is asked again, where no budget is
        set aside for less."""
        with self.store:
            self.waves.begin()
        unanswered = []
        for row in self.store.unanswered():
            if self.waves.is_held(row):
                self.waves.hold([row])
                continue
            row = self.waves.as_asked(row)
            is_limited = self.budgets.get(row.question.key.purpose, Budget()).is_limited
            if row.question.oracle in changed and not self.outstanding.is_kept(row) and not is_limited:
                row = replace(row, cached=())
            self.outstanding.resume(row)
            unanswered.append(row)
        awaiting = map(self.waves.as_asked, self.store.waiting(-1))
        self.settling.complete(row for row in [*unanswered, *awaiting] if row.others)
        unpaid_ids = {
            id
            for purpose in self.budgets.keys() - self.waves.limited
            for id in self.store.unpaid_ids(purpose)
        }
        self.cache.resume(
            row
            for row in self.store.waiting(-1, 0, 1, 2)
            if row.id not in unpaid_ids and row.question.oracle not in changed
        )

    def _found(self, ids: Sequence[int]) -> list[_Found]:
        """Answered questions with their answers; they wait no more."""
        return self.store.answers([self.rounds.close(id) for id in ids])

    def _close(self, found: Sequence[_Found], step: int, expired: Sequence[int] = ()) -> None:
        """Remember the answers that a step took; nobody awaits them any more, nor those that expired. The
        caller holds the transaction."""
        for row, answer, _ in found:
            self.cache.keep(row, answer, step)
        rows = [row for row, *_ in found] + [self.rounds.close(id) for id in expired]
        self.cache.forget({row.question.key for row in rows})

    def _settle(self, purpose: str, step: int, count: int, oldest: int, seconds: float) -> None:
        """Take in what has come, also beyond what the step needs, and wait for what it lacks. What was not
        paid is no answer to wait for."""
        self.outstanding.ask_again(purpose)
        until = time.monotonic() + seconds
        patience = 0.0
        while True:
            with self._collecting:
                self._advance(purpose)
                waiting = self.outstanding.of(purpose)
                has_come = self.outstanding.collect(waiting, patience)
                is_enough = self._is_enough(purpose, step, count, oldest)
                is_over = is_enough or time.monotonic() >= until
                if not waiting or (is_over and not has_come):
                    return
                wake = min(until, self.outstanding.next_deadline(purpose))
                patience = 0.0 if is_enough else max(0.0, wake - time.monotonic())

    def _advance(self, purpose: str) -> None:
        """Ask the next wave, if the one before is settled."""
        with self.store.lock:
            if self.waves.is_ready(purpose):
                with self.store:
                    wave = self._next_wave(purpose)
                self.outstanding.submit(wave)

    def _next_wave(self, purpose: str) -> list[Intent]:
        """The questions to be sent of the next wave that has any; it is on record then. Empty: there is no
        such wave. The caller holds the transaction."""
        sent: list[Intent] = []
        while not sent and (wave := self.waves.next(purpose)):
            self.settling.complete([row for row in wave if row.others])
            sent = [row for row in wave if row.is_sent]
        for row, price, spent in self.waves.refusals:
            self.spending.say_unpaid(row.question, price, spent)
        self.waves.refusals.clear()
        return sent

    def _is_enough(self, purpose: str, step: int, count: int, oldest: int) -> bool:
        """Whether a step need not wait: its questions are answered; or, where it does not wait for each, as
        many others."""
        if self.max_wait_s == math.inf:
            return not self.store.lacks(purpose, step, count, oldest)
        return self.store.num_takeable(purpose, step, oldest) >= count

    def _forget(self) -> None:
        """Drop from memory the rounds that no waiting question belongs to."""
        self.rounds.forget(self.outstanding.rounds_pending())


def _known(row: Intent, is_paid: bool) -> Answer | None:
    """The answer of a question that nobody is asked; None: somebody is, for this one or for an equal one."""
    question = row.question
    if question.oracle == UNASKED:
        return nothing(question, "tie", UNASKED)
    if not is_paid:
        return unpaid(row)
    if not row.cached or not all(isinstance(value, Known) for value in row.cached):
        return None
    return whole(row, Answer(question.key, (), (), queries=0, by=question.oracle))
