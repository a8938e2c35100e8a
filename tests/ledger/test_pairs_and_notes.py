"""The ledger records what an explorer noted of its questions, and counts the compared pairs that were
paid."""

import json
import signal
import sqlite3
import tempfile
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fixtures import World, forked, kill_at, make_group, make_questions, oat, recorded
from hypothesis import given, settings
from hypothesis import strategies as st
from old_ledgers import OLDER, make_old
from posts import Clock, Post

from oat.commands.digest import digest_run
from oat.ledger import schema
from oat.ledger.ledger import Ledger
from oat.ledger.reader import Reader
from oat.ledger.store import Store
from oat.oracles.builtin import BeliefOracle
from oat.oracles.callables import CallableOracle
from oat.oracles.preferences import Preferences
from oat.seeds import Seeds
from oat.types import ENSEMBLE, UNASKED, Answer, Kind, Mark, Question
from oat.types.questions import Budget

NOTES = {"belief": 0.1 + 0.2, "clash": 1.0, "überraschung": -1e-300, "count": 3}


def asked(
    step: int,
    *notes: dict[str, float],
    kind: Kind = "compare",
    oracle: str = "o",
    first: int = 0,
    texts: Sequence[str] = ("aa", "b"),
) -> tuple[list[Any], list[Question]]:
    """Return groups, and a question about each of them with these notes."""
    groups = [make_group(first + number, *texts) for number in range(len(notes))]
    questions = make_questions(groups, kind, step, oracle=oracle)
    return groups, [replace(question, notes=own) for question, own in zip(questions, notes, strict=True)]


def add(store: Store, step: int, groups: list[Any], questions: list[Question]) -> None:
    with store:
        store.add_round("train", step, 0, groups, questions, range(len(groups)))


# notes


def test_notes_come_out_as_they_went_in_also_after_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    store = Store(path)
    groups, questions = asked(0, NOTES, {}, {"x": 0.0})
    add(store, 0, groups, questions)
    for again in (store, Store(path), Reader(path)):
        found = [again.by_id(number + 1).question for number in range(3)]
        assert [question.notes for question in found] == [NOTES, {}, {"x": 0.0}]
        assert [*found[0].notes] == [*NOTES], "in their order"
        again.close()


