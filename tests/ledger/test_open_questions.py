"""One table has what becomes of every open question: its changes are those that the page draws, a run that is
killed before or after any of them ends as the unbroken one, and nothing else in memory holds an open
question."""

import gc
import json
import os
import pickle
import random
import signal
import sqlite3
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, ModuleType, SimpleNamespace
from typing import Any

import late
import pytest
from fixtures import forked, make_questions
from late import Slow, group, play
from questions_page import drawing

from oat.errors import OracleError
from oat.ledger.audit import contradictions
from oat.ledger.intents import Intent
from oat.ledger.ledger import Ledger
from oat.ledger.open_questions import (
    CHANGES,
    RECOVERED,
    START,
    TAKEN,
    OpenQuestion,
    OpenQuestions,
    Sent,
    Stage,
)
from oat.ledger.store import Store
from oat.seeds import Seeds
from oat.types import Answer, Key, Question
from oat.types.questions import Budget

STEPS = 5
SEED = 6
FAILED, UNSENT = 1, 2
"""The steps after which an evaluation fails: one when it was asked, and one because it cannot be sent."""
SERIES = {
    "waves": {"budget": Budget(cost=8.0), "keeps": False},
    "ahead": {"budget": Budget(), "keeps": False},
    "durable": {"budget": Budget(), "keeps": True},
}
NOT_IN = {
    "waves": {(START, Stage.AWAITING)},
    "ahead": {change for change in CHANGES if Stage.HELD in change},
    "durable": {change for change in CHANGES if Stage.HELD in change},
}
"""The changes that a series does not have."""
Change = tuple[Stage | str, Stage | str]
Told = Callable[[Change, bool], None]
"""A function that is called with each change, and with True when it is made."""
BROKEN = 3
"""The exit code of a life that ended by an answer that breaks the contract."""


class Keeping(Slow):
    """An oracle that keeps its questions in a folder, and once gives a broken answer."""

    def __init__(self, folder: Path, delays: random.Random, *, keeps: bool):
        super().__init__(delays)
        self.durable = keeps
        self._folder, self._name = folder, os.urandom(4).hex()

    def submit(self, questions: Sequence[Question]) -> list[str]:
        if (questions[0].key.purpose, questions[0].key.step) == ("eval", UNSENT):
            raise OracleError("it is away")
        tickets = super().submit(questions)
        names = [f"{self._name} {ticket}" for ticket in tickets]
        for name, ticket in zip(names, tickets, strict=True):
            self._open[name] = self._open.pop(ticket)
            if self.durable:
                (self._folder / name).write_bytes(pickle.dumps(self._open[name]))
        return names

    def collect(self, tickets: Sequence[str], seconds: float) -> list[tuple[str, Answer]]:
        for ticket in tickets:
            if ticket not in self._open and (self._folder / ticket).exists():
                self._open[ticket] = pickle.loads((self._folder / ticket).read_bytes())
        return super().collect(tickets, 0.0)

    def _answer(self, question: Question) -> Answer:
        answer, mark = super()._answer(question), self._folder / "broken"
        if question.key.occurrence >= 3 and not mark.exists():
            mark.touch()
            return replace(answer, values=())
        return answer


def opened(store: Store, folder: Path, series: str, version: str, delays: random.Random) -> Ledger:
    store.db.execute("PRAGMA synchronous = OFF")  # no test here cuts the power
    settings = SERIES[series]
    oracle = Keeping(folder, delays, keeps=settings["keeps"])
    oracle.version = version
    return Ledger(
        store,
        {"o": oracle},
        Seeds(0),
        labels="threshold",
        deadline_s=600.0,
        budgets={"train": settings["budget"]},
    )


def few(occurrence: int) -> list[str]:
    """Return one or two responses, most of them of two texts, so that many questions are equal."""
    draw = random.Random(occurrence)
    return [draw.choice(["a", "b", f"own {occurrence}"]) for _ in range(draw.randrange(1, 3))]


