"""The ledger: what was asked, what came back, and which step learned from it.

A round of questions is on disk, with its trajectories, before anything is sent. A batch of answers is one transaction, and the first answer
of a question wins. Which rows a step trains on, in which order, is recorded before it trains; a step that has a record gets it and waits for
nothing. So a run that is killed and continued learns from the same rows in the same order. What was asked and not answered before a kill is
asked again by the first step that has no record, unless its oracle is durable.

Covered: a kill at any moment. Not covered: two processes writing one ledger.
"""

import math
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any, Literal, get_args

from oat.errors import OatError, OracleError
from oat.oracles.base import Oracle
from oat.seeds import Seeds
from oat.store import Asked, Store
from oat.types import UNASKED, Answer, Feedback, Group, Item, Mark, Question


@dataclass(frozen=True, eq=False)
class _Pending:
    asked: Asked
    oracle: str
    since: float


class Ledger:
    """Asks, remembers, and hands out.

    Args:
        oracles: by address.
        labels: how the probability of a comparison becomes a label: above one half, or drawn with it from the question's own generator.
        deadline_s: seconds after its submission at which a question counts as failed.
    """

    def __init__(self, store: Store, oracles: Mapping[str, Oracle], seeds: Seeds, *, labels: Literal["threshold", "bernoulli"], deadline_s: float):
        self.store, self.oracles, self.seeds, self.labels, self.deadline_s = store, oracles, seeds, labels, deadline_s
        self.pending: dict[tuple[str, str], _Pending] = {}
        self.groups: dict[tuple[str, int, int], list[Group]] = {}
        self.lost: list[Asked] = []
        self.reasked = store.asked_again()
        self.warned: set[str] = set()
        self._recover()

    def asked(self, step: int, round: int, purpose: str = "train") -> int:
        """Questions in recorded rounds before (step, round): a count at the cursor, whatever a replay finds beyond it."""
        return self.store.asked(purpose, step, round)

    def recalls(self, step: int, round: int, purpose: str = "train") -> bool:
        """Whether this round is on disk, so that nothing needs sampling or asking."""
        return self.store.has_round(purpose, step, round)

    def has_taken(self, step: int, purpose: str = "train") -> bool:
        """Whether what this step learns from is recorded."""
        return self.store.has_take(purpose, step)

    def ask(self, step: int, round: int, groups: Sequence[Group], questions: Sequence[Question], purpose: str = "train") -> None:
        """Record a round of intents with its trajectories, then submit it."""
        member_of = {group.prompt.occurrence: number for number, group in enumerate(groups)}
        members = [member_of[question.key.occurrence] for question in questions]
        with self.store:
            self.store.add_round(purpose, step, round, groups, questions, members)
            recorded = self.store.round_questions(purpose, step, round)
            self.store.add_answers([(row.id, _unasked(row.question), None) for row in recorded if row.question.oracle == UNASKED])
        self.groups[purpose, step, round] = list(groups)
        self._submit([row for row in recorded if row.question.oracle != UNASKED])

    def take(self, step: int, count: int, seconds: float = math.inf, purpose: str = "train") -> Feedback:
        """The answers a step learns from: its record if it has one, else the next `count` takeable questions, recorded first.

        Waits until `count` are takeable, nothing is pending, or `seconds` are over; then records what it has.
        """
        if not self.has_taken(step, purpose):
            self._settle(purpose, step, count, seconds)
            with self.store:
                rows = self.store.takeable(purpose, step, count)
                self.store.add_take(purpose, step, self.store.spent(purpose), [row.id for row in rows])
        items = tuple(self._item(row) for row in self.store.taken(purpose, step))
        self._warn_of_silence(purpose, step, items)
        self._forget(purpose, step)
        return Feedback(step, items, self.store.take_queries(purpose, step))

    def spent(self, purpose: str = "train") -> int:
        """Priced items answered so far."""
        return self.store.spent(purpose)

    def queries_before(self, step: int, purpose: str = "train") -> int:
        """Queries at the take of the step before; 0 before the first."""
        return self.store.take_queries(purpose, step - 1) if self.store.has_take(purpose, step - 1) else 0

    def close(self) -> None:
        self.store.close()

    def _recover(self) -> None:
        """After a restart: attach the tickets of durable oracles; the other unanswered intents are lost until a step needs new answers."""
        for row in self.store.unanswered():
            oracle = row.question.oracle
            if oracle in self.oracles and self.oracles[oracle].durable and row.ticket is not None:
                self.pending[oracle, row.ticket] = _Pending(row, oracle, time.monotonic())
            else:
                self.lost.append(row)

    def _ask_again(self) -> None:
        """Submit what was lost. Steps that have a record need none of it, so a finished run, or a replay of one, asks nothing."""
        lost, self.lost = self.lost, []
        self.reasked += len(lost)
        with self.store:
            self.store.count_again(row.id for row in lost)
        self._submit(lost)

    def _submit(self, rows: Sequence[Asked]) -> None:
        for name in sorted({row.question.oracle for row in rows}):
            oracle, mine = self._oracle(name), [row for row in rows if row.question.oracle == name]
            tickets = list(_calling(name, oracle.submit, [row.question for row in mine]))
            known = {ticket for owner, ticket in self.pending if owner == name}
            if len(tickets) != len(mine) or len({*tickets} - known) != len(mine) or not all(isinstance(ticket, str) for ticket in tickets):
                raise OracleError(
                    f"oracle {name} gave the tickets {str(tickets)[:80]} for {len(mine)} questions; `submit` must return one string a question, "
                    "each different from all others"
                )
            if oracle.durable:
                with self.store:
                    self.store.set_tickets(zip(tickets, [row.id for row in mine], strict=True))
            now = time.monotonic()
            self.pending.update({(name, ticket): _Pending(row, name, now) for ticket, row in zip(tickets, mine, strict=True)})

    def _oracle(self, name: str) -> Oracle:
        if name not in self.oracles:
            raise OracleError(f"a question is addressed to the oracle {name!r}, which this run does not have; it has {', '.join(self.oracles)}")
        return self.oracles[name]

    def _settle(self, purpose: str, step: int, count: int, seconds: float) -> None:
        self._ask_again()
        until = time.monotonic() + seconds
        while self.store.num_takeable(purpose, step) < count:
            waiting = {key: p for key, p in self.pending.items() if p.asked.question.key.purpose == purpose}
            if not waiting or time.monotonic() >= until:
                return
            self._collect(waiting, until)

    def _collect(self, waiting: Mapping[tuple[str, str], _Pending], until: float) -> None:
        """One round over the oracles: what is there, or arrives before the first deadline, in one transaction an oracle."""
        expiry = min(p.since for p in waiting.values()) + self.deadline_s
        patience = max(0.0, min(until, expiry) - time.monotonic())
        names = sorted({oracle for oracle, _ in waiting})
        for name in names:
            tickets = [ticket for oracle, ticket in waiting if oracle == name]
            arrived = _calling(name, self._oracle(name).collect, tickets, min(patience, 1.0) if len(names) > 1 else patience)
            self._record([(self.pending.pop((name, ticket)), answer) for ticket, answer in arrived if (name, ticket) in self.pending])
        overdue = [key for key, p in waiting.items() if key in self.pending and time.monotonic() >= p.since + self.deadline_s]
        self._record([(late := self.pending.pop(key), _failed(late)) for key in overdue])

    def _record(self, answered: Sequence[tuple[_Pending, Answer]]) -> None:
        if not answered:
            return
        rows = []
        for pending, answer in answered:
            sound = _checked(pending, answer)
            rows.append((pending.asked.id, sound, self._label(pending.asked.question, sound)))
        with self.store:
            self.store.add_answers(rows)

    def _label(self, question: Question, answer: Answer) -> int | None:
        if question.kind != "compare" or answer.marks[0] != "ok":
            return None
        probability = answer.values[0]
        if self.labels == "bernoulli":
            return 0 if self.seeds.at("label", str(question.key)).random() < probability else 1
        return None if probability == 0.5 else int(probability < 0.5)

    def _item(self, row: Asked) -> Item:
        key = row.question.key
        place = (key.purpose, key.step, key.round)
        if place not in self.groups:
            self.groups[place] = self.store.groups(*place)
        answer, label = self.store.answer(row)
        return Item(self.groups[place][row.member], row.question, answer, label)

    def _warn_of_silence(self, purpose: str, step: int, items: Sequence[Item]) -> None:
        """Say once what would otherwise only be counted: an oracle that answers nothing leaves a run that learns nothing."""
        asked = [item for item in items if item.question.oracle != UNASKED]
        marks = {mark for item in asked for mark in item.answer.marks}
        if not marks or not marks <= {"abstain", "failed"} or purpose in self.warned:
            return
        self.warned.add(purpose)
        names = " and ".join(sorted({item.question.oracle for item in asked}))
        what, lost = (f"step {step}", "it learns nothing") if purpose == "train" else (f"the evaluation after {step} steps", "it has no result")
        hints = {
            "abstain": "it abstained: look at prompts.reference_key and the columns of the data that it reads",
            "failed": "it failed: look at its own log and at oracle.deadline_s",
        }
        hint = "; ".join(hints[mark] for mark in sorted(marks))
        warnings.warn(f"{what}: oracle {names} gave no usable answer to any of {len(asked)} questions, so {lost}; {hint}", stacklevel=3)

    def _forget(self, purpose: str, step: int) -> None:
        """Drop from memory the rounds that no waiting question belongs to."""
        waiting = {(p.asked.question.key.purpose, p.asked.question.key.step, p.asked.question.key.round) for p in self.pending.values()}
        self.groups = {place: groups for place, groups in self.groups.items() if place in waiting}


