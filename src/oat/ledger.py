"""The ledger: what was asked, what came back, and which step learned from it.

A round of questions is on disk, with its trajectories, before anything is sent. A batch of answers is one transaction, and the first answer
of a question wins. Which rows a step trains on, in which order, is recorded before it trains; a step that has a record gets it and waits for
nothing. So a run that is killed and continued learns from the same rows in the same order. What was asked and not answered before a kill is
asked again by the first step that has no record, unless its oracle is durable.

What is known from earlier answers is not asked (`cache.py`), and what the budget does not allow is neither (`budget.py`); both are decided and
recorded with the intent.

Covered: a kill at any moment; many threads that ask. Not covered: two processes writing one ledger.
"""

import math
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from threading import RLock
from typing import Any, Literal, get_args

from oat.budget import Budget
from oat.cache import Cache
from oat.errors import OatError, OracleError
from oat.oracles.base import Oracle, is_cacheable, price_of, version_of
from oat.seeds import Seeds
from oat.store import Asked, Known, Store, Terms
from oat.types import UNASKED, Answer, Feedback, Group, Item, Mark, Price, Question, Spent

_Found = tuple[Asked, Answer, int | None]
"""A question, its answer and its label."""


@dataclass(frozen=True, eq=False)
class _Pending:
    """A question that an oracle has.

    Attributes:
        question: what it was sent: of a half-known question the rest.
        price: the most that it may cost; None: nobody counts.
    """

    asked: Asked
    question: Question
    oracle: str
    since: float
    price: Price | None