def live(
    folder: Path,
    series: str,
    look: Callable[[Ledger], None] = lambda ledger: None,
    version: str = "1",
    seed: int | None = None,
) -> int:
    """Play all steps from where an earlier life was killed. After two of them an evaluation fails. Return the
    exit code. For a forked child only.

    Args:
        look: called with the ledger when it is open.
        version: the version of the oracle.
        seed: decides when answers come; None: no two processes have equal ones.
    """
    late.texts = few
    with closing(Store(folder / "ledger.sqlite")) as store:
        delays = random.Random(os.getpid() if seed is None else seed)
        ledger = opened(store, folder, series, version, delays)
        look(ledger)

        def evaluate(step: int) -> None:
            last = step - 1
            if last not in (FAILED, UNSENT) or ledger.has_taken(last, "eval"):
                return
            if not ledger.recalls(last, 0, "eval"):
                groups = [group(place) for place in range(2)]
                asked = make_questions(groups, "score", last, oracle="o", purpose="eval")
                try:
                    ledger.ask(last, 0, groups, asked, "eval")
                except OracleError:
                    assert last == UNSENT
            ledger.give_up(last, "eval")

        try:
            play(ledger, steps=STEPS, count=5, ahead=10, before=evaluate)
        except OracleError:
            return BROKEN
        return 0


def watched(tell: Told) -> None:
    """From now on, tell of each change of the table. For a forked child only."""
    add, change, close, recover = (
        OpenQuestions.add,
        OpenQuestions._set,
        OpenQuestions.close,
        Ledger._recover,
    )
    is_recovering = False

    def added(self: OpenQuestions, intent: Intent, stage: Stage, *args: Any, **others: Any) -> Any:
        if is_recovering:
            return add(self, intent, stage, *args, **others)
        tell((START, stage), False)
        row = add(self, intent, stage, *args, **others)
        tell((START, stage), True)
        return row

    def changed(self: OpenQuestions, row: OpenQuestion, stage: Stage, sent: Any) -> None:
        made = (row.stage, stage)
        is_told = made in CHANGES and not is_recovering
        if is_told:
            tell(made, False)
        change(self, row, stage, sent)
        if is_told:
            tell(made, True)

    def closed(self: OpenQuestions, id: int) -> Intent:
        tell((Stage.ANSWERED, TAKEN), False)
        intent = close(self, id)
        tell((Stage.ANSWERED, TAKEN), True)
        return intent

    def recovered(self: Ledger, *args: Any) -> None:
        nonlocal is_recovering
        is_recovering = True
        recover(self, *args)
        is_recovering = False

    OpenQuestions.add, OpenQuestions._set = added, changed  # type: ignore[method-assign]
    OpenQuestions.close, Ledger._recover = closed, recovered  # type: ignore[method-assign]


def stages(ledger: Ledger) -> dict[int, str]:
    return {row.id: row.stage.name for row in ledger.open.rows.values()}


def strange(ledger: Any) -> list[str]:
    """Return what holds an open question, its key, its ticket, or the ids of several, of everything that a
    ledger reaches: but its table of open questions, and its oracles, which know what they were sent."""
    rows = ledger.open.rows.values()
    tickets = {row.sent.ticket[1] for row in rows if row.sent is not None}
    ids = {row.id for row in rows}
    seen = {id(each) for each in (ledger.open, ledger.open.rows, ledger.oracles, *ledger.oracles.values())}
    seen |= {id(each) for each in (tickets, ids, seen)}
    found, left = list[str](), list[Any]([ledger])
    while left:
        holder = left.pop()
        if id(holder) in seen or isinstance(
            holder, type | ModuleType | BuiltinFunctionType | sqlite3.Connection
        ):
            continue
        seen.add(id(holder))
        held = gc.get_referents(holder)
        if isinstance(holder, dict):  # whose keys are left out if they are texts
            held += holder
        if isinstance(holder, FunctionType):  # not all of its module
            held = [holder.__closure__, holder.__defaults__, holder.__kwdefaults__]
        if any(isinstance(each, Intent | OpenQuestion | Question | Key) for each in held) or any(
            isinstance(each, str) and each in tickets for each in held
        ):
            found.append(f"{type(holder).__name__}: {holder!r:.200}")
        elif isinstance(holder, dict | set | frozenset | list | tuple | deque):
            numbers = {each for each in holder if type(each) is int}
            if isinstance(holder, dict):
                numbers |= {each for each in holder.values() if type(each) is int}
            if len(numbers & ids) > 2:
                found.append(f"{type(holder).__name__}: {holder!r:.200}")
        left += held
    return found


