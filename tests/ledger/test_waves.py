"""Waves: a budget in tokens or money is spent to within the price of one question, and the recorded answers
alone decide which questions are paid."""

import itertools
import math
import random
import sqlite3
import zlib
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from fixtures import make_group, make_questions
from late import MOST, Played, Slow, group, play
from old_ledgers import make_old

from oat.errors import OracleError
from oat.ledger.audit import contradictions
from oat.ledger.intents import Awaited, rest
from oat.ledger.ledger import Ledger
from oat.ledger.store import Store
from oat.oracles.base import Oracle
from oat.reports.accounts import accounts
from oat.seeds import Seeds
from oat.testing import FakeOracle
from oat.types import Answer, Price, Question
from oat.types.questions import Budget


def opened(store: Store, oracle: Oracle, budget: Budget, **settings: Any) -> Ledger:
    return Ledger(
        store,
        {"o": oracle},
        Seeds(0),
        labels="threshold",
        deadline_s=600.0,
        budgets={"train": budget},
        **settings,
    )


def hasty(store: Store) -> Store:
    """Return the store without waits for the disk: no test here cuts its power."""
    store.db.execute("PRAGMA synchronous = OFF")
    return store


def waves_of(store: Store, *, is_taken: bool = False) -> list[tuple[int, int]]:
    """Return the first and last question of each wave.

    Args:
        is_taken: only waves that steps took from; how far later waves have come at the end of a run is
            random.
    """
    behind = "AND first > (SELECT MAX(question) FROM taken)" if is_taken else "AND FALSE"
    return store.db.execute(
        f"SELECT first, last FROM waves WHERE number > 0 AND NOT (TRUE {behind}) ORDER BY number"
    ).fetchall()


def expected(
    store: Store, price: Callable[[Question], Price], budget: Budget
) -> tuple[list[tuple[int, int]], set[int]]:
    """Return the first and last question of each wave, and the unpaid questions. They are computed
    independently, from the costs of all answers in the order of their questions. Only a question that is sent
    has a price."""
    waves: list[list[int]] = []
    unpaid, paid_for = set[int](), {}
    spent = most = Price()
    place: tuple[int, int] | None = None
    for row in sorted(
        (store.by_id(id) for (id,) in store.db.execute("SELECT id FROM questions WHERE purpose = 'train'")),
        key=lambda row: row.id,
    ):
        key = row.question.key
        took = store.answer(row)[0]
        gone = {
            address.key
            for value in row.cached
            if isinstance(value, Awaited)
            for address in value.brought_by
            if address.key in unpaid_keys(paid_for)
        }
        cached = tuple(
            None if isinstance(value, Awaited) and gone & {a.key for a in value.brought_by} else value
            for value in row.cached
        )
        is_asked = not cached or None in cached
        mine = price(rest(row.question, cached)) if is_asked else Price()
        if not is_asked and all(not isinstance(value, Awaited) for value in cached):
            continue  # known as it is recorded
        if waves and (key.step, key.round) == place and budget.allows(most + mine):
            waves[-1].append(row.id)
        elif mine == Price() or budget.allows(spent + mine):
            waves.append([row.id])
            most, place = spent, (key.step, key.round)
        else:
            unpaid.add(row.id)
            paid_for[key] = False
            continue
        most += mine
        spent += Price(took.queries, took.tokens, took.cost)
    return [(wave[0], wave[-1]) for wave in waves], unpaid


def unpaid_keys(paid_for: dict[Any, bool]) -> set[Any]:
    return {key for key, is_paid in paid_for.items() if not is_paid}


class Plain(FakeOracle):
    """An oracle with the price `most` per question that costs `share` of it."""

    def __init__(self, most: float, share: float):
        super().__init__(lambda question: 1.0)
        self.most, self.share = most, share

    def price(self, question: Question) -> Price:
        return Price(question.size, 0, self.most)

    def _answer(self, question: Question) -> Answer:
        return replace(super()._answer(question), cost=self.share * self.most)