class Ledger:
    """Asks, remembers, and hands out.

    Args:
        oracles: by address.
        labels: how the probability of a comparison becomes a label: above one half, or drawn with it from the question's own generator.
        deadline_s: seconds after its submission at which a question counts as failed.
        max_wait_s: seconds that a step of training waits for answers before it goes on with what it has; None waits for all it needs.
        max_age: steps after its round at which an answer is too old to learn from; None is never.
        budgets: what may be spent, by purpose.
        repeats: answers of an item before they are used again; 0 asks every time.
        keep_groups: trajectories stay when nothing will read them again.
        heed: called when an oracle has answered, before that is recorded; it may raise.
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
        heed: Callable[[], None] = lambda: None,
    ):
        self.store, self.oracles, self.seeds, self.labels, self.deadline_s = store, oracles, seeds, labels, deadline_s
        self.max_wait_s, self.max_age, self.budgets = math.inf if max_wait_s is None else max_wait_s, max_age, budgets or {}
        self.heed = heed
        versions = {name: version_of(oracle) for name, oracle in oracles.items()}
        self._warn_of_versions(versions)
        self.cache, self.keep_groups = Cache(store, repeats, versions) if repeats else None, keep_groups
        self.pending: dict[tuple[str, str], _Pending] = {}
        self.groups: dict[tuple[str, int, int], list[Group]] = {}
        self.waiting: dict[int, Asked] = {}
        self.lost: list[Asked] = []
        self.reasked = store.asked_again()
        self.warned: set[str] = set()
        self._writing, self._collecting = RLock(), RLock()
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
        """Record a round of intents with its trajectories, then submit what is neither known nor beyond the budget."""
        member_of = {group.prompt.occurrence: number for number, group in enumerate(groups)}
        members = [member_of[question.key.occurrence] for question in questions]
        with self._writing:
            with self.store:
                terms, paid = self._terms(purpose, questions)
                recorded = self.store.add_round(purpose, step, round, groups, questions, members, terms)
                known = [_known(row, is_paid) for row, is_paid in zip(recorded, paid, strict=True)]
                found = [(row.id, answer, self._label(row.question, answer)) for row, answer in zip(recorded, known, strict=True) if answer]
                self.store.add_answers(found)
            self.groups[purpose, step, round] = list(groups)
            self.waiting.update({row.id: row for row in recorded})
            self._submit([row for row, answer in zip(recorded, known, strict=True) if answer is None])

    def take(self, step: int, count: int, purpose: str = "train") -> Feedback:
        """The answers a step learns from: its record if it has one, else the next `count` takeable questions, recorded first.

        Waits until `count` are takeable, nothing is pending, or, in training, `max_wait_s` are over; then records what it has. Answers
        that are older than `max_age` are recorded as too late, and not handed out.
        """
        if not self.has_taken(step, purpose):
            oldest = 0 if self.max_age is None or purpose != "train" else step - self.max_age
            self._settle(purpose, step, count, oldest, self.max_wait_s if purpose == "train" else math.inf)
            with self._writing, self.store:
                expired = self.store.takeable_ids(purpose, oldest - 1, -1)
                ids = self.store.takeable_ids(purpose, step, count, oldest)
                found = self._found(ids)
                self.store.add_take(purpose, step, ids, expired, self._refused(found))
                self._keep(found, step)
                for id in expired:
                    self.waiting.pop(id, None)
        else:
            found = self.store.answers(self.store.taken(purpose, step))
        items = tuple(self._item(*each) for each in found)
        self._warn_of_silence(purpose, step, items)
        self._forget(purpose, step)
        return Feedback(step, items, self.store.take_price(purpose, step).queries, self.store.num_expired(purpose, step))

    def give_up(self, step: int, purpose: str) -> None:
        """Close a step of a purpose that failed: nobody waits any more for what is unanswered, which counts as failed, and the record of the step has
        no answers. Those that came are known to later questions; what an oracle still says is left aside."""
        with self._collecting, self._writing:
            with self.store:
                close_unanswered(self.store, purpose)
                closed = self.store.takeable_ids(purpose, step, -1)
                self.store.add_take(purpose, step, [], closed)
                self._keep(self._found(closed), step)
            self.pending = {key: p for key, p in self.pending.items() if p.question.key.purpose != purpose}
            self.lost = [row for row in self.lost if row.question.key.purpose != purpose]
        self._forget(purpose, step)

    def price(self, questions: Sequence[Question]) -> Price:
        """The most that questions would cost if they were asked now; what is known costs nothing."""
        return sum((self._term(question).price for question in questions), Price())

    def refuse(self, step: int, purpose: str, price: Price) -> None:
        """Record that a step asks nothing, since so much cannot be paid."""
        with self._writing, self.store:
            self.store.add_take(purpose, step, [], refused=price)

    def refused(self, step: int, purpose: str) -> Price | None:
        """What could not be paid by the newest record of a purpose up to this step."""
        return self.store.last_refused(purpose, step)

    def is_spent(self, step: int) -> bool:
        """Whether training could buy nothing more when the step before had taken its answers."""
        return self.budgets.get("train", Budget()).used_up(self.spent_before(step)) is not None

    def committed(self, purpose: str) -> int:
        """Priced items of what was taken, and the most that everything asked since may still take."""
        return self.store.committed(purpose).queries

    def spent_before(self, step: int, purpose: str = "train") -> Spent:
        """What was spent when the step before had taken its answers. Where this step has asked or taken, the run went on: nothing is used up then.

        Answers that have come since change none of it, so a run that is continued ends where the unbroken one does.
        """
        if not self.store.has_take(purpose, step - 1) or self.store.has_round(purpose, step, 0) or self.store.has_take(purpose, step):
            return Spent()
        unpaid = [self.waiting.get(id) or self.store.by_id(id) for id in self.store.unpaid_ids(purpose)]
        prices = [*filter(None, [self.store.take_refused(purpose, step - 1)]), *map(self._rest_price, unpaid)]
        return Spent(self.store.committed(purpose), min(prices, key=_in_order, default=None), self.store.num_open(purpose))

    def drop(self, step: int) -> None:
        """No step before this one will be replayed: drop the trajectories that only earlier ones read; its row may still ask for the step before."""
        if not self.keep_groups:
            with self._writing, self.store:
                self.store.drop_groups(step - 1)

    def close(self) -> None:
        self.store.close()

    def _warn_of_versions(self, versions: Mapping[str, str]) -> None:
        """Say that an oracle is not what it was: its curve has a kink that no learning made."""
        with self.store:
            for name, version in versions.items():
                before = self.store.put_version(name, version)
                if before is not None and before != version:
                    warnings.warn(
                        f"oracle {name} has changed since this run last asked it (its file, or the version it declares): what it says from here on "
                        "stands in one curve with what it said before; begin a run of its own, if that is not meant",
                        stacklevel=3,
                    )

    def _recover(self) -> None:
        """After a restart: attach the tickets of durable oracles, whose deadlines go on; the other unanswered intents are lost until a step needs
        new answers."""
        for row in self.store.unanswered():
            oracle = row.question.oracle
            if oracle in self.oracles and self.oracles[oracle].durable and row.ticket is not None:
                age = max(0.0, time.time() - row.sent) if row.sent is not None else 0.0
                self.pending[oracle, row.ticket] = self._as_sent(row, _rest(row.question, row.cached), age)
            else:
                self.lost.append(row)

    def _terms(self, purpose: str, questions: Sequence[Question]) -> tuple[list[Terms], list[bool]]:
        """For each question what is known and what the rest may cost, and whether the budget allows it."""
        budget = self.budgets.get(purpose, Budget())
        terms, paid, committed = [], [], self.store.committed(purpose)
        for question in questions:
            term = self._term(question)
            paid.append(not budget.is_limited or term.price == Price() or budget.allows(committed + term.price))
            terms.append(term if paid[-1] else Terms(term.cached))
            committed += terms[-1].price
        return terms, paid

    def _term(self, question: Question) -> Terms:
        """What is known of a question, and what the rest may cost."""
        if question.oracle == UNASKED:
            return Terms()
        oracle = self._oracle(question.oracle)
        cached = self.cache.find(question) if self.cache and is_cacheable(oracle) else (None,) * question.size
        return Terms(cached if any(cached) else (), price_of(oracle, _rest(question, cached)) if None in cached else Price())

    def _refused(self, found: Sequence[_Found]) -> Price | None:
        """The price of the cheapest question among these that was not paid."""
        unpaid = [row for row, answer, _ in found if "unpaid" in answer.marks]
        return min(map(self._rest_price, unpaid), key=_in_order, default=None)

    def _rest_price(self, row: Asked) -> Price:
        return price_of(self._oracle(row.question.oracle), _rest(row.question, row.cached))

    def _found(self, ids: Sequence[int]) -> list[_Found]:
        """Answered questions with their answers; they wait no more."""
        return self.store.answers([self.waiting.pop(id) if id in self.waiting else self.store.by_id(id) for id in ids])

    def _keep(self, found: Sequence[_Found], step: int) -> None:
        for row, answer, _ in found:
            oracle = self.oracles.get(row.question.oracle)
            if self.cache is not None and oracle is not None and is_cacheable(oracle):
                self.cache.keep(row, answer, step)

    def _ask_again(self, purpose: str) -> None:
        """Submit what was lost of a purpose. Steps that have a record need none of it, so a finished run, or a replay of one, asks nothing."""
        with self._writing:
            lost = [row for row in self.lost if row.question.key.purpose == purpose]
            if not lost:
                return
            self.lost = [row for row in self.lost if row.question.key.purpose != purpose]
            self.reasked += len(lost)
            with self.store:
                self.store.count_again(row.id for row in lost)
            samples = [self._group(row).trajectories for row in lost]
            ids = [tuple(of[pick].completion for pick in row.question.picks) for row, of in zip(lost, samples, strict=True)]
            self._submit([replace(row, question=replace(row.question, ids=each)) for row, each in zip(lost, ids, strict=True)])

    def _submit(self, rows: Sequence[Asked]) -> None:
        for name in sorted({row.question.oracle for row in rows}):
            oracle, mine = self._oracle(name), [row for row in rows if row.question.oracle == name]
            sent = [_rest(row.question, row.cached) for row in mine]
            tickets = list(_calling(name, oracle.submit, sent))
            known = {ticket for owner, ticket in list(self.pending) if owner == name}
            if len(tickets) != len(mine) or len({*tickets} - known) != len(mine) or not all(isinstance(ticket, str) for ticket in tickets):
                raise OracleError(
                    f"oracle {name} gave the tickets {str(tickets)[:80]} for {len(mine)} questions; `submit` must return one string a question, "
                    "each different from all others"
                )
            if oracle.durable:
                with self.store:
                    self.store.set_tickets([(ticket, time.time(), row.id) for ticket, row in zip(tickets, mine, strict=True)])
            self.pending.update({(name, ticket): self._as_sent(row, question) for ticket, row, question in zip(tickets, mine, sent, strict=True)})

    def _as_sent(self, row: Asked, question: Question, age: float = 0.0) -> _Pending:
        is_limited = self.budgets.get(question.key.purpose, Budget()).is_limited
        price = price_of(self._oracle(question.oracle), question) if is_limited else None
        return _Pending(row, question, question.oracle, time.monotonic() - age, price)

    def _oracle(self, name: str) -> Oracle:
        if name not in self.oracles:
            raise OracleError(f"a question is addressed to the oracle {name!r}, which this run does not have; it has {', '.join(self.oracles)}")
        return self.oracles[name]

    def _settle(self, purpose: str, step: int, count: int, oldest: int, seconds: float) -> None:
        """Take in what has come, also beyond what the step needs, and wait for what it lacks. What was not paid is no answer to wait for."""
        self._ask_again(purpose)
        until, patience = time.monotonic() + seconds, 0.0
        while True:
            with self._collecting:
                waiting = self._waiting(purpose)
                has_come = self._collect(waiting, patience)
                is_enough = self.store.num_takeable(purpose, step, oldest) >= count
                if (is_enough and not has_come) or not waiting or (time.monotonic() >= until and not has_come):
                    return
                expiry = min((p.since for p in self._waiting(purpose).values()), default=0.0) + self.deadline_s
                patience = 0.0 if is_enough else max(0.0, min(until, expiry) - time.monotonic())

    def _waiting(self, purpose: str) -> dict[tuple[str, str], _Pending]:
        return {key: p for key, p in list(self.pending.items()) if p.question.key.purpose == purpose}

    def _collect(self, waiting: Mapping[tuple[str, str], _Pending], patience: float) -> bool:
        """One round over the oracles: what is there, or arrives in so many seconds, in one transaction an oracle. Where nothing comes, what is past
        its deadline has failed.

        Returns:
            Whether anything came.
        """
        names, has_come = sorted({oracle for oracle, _ in waiting}), False
        for name in names:
            tickets = [ticket for oracle, ticket in waiting if oracle == name]
            arrived = _calling(name, self._oracle(name).collect, tickets, min(patience, 1.0) if len(names) > 1 else patience)
            self.heed()
            answered = [(self.pending.pop((name, ticket)), answer) for ticket, answer in arrived if (name, ticket) in self.pending]
            if answered:
                self._record(answered)
                has_come = True
        if not has_come:
            overdue = [key for key, p in waiting.items() if key in self.pending and time.monotonic() >= p.since + self.deadline_s]
            self._record([(late := self.pending.pop(key), _failed(late)) for key in overdue])
        return has_come

    def _record(self, answered: Sequence[tuple[_Pending, Answer]]) -> None:
        if not answered:
            return
        rows, broken = [], []
        for pending, answer in answered:
            try:
                whole = _whole(pending.asked, _checked(pending, answer))
            except OracleError as error:
                broken.append(error)
            else:
                rows.append((pending.asked.id, whole, self._label(pending.asked.question, whole)))
        with self._writing, self.store:
            self.store.add_answers(rows)
        if broken:
            raise broken[0]

    def _label(self, question: Question, answer: Answer) -> int | None:
        if question.kind != "compare" or answer.marks[0] != "ok":
            return None
        probability = answer.values[0]
        if self.labels == "bernoulli":
            return 0 if self.seeds.at("label", str(question.key)).random() < probability else 1
        return None if probability == 0.5 else int(probability < 0.5)

    def _item(self, row: Asked, answer: Answer, label: int | None) -> Item:
        return Item(self._group(row), row.question, answer, label)

    def _group(self, row: Asked) -> Group:
        key = row.question.key
        place = (key.purpose, key.step, key.round)
        groups = self.groups.get(place)
        if groups is None:
            groups = self.groups[place] = self.store.groups(*place)
        return groups[row.member]

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
        waiting = {(p.question.key.purpose, p.question.key.step, p.question.key.round) for p in list(self.pending.values())}
        self.groups = {place: groups for place, groups in self.groups.items() if place in waiting}


def _in_order(price: Price) -> tuple[int, int, float]:
    return price.queries, price.tokens, price.cost


def close_unanswered(store: Store, *purposes: str) -> None:
    """What was asked for these purposes and nobody has answered counts as failed; the caller holds the transaction."""
    rows = [row for row in store.unanswered() if row.question.key.purpose in purposes]
    answers = [_whole(row, _valueless(_rest(row.question, row.cached), "failed", row.question.oracle)) for row in rows]
    store.add_answers([(row.id, answer, None) for row, answer in zip(rows, answers, strict=True)])


def _rest(question: Question, cached: Sequence[Known]) -> Question:
    """What is still to be asked: of scores only those candidates of which nothing is known."""
    if question.kind == "compare" or not any(cached):
        return question
    places = [place for place, known in enumerate(cached) if known is None]

    def of(values: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(values[place] for place in places) if values else values

    q = question
    return replace(q, candidates=of(q.candidates), picks=of(q.picks), known=of(q.known), ids=of(q.ids))


def _whole(asked: Asked, rest: Answer) -> Answer:
    """The answer with the values that were known before."""
    if not any(asked.cached):
        return rest
    given = iter(zip(rest.values, rest.marks, strict=True))
    values, marks = zip(*(known or next(given) for known in asked.cached), strict=True)
    return replace(rest, values=values, marks=marks)


def _known(row: Asked, is_paid: bool) -> Answer | None:
    """The answer of a question that nobody is asked; None: somebody is."""
    question = row.question
    if question.oracle == UNASKED:
        return _valueless(question, "tie", UNASKED)
    rest = _rest(question, row.cached)
    if not is_paid:
        return _whole(row, _valueless(rest, "unpaid", question.oracle))
    if not row.cached or None in row.cached:
        return None
    values, marks = zip(*filter(None, row.cached), strict=True)
    return Answer(question.key, values, marks, queries=0, by=question.oracle)


def _failed(pending: _Pending) -> Answer:
    return _valueless(pending.question, "failed", pending.oracle, time.monotonic() - pending.since)


def _valueless(question: Question, mark: Mark, by: str, seconds: float = 0.0) -> Answer:
    size = question.size
    return Answer(question.key, (0.5,) * size, (mark,) * size, queries=0, by=by, seconds=seconds)


def _calling(name: str, method: Callable[..., Any], *arguments: Any) -> Any:
    """What a method of an oracle returns; whatever it raises is an error of that oracle."""
    try:
        return method(*arguments)
    except OatError:
        raise
    except (Exception, SystemExit) as error:
        raise OracleError(f"oracle {name} raised {type(error).__name__}: {error}; repair it, and run the same command again") from error


def _checked(pending: _Pending, answer: Answer) -> Answer:
    """The answer with plain numbers.

    Raises:
        OracleError: it breaks the contract.
    """
    question, name = pending.question, pending.oracle
    if not len(answer.values) == len(answer.marks) == question.size:
        raise OracleError(f"oracle {name} gave {len(answer.values)} values for a question with {question.size}; return one value an item")
    if unknown := set(answer.marks) - set(get_args(Mark)):
        raise OracleError(f"oracle {name} marked question {question.key} with {unknown}; the marks are {', '.join(get_args(Mark))}")
    low, high = (0.0, 1.0) if question.kind == "compare" else (-sys.float_info.max, sys.float_info.max)
    is_plain = all(type(value) is float for value in answer.values)
    values = answer.values if is_plain else tuple(float(value) if isinstance(value, Real) else math.nan for value in answer.values)
    for value, given, mark in zip(values, answer.values, answer.marks, strict=True):
        if mark == "ok" and not low <= value <= high:
            meaning = "a probability between 0 and 1" if question.kind == "compare" else "a finite score"
            raise OracleError(f"oracle {name} answered {given!r} to question {question.key}; return {meaning}, or mark it abstained")
    most, took = pending.price, Price(answer.queries, answer.tokens, answer.cost)
    if most is not None and not Budget(most.queries, most.tokens, most.cost).allows(took):
        raise OracleError(
            f"oracle {name} took {took} for question {question.key}, which was to cost at most {most}; its method `price` must name the most, or "
            "the budget would not hold"
        )
    return answer if is_plain else replace(answer, values=values)