def _unasked(question: Question) -> Answer:
    return _valueless(question, "tie", UNASKED, 0.0)


def _failed(pending: _Pending) -> Answer:
    return _valueless(pending.asked.question, "failed", pending.oracle, time.monotonic() - pending.since)


def _valueless(question: Question, mark: Mark, by: str, seconds: float) -> Answer:
    size = question.size
    return Answer(question.key, (0.5,) * size, (mark,) * size, queries=0, by=by, seconds=seconds)


def _calling(name: str, method: Callable[..., Any], *arguments: Any) -> Any:
    """What a method of an oracle returns; whatever it raises is an error of that oracle."""
    try:
        return method(*arguments)
    except OatError:
        raise
    except Exception as error:
        raise OracleError(f"oracle {name} raised {type(error).__name__}: {error}; repair it, and run the same command again") from error


def _checked(pending: _Pending, answer: Answer) -> Answer:
    """The answer with plain numbers.

    Raises:
        OracleError: it breaks the contract.
    """
    question, name = pending.asked.question, pending.oracle
    if not len(answer.values) == len(answer.marks) == question.size:
        raise OracleError(f"oracle {name} gave {len(answer.values)} values for a question with {question.size}; return one value an item")
    if unknown := set(answer.marks) - set(get_args(Mark)):
        raise OracleError(f"oracle {name} marked question {question.key} with {unknown}; the marks are {', '.join(get_args(Mark))}")
    low, high = (0.0, 1.0) if question.kind == "compare" else (-sys.float_info.max, sys.float_info.max)
    values = tuple(float(value) if isinstance(value, Real) else math.nan for value in answer.values)
    for value, given, mark in zip(values, answer.values, answer.marks, strict=True):
        if mark == "ok" and not low <= value <= high:
            meaning = "a probability between 0 and 1" if question.kind == "compare" else "a finite score"
            raise OracleError(f"oracle {name} answered {given!r} to question {question.key}; return {meaning}, or mark it abstained")
    return replace(answer, values=values)