@pytest.mark.fault("R13")
@pytest.mark.parametrize(("size", "ahead"), [(96, 0), (4, 0), (4, 20), (3, 92), (8, 2)])
@pytest.mark.parametrize("share", [0.03, 0.2, 0.7, 1.0])
def test_96_questions_and_one_dollar(
    tmp_path: Path, figure: Callable[[str], None], size: int, ahead: int, share: float
) -> None:
    """The budget is 1.00 and the price of a question 0.0238, so 42 of them fit. Either all are asked, or the
    rest of the money is less than the price of one."""
    with closing(hasty(Store(tmp_path / "ledger"))) as store:
        ledger = opened(store, Plain(most := 0.0238, share), Budget(cost=1.0), repeats=0)
        count = 96 if size == 96 else 4
        play(ledger, steps=96 // count, count=count, ahead=ahead, size=size)
        (account,) = accounts(store)
        spent = store.spent("train").cost
        assert contradictions(store) == []
        assert spent <= 1.0
        assert (account.asked >= 96 and not account.unpaid) or spent + most > 1.0
        figure(
            f"{spent:.4f} of 1 dollar spent on {account.asked - account.unpaid} of the {account.asked} "
            f"questions recorded, if each costs {share:g} of its highest price"
        )


@dataclass
class Fuse:
    """Raises at call number `call` (from 1); 0 never raises."""

    call: int = 0
    calls: int = 0

    def __call__(self) -> None:
        self.calls += 1
        if self.calls == self.call:
            raise Killed


class Killed(BaseException):
    """A simulated SIGKILL: what the connection has not committed is lost."""


class Fused(Store):
    """A store that dies before a transaction, before its commit, or after it."""

    fuse: Fuse = Fuse()

    def __enter__(self) -> "Store":
        self.fuse()
        return super().__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, *others: object
    ) -> None:
        if kind is None:
            self.fuse()
            super().__exit__(kind, error, *others)
            self.fuse()


class FusedOracle(Slow):
    """An oracle that dies before or after a call of its methods. It also checks that each question it gets is
    on disk."""

    def __init__(self, fuse: Fuse, path: Path, **options: Any):
        super().__init__(**options)
        self.fuse, self.path = fuse, path

    def submit(self, questions: Sequence[Question]) -> list[str]:
        self.fuse()
        with closing(sqlite3.connect(self.path)) as disk:
            *_, (first, last) = disk.execute("SELECT first, last FROM waves ORDER BY number").fetchall()
            sql = (
                "SELECT id FROM questions WHERE (purpose, step, round, occurrence, number) = (?, ?, ?, ?, ?)"
            )
            keys = [question.key for question in questions]
            sent = [
                disk.execute(sql, (key.purpose, key.step, key.round, key.occurrence, key.index)).fetchone()[0]
                for key in keys
            ]
            assert first <= min(sent) <= max(sent) <= last, "of the newest wave, which is on disk"
            sql = (
                "SELECT COUNT(*) FROM questions q LEFT JOIN answers a ON a.question = q.id WHERE q.id < ? "
                "AND a.question IS NULL"
            )
            assert disk.execute(sql, (first,)).fetchone() == (0,), "everything before it is answered on disk"
        tickets = super().submit(questions)
        self.fuse()
        return tickets

    def collect(self, tickets: Sequence[str], seconds: float) -> list[tuple[str, Answer]]:
        self.fuse()
        answered = super().collect(tickets, seconds)
        self.fuse()
        return answered


LIMITS: dict[str, tuple[Budget, dict[str, Any]]] = {
    "money": (Budget(cost=4.5 * MOST), {}),
    "money, every time anew": (Budget(cost=5 * MOST), {"repeats": 0}),
    "tokens": (Budget(tokens=45), {}),
    "tokens, means of two": (Budget(tokens=45), {"repeats": 2}),
    "money, tokens and queries": (Budget(queries=40, tokens=70, cost=6 * MOST), {"repeats": 0}),
    "money, and an answer's age": (Budget(cost=4.5 * MOST), {"max_age": 1}),
}


