"""The questions that oracles have: submitted, collected, failed at their deadline, and taken up again after a
restart."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from oat.errors import OracleError
from oat.ledger.intents import Intent, rest, whole
from oat.ledger.open_rounds import OpenRounds, Place, place_of
from oat.ledger.settling import Settling
from oat.ledger.store import Store
from oat.oracles.base import Oracle
from oat.oracles.contract import calling, checked, nothing, pairs_of, tickets_of
from oat.types import Answer, Question
from oat.types.budget import Budget

Ticket = tuple[str, str]
"""The address of an oracle, and the ticket that it gave."""


@dataclass(frozen=True, eq=False)
class Pending:
    """A question that an oracle has.

    Attributes:
        question: what the oracle was sent; of a half-known question the rest.
        since: when it was sent, on the monotonic clock.
        most: the most that it may cost; without limits where its purpose has no budget.
    """

    asked: Intent
    question: Question
    oracle: str
    since: float
    most: Budget


class Outstanding:
    """Sends questions to oracles and fetches their answers.

    Args:
        budgets: by purpose.
        deadline_s: seconds after its submission at which a question counts as failed.
        check_interrupt: called when an oracle has answered, before that is recorded; it may raise.

    Attributes:
        pending: the questions that oracles have.
        lost: questions that were sent before a restart to oracles that do not keep them.
        reasked: how many questions were sent once more after a restart.
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
        """The oracle of an address.

        Raises:
            OracleError: the run has none there.
        """
        if name not in self.oracles:
            raise OracleError(
                f"a question is addressed to the oracle {name!r}, which this run does not have; it has "
                f"{', '.join(self.oracles)}"
            )
        return self.oracles[name]

    def submit(self, rows: Sequence[Intent]) -> None:
        """Send questions to their oracles, oracle by oracle; of a half-known question the rest.

        Raises:
            OracleError: an oracle raises, or returns no tickets that can be used.
        """
        for name in sorted({row.question.oracle for row in rows}):
            oracle = self.oracle(name)
            mine = [self.rounds.with_ids(row) for row in rows if row.question.oracle == name]
            sent = [rest(row.question, row.cached) for row in mine]
            open_tickets = {ticket for owner, ticket in list(self.pending) if owner == name}
            tickets = tickets_of(calling(name, oracle.submit, sent), len(mine), name, open_tickets)
            if oracle.durable:
                now = time.time()
                with self.store:
                    self.store.set_tickets(
                        [(ticket, now, row.id) for ticket, row in zip(tickets, mine, strict=True)]
                    )
            self.pending.update(
                {
                    (name, ticket): self._pending(row, question)
                    for ticket, row, question in zip(tickets, mine, sent, strict=True)
                }
            )

    def is_kept(self, row: Intent) -> bool:
        """Whether a question that was sent before a restart still lies with its oracle."""
        oracle = self.oracles.get(row.question.oracle)
        return oracle is not None and oracle.durable and row.ticket is not None

    def resume(self, row: Intent) -> None:
        """Take up an unanswered question after a restart: attached again where its oracle keeps it, with the
        deadline that it had; else lost until `ask_again`."""
        if self.is_kept(row):
            age = max(0.0, time.time() - row.sent) if row.sent is not None else 0.0
            ticket = (row.question.oracle, str(row.ticket))
            self.pending[ticket] = self._pending(row, rest(row.question, row.cached), age)
        elif row.is_sent:
            self.lost.append(row)

    def ask_again(self, purpose: str) -> None:
        """Submit what was lost of a purpose. Only steps without a record call this, so a finished run, or a
        replay of one, asks nothing."""
        with self.store.lock:
            lost = [row for row in self.lost if row.question.key.purpose == purpose]
            if not lost:
                return
            self.lost = [row for row in self.lost if row.question.key.purpose != purpose]
            self.reasked += len(lost)
            with self.store:
                self.store.count_again(row.id for row in lost)
            self.submit(lost)

    def of(self, purpose: str) -> dict[Ticket, Pending]:
        """The questions of a purpose that oracles have."""
        return {key: p for key, p in list(self.pending.items()) if p.question.key.purpose == purpose}

    def rounds_pending(self) -> set[Place]:
        """The rounds of which oracles have questions."""
        return {place_of(p.asked) for p in list(self.pending.values())}

    def next_deadline(self, purpose: str) -> float:
        """When the oldest question of a purpose fails, on the monotonic clock."""
        return min((p.since for p in self.of(purpose).values()), default=0.0) + self.deadline_s

    def collect(self, waiting: Mapping[Ticket, Pending], patience: float) -> bool:
        """Ask each oracle once for answers, and record what is there or arrives in so many seconds, in one
        transaction an oracle. Where nothing comes, questions past their deadline are recorded as failed.

        Returns:
            Whether anything came.

        Raises:
            OracleError: an oracle raises, or gives an answer that breaks the contract; sound answers that
            came with it are recorded first.
        """
        has_come = False
        names = sorted({oracle for oracle, _ in waiting})
        for name in names:
            tickets = [ticket for oracle, ticket in waiting if oracle == name]
            seconds = min(patience, 1.0) if len(names) > 1 else patience
            arrived = pairs_of(calling(name, self.oracle(name).collect, tickets, seconds), name)
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
            now = time.monotonic()
            overdue = [
                key for key, p in waiting.items() if key in self.pending and now >= p.since + self.deadline_s
            ]
            self._record([(late := self.pending.pop(key), _failed(late)) for key in overdue])
        return has_come

    def forget(self, purpose: str) -> None:
        """Drop the questions of a purpose; answers that still come are ignored."""
        self.pending = {key: p for key, p in self.pending.items() if p.question.key.purpose != purpose}
        self.lost = [row for row in self.lost if row.question.key.purpose != purpose]

    def _pending(self, row: Intent, question: Question, age: float = 0.0) -> Pending:
        is_limited = self.budgets.get(question.key.purpose, Budget()).is_limited
        most = Budget.of(self.oracle(question.oracle).price(question)) if is_limited else Budget()
        return Pending(row, question, question.oracle, time.monotonic() - age, most)

    def _record(self, answered: Sequence[tuple[Pending, Any]]) -> None:
        if not answered:
            return
        answers = []
        broken = []
        for pending, answer in answered:
            try:
                sound = checked(answer, pending.question, pending.oracle, pending.most)
                answers.append((pending.asked, whole(pending.asked, sound)))
            except OracleError as error:
                broken.append(error)
        self.settling.record(answers)
        if broken:
            raise broken[0]


def _failed(pending: Pending) -> Answer:
    """The answer at the deadline. What the oracle is at may still be paid, so where there is a budget the
    question counts at its most."""
    most = pending.most
    answer = nothing(pending.question, "failed", pending.oracle, time.monotonic() - pending.since)
    return replace(answer, queries=most.queries or 0, tokens=most.tokens or 0, cost=most.cost or 0.0)