def test_a_second_owner_is_found() -> None:
    """`strange` finds an open question wherever it is held."""
    table = OpenQuestions()
    groups = [group(0)]
    (question,) = make_questions(groups, "score", 0, oracle="o")
    row = table.add(Intent(10**6, question, 0, None, None, ()), Stage.DUE)
    table.move(row, Stage.SENT, Sent(("o", "its ticket"), question, 0.0, Budget()))
    for number in range(3):
        table.add(replace(row.intent, id=number + 2000), Stage.DUE)
    ledger = SimpleNamespace(open=table, oracles={}, other=None)
    assert strange(ledger) == []
    own = row.intent
    for other in (
        [own],
        {"a": {own.question.key: 1}},
        deque([own]),
        partial(print, row),
        SimpleNamespace(deep=SimpleNamespace(intent=own)),
        {"its ticket": 3},
        lambda: own,
        {id: "held" for id in table.rows},
        {"a": {2000, 2001, 2002}},
    ):
        ledger.other = other
        assert strange(ledger), other


def whole(folder: Path, series: str) -> tuple[str, dict[Change, int]]:
    """Return the digest of the unbroken life, and how often each change happens in it. Between its changes
    only the table holds open questions."""

    def action() -> int:
        counts: dict[Change, int] = {}
        found: list[Ledger] = []

        def tell(change: Change, is_made: bool) -> None:
            counts[change] = counts.get(change, 0) + is_made
            if found and is_made:
                assert strange(found[0]) == []

        watched(tell)
        code = live(folder, series, found.append)
        if code == BROKEN:
            found.clear()
            code = live(folder, series, found.append)
        (folder / "counts").write_bytes(pickle.dumps(counts))
        return code

    log = folder / "log"
    assert forked(action, log) == 0, log.read_text()
    return digest(folder), pickle.loads((folder / "counts").read_bytes())


def digest(folder: Path) -> str:
    with closing(Store(folder / "ledger.sqlite")) as store:
        assert contradictions(store) == []
        return store.digest()


def struck(
    folder: Path,
    series: str,
    change: Change,
    *,
    after: bool,
    call: int,
    counts: Callable[[Ledger], bool] = lambda ledger: True,
    version: str = "1",
    seed: int | None = None,
) -> set[tuple[str, str]]:
    """Kill a life before or after a change, continue it to its end, and return the pairs of states before and
    after the restart.

    Args:
        call: the number of the change, among equal ones that count, from 1.
        counts: whether a change counts.
        version: the version of the oracle in the life that continues.
        seed: of the life that is killed; see `live`.
    """
    log, left = folder / "log", folder / "stages"

    def killed() -> int:
        count, found = 0, list[Ledger]()

        def tell(made: Change, is_made: bool) -> None:
            nonlocal count
            if made == change and is_made == after and counts(found[0]):
                count += 1
                if count == call:
                    if not found[0].store.db.in_transaction:  # then the disk knows what memory knows
                        left.write_text(json.dumps(stages(found[0])), encoding="utf-8")
                    os.kill(os.getpid(), signal.SIGKILL)

        watched(tell)
        code = live(folder, series, found.append, seed=seed)
        if code == BROKEN:
            code = live(folder, series, lambda ledger: found.insert(0, ledger), seed=seed)
        return code

    def continued() -> int:
        def look(ledger: Ledger) -> None:
            if left.exists() and not (folder / "pairs").exists():
                before = json.loads(left.read_text(encoding="utf-8"))
                now = stages(ledger)
                assert sorted(map(int, before)) == sorted(now), "open questions came or went"
                pairs = sorted({(before[str(id)], stage) for id, stage in now.items()})
                (folder / "pairs").write_text(json.dumps(pairs), encoding="utf-8")

        code = live(folder, series, look, version)
        return live(folder, series, look, version) if code == BROKEN else code

    assert forked(killed, log) == -signal.SIGKILL, log.read_text()
    assert forked(continued, log) == 0, log.read_text()
    pairs = folder / "pairs"
    return {(before, now) for before, now in json.loads(pairs.read_text())} if pairs.exists() else set()