@given(
    st.lists(
        st.dictionaries(
            st.from_regex(r"\w{1,8}", fullmatch=True), st.floats(allow_nan=False, allow_infinity=False)
        ),
        min_size=1,
        max_size=4,
    )
)
@settings(max_examples=8, deadline=None)
def test_any_numbers_survive(notes: list[dict[str, float]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = Store(Path(folder) / "ledger.sqlite")
        add(store, 0, *asked(0, *notes))
        store.close()
        with closing(Store(Path(folder) / "ledger.sqlite")) as again:
            assert [intent.question.notes for intent in recorded(again, "train", 0)] == notes


def length(prompts: Sequence[str], completions: Sequence[str], **columns: Any) -> list[float]:
    return [float(len(text)) for text in completions]


def compares() -> Preferences:
    """Return an oracle that compares by two scores: two queries a pair."""
    return Preferences(CallableOracle(length, "length"))


def open_ledger(path: Path, oracle: Any, **options: Any) -> Ledger:
    return Ledger(
        Store(path),
        {"o": oracle, ENSEMBLE: BeliefOracle()},
        Seeds(0),
        labels="threshold",
        deadline_s=600.0,
        **options,
    )


def test_a_step_gets_the_notes_of_its_questions_from_the_ledger(tmp_path: Path) -> None:
    """Also a step that a run makes again after a kill, and questions that are answered after one."""
    path = tmp_path / "ledger.sqlite"
    ledger = open_ledger(path, compares())
    groups, questions = asked(0, {"rank": 0.5}, {"rank": 0.75}, {})
    ledger.ask(0, 0, groups, questions)
    first = [item.question.notes for item in ledger.take_feedback(0, 2).items]
    ledger.close()
    again = open_ledger(path, compares())
    assert [item.question.notes for item in again.take_feedback(0, 2).items] == first
    assert first == [{"rank": 0.5}, {"rank": 0.75}]
    assert [item.question.notes for item in again.take_feedback(1, 2).items] == [{}]
    again.close()


def test_the_digest_knows_notes(tmp_path: Path) -> None:
    """A ledger without notes has the digest that it had before there were any."""
    digests = []
    for number, notes in enumerate(({}, {"x": 1.0}, {"x": 1.5}, {"y": 1.0}, {"x": 1.0})):
        store = Store(tmp_path / f"{number}.sqlite")
        add(store, 0, *asked(0, notes, {}))
        digests.append(store.digest())
        store.close()
    assert digests[1] == digests[4]
    assert len(set(digests)) == 4
    old = tmp_path / "0.sqlite"
    with closing(sqlite3.connect(old)) as database:
        make_old(database, 7)
        database.commit()
    with closing(Store(old)) as store:
        assert store.digest() == digests[0]
        assert [intent.question.notes for intent in recorded(store, "train", 0)] == [{}, {}]


# pairs

PRICES: dict[str, tuple[Kind, str, int]] = {
    "a pair": ("compare", "o", 1),
    "a pair by two scores": ("compare", "o", 2),
    "a cached pair": ("compare", "o", 0),
    "asked of nobody": ("compare", UNASKED, 0),
    "the ensemble's": ("compare", ENSEMBLE, 0),
    "scores": ("score", "o", 2),
}
"""By name, a question's kind, its oracle and the queries of its answer."""
COUNTED = ("a pair", "a pair by two scores")


def fill(store: Store, step: int, names: Sequence[str], *, first: int = 0) -> list[int]:
    """Record a round with a question of each of these names, and their answers. Return the ids."""
    groups = [make_group(first + number, "aa", "b") for number in range(len(names))]
    questions = []
    for group, name in zip(groups, names, strict=True):
        kind, oracle, _ = PRICES[name]
        questions += make_questions([group], kind, step, oracle=oracle)
    add(store, step, groups, questions)
    intents = recorded(store, "train", step)
    with store:
        for intent, name in zip(intents, names, strict=True):
            kind, _, queries = PRICES[name]
            size = 1 if kind == "compare" else 2
            marks: list[Mark] = ["ok"] * size
            answer = Answer(intent.question.key, (0.9,) * size, (*marks,), queries)
            store.add_answers([(intent.id, answer, 0 if kind == "compare" else None)])
    return [intent.id for intent in intents]


def take(store: Store, step: int, ids: Sequence[int], expired: Sequence[int] = ()) -> None:
    with store:
        store.add_take("train", step, ids, expired)


def before(store: Reader, steps: int) -> list[int]:
    """Return the numbers of pairs before steps 0 to `steps`."""
    return [store.pairs_before("train", step) for step in range(steps + 1)]


def test_a_pair_counts_if_an_oracle_was_paid_to_compare_it(tmp_path: Path) -> None:
    """Once, however many queries it cost, and from the step after the one that took it on."""
    for number, name in enumerate(PRICES):
        store = Store(tmp_path / f"{number}.sqlite")
        take(store, 0, fill(store, 0, [name, name]))
        assert before(store, 2) == [0, *([2, 2] if name in COUNTED else [0, 0])], name
        store.close()


def test_pairs_count_when_they_are_taken(tmp_path: Path) -> None:
    """Not when they are asked or answered: those that wait for a later step do not count. Those that a step
    takes without learning from them do. Evaluations have their own number."""
    store = Store(tmp_path / "ledger.sqlite")
    ids = fill(store, 0, ["a pair"] * 6)
    assert before(store, 1) == [0, 0]
    take(store, 0, ids[:2])
    take(store, 2, ids[2:3], ids[3:5])
    assert before(store, 4) == [0, 2, 2, 5, 5]
    assert store.pairs_before("eval", 9) == 0
    with store:
        store.cut(1, evaluated=True)
    assert before(store, 4) == [0, 2, 2, 2, 2]
    take(store, 1, ids[2:])
    assert before(store, 2) == [0, 2, 6]
    store.close()


@given(
    steps=st.lists(st.lists(st.sampled_from(sorted(PRICES)), max_size=5), min_size=1, max_size=5),
    version=st.sampled_from(sorted(OLDER)),
    gap=st.integers(0, 2),
)
@settings(max_examples=20, deadline=None)
def test_an_older_ledger_gets_the_same_numbers(steps: list[list[str]], version: int, gap: int) -> None:
    """They are counted from its answers, whatever version of the schema it has, and whoever opens it. Steps
    may take nothing, and their numbers may have gaps."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ledger.sqlite"
        store, expected, last = Store(path), [0], 0
        for number, names in enumerate(steps):
            step = number * (gap + 1)
            take(store, step, fill(store, step, names, first=100 * number))
            expected += [expected[-1] + sum(name in COUNTED for name in names)] * (gap + 1)
            last = step
        assert before(store, last + 1) == expected[: last + 2]
        make_old(store.db, version)
        store.close()
        for kind in (Reader, Store):  # the second one converts the file
            with closing(kind(path)) as again:
                assert before(again, last + 1) == expected[: last + 2]
                found = [pairs for (pairs,) in again.db.execute("SELECT pairs FROM takes")]
                assert all(type(pairs) is int for pairs in found)
        with closing(sqlite3.connect(path)) as database:
            assert database.execute("SELECT value FROM meta").fetchone() == (str(schema.VERSION),)


def test_a_ledger_counts_what_it_bought(tmp_path: Path) -> None:
    """A pair that the ensemble answers, one that is asked of nobody, and one whose answer is known from an
    earlier step cost nothing and are no labelled pairs. The number is the same after a restart, and
    `Feedback.pairs` has those of the step itself, too."""
    path = tmp_path / "ledger.sqlite"
    ledger = open_ledger(path, compares())
    groups, (bought, also, nobody, believed) = asked(0, {}, {}, {}, {})
    questions = [
        bought,
        also,
        replace(nobody, oracle=UNASKED),
        replace(believed, oracle=ENSEMBLE, known=(0.7, 0.3)),
    ]
    ledger.ask(0, 0, groups, questions)
    assert ledger.pairs_before(0) == ledger.pairs_before(1) == 0, "nothing was taken"
    found = ledger.take_feedback(0, 4)
    assert [item.answer.queries for item in found.items] == [2, 2, 0, 0]
    assert (found.pairs, found.queries) == (2, 4)
    equal, more = asked(1, {}, {}), asked(1, {}, first=5)
    ledger.ask(1, 0, [*equal[0], *more[0]], [*equal[1], *more[1]])
    found = ledger.take_feedback(1, 3)
    assert [item.answer.queries for item in found.items] == [0, 0, 2]
    assert (found.pairs, ledger.pairs_before(1), ledger.pairs_before(2)) == (3, 2, 3)
    ledger.close()
    again = open_ledger(path, compares())
    assert [again.pairs_before(step) for step in range(3)] == [0, 2, 3]
    assert again.take_feedback(0, 4).pairs == 2
    again.close()


@pytest.mark.filterwarnings("ignore:.*a question is not asked:oat.errors.OatWarning")
def test_pairs_that_the_budget_did_not_allow_are_not_counted(tmp_path: Path) -> None:
    ledger = open_ledger(tmp_path / "ledger.sqlite", compares(), budgets={"train": Budget(5)})
    ledger.ask(0, 0, *asked(0, {}, {}, {}, {}))
    found = ledger.take_feedback(0, 4)
    marks = [item.answer.marks[0] for item in found.items]
    assert marks.count("unpaid") == 2
    assert found.pairs == 2
    ledger.close()


def test_late_answers_count_for_the_step_that_takes_them(tmp_path: Path, clock: Clock) -> None:
    """However late they are, the numbers before each step are those of a run whose answers came at once."""
    for name, delays in {"late": {0: 5.0, 1: 90.0, 3: 40.0}, "at once": {}}.items():
        ledger = open_ledger(tmp_path / f"{name}.sqlite", Post(clock, dict(delays)))
        ledger.ask(0, 0, *asked(0, {}, {}, {}, {}, {}))
        found = []
        for step, count in enumerate((2, 1, 2)):
            found.append((ledger.pairs_before(step), ledger.take_feedback(step, count).pairs))
        assert found == [(0, 2), (2, 3), (3, 5)]
        ledger.close()


# what an explorer is told

EXPLORER = '''
from dataclasses import replace

from oat.explore.base import NoExploration


class Counting(NoExploration):
    """Compares the two responses, and notes what it is told. It labels every third pair itself."""

    needs = frozenset({"ensemble"})

    def __init__(self, kind, config):
        super().__init__(kind)
        self.config = config

    def choose(self, round):
        noted = {"pairs": float(round.pairs), "step": float(round.step)}
        found = []
        for place, question in enumerate(super().choose(round)):
            if place % 3 == 2 and not question.oracle:
                question = replace(question, oracle="ensemble", known=(1.0, 0.0))
            found.append(replace(question, notes=noted, features=round.scores["features"][place]))
        return found


from oat.explore.settings import EnsembleExplorerConfig

Counting.Config = EnsembleExplorerConfig
'''


@pytest.mark.sample("refilled", seconds=2.2)
@pytest.mark.parametrize(
    "setting",
    [{}, {"oracle.max_outstanding": 7}, {"sampling.refill_rounds": 2}],
    ids=["plain", "asked ahead", "refilled"],
)
def test_an_explorer_is_told_the_pairs_before_its_step(
    world: World, tmp_path: Path, setting: dict[str, Any]
) -> None:
    """Questions that are asked ahead, and rounds that replace others, are told the number before the step
    that asks them, also in a killed and continued run. Rows of metrics have the number after a step."""
    (tmp_path / "mine.py").write_text(EXPLORER, encoding="utf-8")
    changes = {
        "explorer": {
            "name": f"{tmp_path / 'mine.py'}:Counting",
            "ensemble": {"members": 2, "hidden": 4, "batch": 4, "steps": 1},
        },
        "algorithm.prompts": 6,
        "evaluation": None,
        "checkpoint.every": 1,
        **setting,
    }
    whole, killed = (world.config("dpo", made(tmp_path / name), changes) for name in ("whole", "killed"))
    assert oat("train", whole) == 0
    run_dir = whole.with_suffix("")
    store = Reader(run_dir / "ledger.sqlite")
    paid = [0]
    for step in range(4):
        found = store.answers(store.taken("train", step) + store.thrown_away(step))
        compared = [
            intent for intent, answer, _ in found if intent.question.kind == "compare" and answer.queries > 0
        ]
        assert not {UNASKED, ENSEMBLE} & {intent.question.oracle for intent in compared}
        paid.append(paid[-1] + len(compared))
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [row["oracle/pairs"] for row in rows[1:]] == paid[1:]
    assert paid == sorted(set(paid)), "each step paid for some"
    told = [intent.question for intent in store.answered()]
    assert {question.notes["step"] for question in told} >= {0.0, 1.0}
    for question in told:
        assert question.notes == {"pairs": paid[question.key.step], "step": question.key.step}
    if "oracle.max_outstanding" in setting:
        assert any(intent.question.key.step < 3 for intent in store.taken("train", 3)), "asked ahead"
    if "sampling.refill_rounds" in setting:
        assert any(question.key.round > 0 for question in told), "refilled"
    assert {question.oracle for question in told} >= {ENSEMBLE}
    store.close()

    def die() -> int:
        from oat.learner.learner import Learner

        kill_at(Learner, "update", 4)
        return oat("train", killed)

    assert forked(die, tmp_path / "log") == -signal.SIGKILL, (tmp_path / "log").read_text()
    assert oat("train", killed) == 0
    assert digest_run(killed.with_suffix("")) == digest_run(run_dir)


def made(folder: Path) -> Path:
    folder.mkdir()
    return folder