def lives(
    path: Path, name: str, call: int, ahead: int, delays: random.Random | None = None
) -> tuple[Played, Store, int]:
    """Run, die at the given call (0: never), and continue. Return what the last process saw, the ledger, and
    the number of calls of the first process."""
    budget, settings = LIMITS[name]
    fuse, calls = Fuse(call), 0
    while True:
        Fused.fuse = Fuse()
        store = hasty(Fused(path))
        oracle = FusedOracle(fuse, path, delays=delays, share=0.4)
        try:
            ledger = opened(store, oracle, budget, **settings)
            Fused.fuse = fuse
            found = play(ledger, steps=7, count=4, size=3, ahead=ahead)
            return found, store, calls or fuse.calls
        except (Killed, OracleError) as error:  # an oracle that dies is one that raised
            if not isinstance(error, Killed) and not isinstance(error.__cause__, Killed):
                raise
            store.db.close()
            calls, fuse = fuse.calls, Fuse()


def check(path: Path, name: str, call: int, ahead: int, whole: tuple[Played, Store, int], seed: int) -> None:
    found, store, _ = lives(path, name, call, ahead, random.Random(seed))
    with closing(store):
        assert waves_of(store, is_taken=True) == waves_of(whole[1], is_taken=True)
        assert store.digest() == whole[1].digest()
        assert [feedback.queries for feedback in found.feedback] == [
            feedback.queries for feedback in whole[0].feedback
        ]
        for one, two in zip(whole[0].feedback, found.feedback, strict=True):
            assert [(item.question.key, item.answer.values, item.answer.marks) for item in one.items] == [
                (item.question.key, item.answer.values, item.answer.marks) for item in two.items
            ]
        assert contradictions(store) == []