@pytest.mark.sample("ahead", seconds=8)
@pytest.mark.parametrize("series", SERIES)
def test_a_run_killed_at_any_change_ends_as_the_unbroken_one(series: str, tmp_path: Path) -> None:
    (unbroken := tmp_path / "whole").mkdir()
    expected, counts = whole(unbroken, series)
    assert counts.keys() == CHANGES.keys() - NOT_IN[series]
    recovered = set[tuple[str, str]]()
    for change, count in counts.items():
        for after in (False, True):
            name = f"{change[0]} {change[1]} {after}"
            (folder := tmp_path / name).mkdir()
            call = random.Random(f"{series} {name}").randrange(count) // 2 + 1
            recovered |= struck(folder, series, change, after=after, call=call)
            assert digest(folder) == expected, name
    assert recovered <= {(before.name, now.name) for before, now in RECOVERED}
    keeps = {("SENT", "SENT"), ("DUE", "SENT")} & recovered
    assert (len(keeps) == 2) == SERIES[series]["keeps"]
    assert (("SENT", "DUE") in recovered) != SERIES[series]["keeps"]
    assert (("HELD", "HELD") in recovered) == (series == "waves")
    assert (("DUE", "DUE") in recovered) != SERIES[series]["keeps"]


def test_a_question_asks_for_what_a_changed_oracle_would_have_brought(tmp_path: Path) -> None:
    def counts(ledger: Ledger) -> bool:
        states = ledger.store.states()
        awaits = any(states[row.id] == 0 for row in ledger.open.at(Stage.AWAITING))
        return awaits and ledger.has_taken(0) and not ledger.store.db.in_transaction

    for version in ("1", "2"):
        (folder := tmp_path / version).mkdir()
        sent = (Stage.DUE, Stage.SENT)
        pairs = struck(folder, "ahead", sent, after=True, call=1, counts=counts, version=version, seed=SEED)
        now = "AWAITING" if version == "1" else "DUE"
        assert ("AWAITING", now) in pairs
        digest(folder)


def test_every_change_is_in_a_series() -> None:
    assert not set.intersection(*NOT_IN.values())


def test_no_question_makes_a_change_that_is_not_drawn() -> None:
    table = OpenQuestions()
    groups = [group(0)]
    (question,) = make_questions(groups, "score", 0, oracle="o")
    row = table.add(Intent(1, question, 0, None, None, ()), Stage.HELD)
    with pytest.raises(AssertionError, match="no question goes from"):
        table.move(row, Stage.SENT)
    with pytest.raises(AssertionError, match="was taken"):
        table.close(1)


def test_the_page_draws_the_changes() -> None:
    page = (Path(__file__).parents[2] / "docs" / "ledger.md").read_text(encoding="utf-8")
    assert drawing() in page, "run tests/support/questions_page.py, and put what it prints into the page"