@pytest.fixture(params=itertools.product(LIMITS, [0, 11]), ids=lambda each: f"{each[0]}, {each[1]} ahead")
def whole(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    name, ahead = request.param
    found = lives(tmp_path / "whole", name, 0, ahead)
    yield name, ahead, found
    found[1].close()


def test_waves_are_the_longest_runs_that_fit(whole: Any) -> None:
    """Each wave has as many questions as the budget allows. The waves equal a second computation from the
    ledger at the end."""
    name, _, (_, store, _) = whole
    waves, unpaid = expected(store, Slow().price, LIMITS[name][0])
    assert waves == waves_of(store)
    assert len(waves) > len({store.by_id(first).question.key.step for first, _ in waves}), (
        "some rounds have several"
    )
    marked = {row.id for row in store.answered() if "unpaid" in store.answer(row)[0].marks}
    assert marked == unpaid
    assert unpaid


@pytest.mark.sample("*11 ahead-60", seconds=1.2)
@pytest.mark.fault("R13")
@pytest.mark.parametrize("every", [60, pytest.param(1, marks=pytest.mark.large)])
def test_killed_at_any_transaction_and_call(
    whole: Any, tmp_path: Path, figure: Callable[[str], None], every: int
) -> None:
    """A run dies at each transaction and each call of the oracle, before or after it, and is continued. It
    gets and learns from the same answers as the unbroken run, although arrival times differ in every
    process."""
    name, ahead, found = whole
    chosen = range(1 + zlib.crc32(f"{name} {ahead}".encode()) % every, found[2] + 1, every)
    for call in chosen:
        check(tmp_path / f"killed {call}", name, call, ahead, found, call)
    figure(
        f"{len(chosen):,} of {len(chosen):,} runs killed at a transaction or a call of the oracle get and "
        "learn from the same answers as the unbroken run"
    )


def half(store: Store, oracle: Oracle, budget: Budget) -> None:
    """Play four steps, and then ask ahead, so that the last questions are in flight or held back at the
    end."""
    play(opened(store, oracle, budget, repeats=0), steps=4, count=4, size=3, ahead=0)
    ledger = opened(store, oracle, budget, repeats=0)
    groups = [group(20 + place) for place in range(6)]
    ledger.ask(4, 0, groups, make_questions(groups, "score", 4, oracle="o"))


@pytest.mark.parametrize("before", [Budget(), Budget(queries=40), Budget(cost=9 * MOST)])
@pytest.mark.parametrize("after", [Budget(), Budget(cost=12 * MOST), Budget(tokens=75)])
@pytest.mark.parametrize("is_old", [False, True])
def test_a_run_goes_on_with_another_budget(
    tmp_path: Path, before: Budget, after: Budget, is_old: bool
) -> None:
    """A run continues with another budget, also with a ledger of an older schema without waves. Questions
    that were asked by then stay granted, and their costs are added up."""
    store = hasty(Store(tmp_path / "ledger"))
    half(store, Slow(share=0.4), before)
    if is_old:
        make_old(store.db, 5)
    (asked,) = store.db.execute("SELECT MAX(id) FROM questions").fetchone()
    store.close()
    with closing(hasty(Store(tmp_path / "ledger"))) as store:
        ledger = opened(store, oracle := Slow(share=0.4), after, repeats=0)
        feedback = ledger.take_feedback(4, 6)
        groups = [group(30 + place) for place in range(9)]
        ledger.ask(5, 0, groups, make_questions(groups, "score", 5, oracle="o"))
        later = ledger.take_feedback(5, 9)
        spent = store.spent("train")
        assert contradictions(store) == []
        assert all(item.answer.values for item in (*feedback.items, *later.items))
        assert after.allows(spent)
        if not after.is_limited:
            assert not any(
                "unpaid" in item.answer.marks for item in later.items if item.question.key.step == 5
            )
            return
        most = max(
            oracle.price(item.question).cost if after.cost else oracle.price(item.question).tokens
            for item in later.items
        )
        left = after.cost - spent.cost if after.cost else (after.tokens or 0) - spent.tokens
        assert left < most
        (first, base) = store.db.execute(
            "SELECT first, cost FROM waves WHERE first > ? ORDER BY number LIMIT 1", (asked,)
        ).fetchone()
        sql = "SELECT a.cost FROM questions q JOIN answers a ON a.question = q.id WHERE q.id < ?"
        assert base == pytest.approx(math.fsum(cost for (cost,) in store.db.execute(sql, (first,))))


def test_a_question_that_awaits_one_that_is_not_paid_asks_for_itself(tmp_path: Path) -> None:
    """The budget pays for no text of a group of three. One of the texts comes again alone, and is paid
    then."""
    with closing(hasty(Store(tmp_path / "ledger"))) as store:
        ledger = opened(store, oracle := Slow(), Budget(cost=2.5))
        groups = [
            make_group(0, "a", "bb", "ccc"),
            make_group(1, "d"),
            make_group(0, "bb"),
            make_group(0, "bb", "e"),
        ]
        groups = [
            replace(each, prompt=replace(each.prompt, occurrence=place)) for place, each in enumerate(groups)
        ]
        ledger.ask(0, 0, groups, make_questions(groups, "score", 0, oracle="o"))
        items = ledger.take_feedback(0, 4).items
        assert [item.answer.marks for item in items] == [
            ("unpaid",) * 3,
            ("ok",),
            ("ok",),
            ("unpaid", "unpaid"),
        ]
        assert [question.candidates for question in oracle.asked] == [("d",), ("bb",)]
        assert contradictions(store) == []


@pytest.mark.parametrize("after", [Budget(cost=10.0), Budget()])
def test_a_fork_from_before_there_was_a_budget_asks_its_own_questions(tmp_path: Path, after: Budget) -> None:
    """After a run gets a budget, its first wave has all questions asked by then, including those that a fork
    leaves behind."""
    steps, oracle = {"steps": 8, "count": 4, "size": 4}, Plain(0.1, 0.1)
    with closing(hasty(Store(tmp_path / "ledger"))) as store:
        play(opened(store, oracle, Budget(), repeats=0), **steps | {"steps": 6})
        play(opened(store, oracle, Budget(cost=10.0), repeats=0), **steps)
        with store:
            store.cut(3, evaluated=True)
        play(opened(store, oracle, after, repeats=0), **steps)
        assert [store.num_taken("train", step) for step in range(8)] == [4] * 8
        assert contradictions(store) == []
