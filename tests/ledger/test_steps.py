"""Rewards of steps and scores of sources in the ledger: stored, known again, awaited, and checked."""

import json
import math
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fixtures import make_group, make_questions, recorded
from old_ledgers import make_old

from oat.ledger.audit import contradictions
from oat.ledger.intents import Known, mean
from oat.ledger.ledger import Ledger
from oat.ledger.reader import Reader
from oat.ledger.store import Store
from oat.seeds import Seeds
from oat.testing import FakeOracle
from oat.types import Answer, Feedback, Group, Kind, Question, Steps


class Stepwise(FakeOracle):
    """An oracle whose answers have what `say` returns for a text: steps, and the scores of two sources."""

    gives_steps = "characters"

    def __init__(self, say: Callable[[str], Steps], **options: Any):
        super().__init__(lambda question: [0.0] * question.size, **options)
        self.say = say

    def _answer(self, question: Question) -> Answer:
        steps = tuple(self.say(text) for text in question.candidates)
        sources = {
            "first": tuple(float(len(text)) for text in question.candidates),
            "second": tuple(None if text == "a" else -1.5 for text in question.candidates),
        }
        answer = replace(super()._answer(question), sources=sources)
        if question.kind == "compare":
            return replace(answer, values=(0.25,))
        values = tuple(math.fsum(reward for _, reward in own) for own in steps)
        return replace(answer, values=values, steps=steps)


def halves(text: str) -> Steps:
    """Return no step for one character, else a step for the first one and one for the others."""
    return () if len(text) < 2 else ((1, 0.1), (len(text), 0.2 * len(text)))


def opened(path: Path, oracle: FakeOracle, **settings: Any) -> Ledger:
    return Ledger(Store(path), {"o": oracle}, Seeds(0), labels="threshold", deadline_s=60.0, **settings)


def step(ledger: Ledger, number: int, *groups: Group, kind: Kind = "score") -> Feedback:
    ledger.ask(number, 0, groups, make_questions(list(groups), kind, number, oracle="o"))
    return ledger.take_feedback(number, len(groups))


def facts(feedback: Feedback) -> list[tuple[Any, ...]]:
    answers = [item.answer for item in feedback.items]
    return [(a.values, a.marks, a.steps, a.step_unit, a.sources) for a in answers]


def expected(*texts: str) -> tuple[Any, ...]:
    steps = tuple(halves(text) for text in texts)
    return (
        tuple(math.fsum(reward for _, reward in own) for own in steps),
        ("ok",) * len(texts),
        steps if any(steps) else (),
        "characters",
        {
            "first": tuple(float(len(text)) for text in texts),
            "second": tuple(None if text == "a" else -1.5 for text in texts),
        },
    )


def test_they_are_known_again(tmp_path: Path) -> None:
    """Steps and sources come with a value, from whatever place it is: the oracle, the cache, or the answer to
    an equal question of the same round."""
    oracle = Stepwise(halves)
    ledger = opened(tmp_path / "ledger", oracle)
    assert facts(step(ledger, 0, make_group(0, "abc", "a"))) == [expected("abc", "a")]
    twin = replace(make_group(0, "bb", "dd"), prompt=replace(make_group(0).prompt, occurrence=1))
    assert facts(step(ledger, 1, make_group(0, "bb", "abc", "bb"), twin)) == [
        expected("bb", "abc", "bb"),
        expected("bb", "dd"),
    ]
    assert facts(step(ledger, 2, make_group(0, "a", "dd", "abc"))) == [expected("a", "dd", "abc")]
    assert [q.candidates for q in oracle.asked] == [("abc", "a"), ("bb",), ("dd",)]
    assert contradictions(ledger.store) == []
    digest = ledger.store.digest()
    ledger.close()
    again = opened(tmp_path / "ledger", Stepwise(halves))
    assert again.store.digest() == digest
    assert facts(again.take_feedback(1, 2))[1] == expected("bb", "dd")
    again.close()


def test_a_restart_completes_what_was_awaited(tmp_path: Path) -> None:
    """An answer that awaits values of another question is on disk with the steps of its own values."""

    def late(question: Question) -> int | None:
        return None if question.candidates == ("abc",) else 0

    ledger = opened(tmp_path / "ledger", Stepwise(halves, late=late))
    groups = [make_group(0, "abc"), replace(make_group(0, "bb", "abc"), prompt=make_group(1).prompt)]
    groups[1] = replace(groups[1], prompt=replace(make_group(0).prompt, occurrence=1))
    ledger.ask(0, 0, groups, make_questions(groups, "score", 0, oracle="o"))
    ledger._settle("train", 0, 2, 0, 0.1)
    (waiting,) = [ledger.store.answer(row)[0] for row in ledger.store.waiting(-1)]
    assert (waiting.marks, waiting.steps) == (("ok", "awaited"), (halves("bb"), ()))
    ledger.close()
    again = opened(tmp_path / "ledger", Stepwise(halves))
    assert facts(again.take_feedback(0, 2)) == [expected("abc"), expected("bb", "abc")]
    again.close()


def test_a_pair_in_the_other_order_has_the_sources_in_the_other_order(tmp_path: Path) -> None:
    ledger = opened(tmp_path / "ledger", Stepwise(halves, answers="compare"))
    (first,) = step(ledger, 0, make_group(0, "bb", "a"), kind="compare").items
    (turned,) = step(ledger, 1, make_group(0, "a", "bb"), kind="compare").items
    assert first.answer.sources == {"first": (2.0, 1.0), "second": (-1.5, None)}
    assert turned.answer.sources == {"first": (1.0, 2.0), "second": (None, -1.5)}
    assert (first.answer.values, turned.answer.values) == ((0.25,), (0.75,))
    ledger.close()


def test_the_mean_of_several_answers_has_the_mean_of_their_steps(tmp_path: Path) -> None:
    said = iter([((1, 1.0), (3, 0.5)), ((2, 4.0), (3, 0.1))])
    ledger = opened(tmp_path / "ledger", Stepwise(lambda text: next(said)), repeats=2)
    for number in range(2):
        step(ledger, number, make_group(0, "abc"))
    (item,) = step(ledger, 2, make_group(0, "abc")).items
    assert item.answer.steps == (((1, 0.5), (2, 2.0), (3, 0.3)),)
    assert item.answer.values == (math.fsum([0.5, 2.0, 0.3]),)
    assert item.answer.sources == {"first": (3.0,), "second": (-1.5,)}
    ledger.close()


def test_a_mean_with_a_value_without_steps_has_none() -> None:
    whole = Known(2.0, "ok", sources=(("x", (1.0,)), ("y", (None,))))
    parted = Known(1.0, "ok", (), ((2, 1.0),), sources=(("x", (None,)), ("y", (4.0,)), ("z", (3.0,))))
    assert mean([whole, parted]) == Known(1.5, "ok", sources=(("x", (1.0,)), ("y", (4.0,)), ("z", (3.0,))))
    in_tokens = parted._replace(step_unit="tokens")
    assert mean([in_tokens, parted]).steps == ()
    assert mean([in_tokens, in_tokens]) == in_tokens


def filled(path: Path, **fields: Any) -> Store:
    """Return a store with one taken answer."""
    store, groups = Store(path), [make_group(0, "abc", "de")]
    with store:
        store.add_round("train", 0, 0, groups, make_questions(groups, "score", 0, oracle="o"), [0])
        (row,) = recorded(store, "train", 0)
        answer = Answer(row.question.key, (0.5, 1.0), ("ok", "ok"), 2, by="o", **fields)
        store.add_answers([(row.id, answer, None)])
        store.add_take("train", 0, [row.id])
    assert store.answer(row) == (answer, None)
    return store


STEPS: tuple[Steps, ...] = (((2, 0.2), (3, 0.3)), ())
SOURCES = {"ü": (0.1, None), "x": (1e-300, 2.0)}


def test_digests_tell_answers_apart_and_an_answer_without_them_as_ever(tmp_path: Path) -> None:
    given: Sequence[dict[str, Any]] = (
        {},
        {"steps": STEPS},
        {"steps": STEPS, "step_unit": "tokens"},
        {"sources": SOURCES},
        {"sources": {"ü": (0.1, None)}},
        {"steps": STEPS, "sources": SOURCES},
    )
    stores = [filled(tmp_path / str(number), **fields) for number, fields in enumerate(given)]
    digests = [store.digest() for store in stores]
    assert len(set(digests)) == len(given)
    assert [contradictions(store) for store in stores] == [[]] * len(given)
    make_old(stores[0].db, 6)
    for store in stores:
        store.close()
    with closing(Reader(tmp_path / "0")) as old:
        assert old.digest() == digests[0]
    with closing(sqlite3.connect(tmp_path / "0")) as database:
        columns = [name for _, name, *_ in database.execute("PRAGMA table_info(answers)")]
    assert "steps" not in columns, "who only looks changes nothing"


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("steps", "[", "cannot be checked"),
        ("steps", '["characters", [[2, 0.2], [3, 0.3]]]', "have one entry for each"),
        ("steps", '["words", [[2, 0.2], [3, 0.3]], []]', "have one entry for each"),
        ("steps", '["characters", [[3, 0.2], [2, 0.3]], []]', "do not ascend"),
        ("steps", '["characters", [[2, 0.2], [2, 0.3]], []]', "do not ascend"),
        ("steps", '["characters", [[2, 0.2], [4, 0.3]], []]', "outside"),
        ("steps", '["characters", [[2, 0.2], [3, 0.2]], []]', "sum"),
        ("sources", "[", "cannot be checked"),
        ("sources", '{"x": [1.0]}', "one score or none for each"),
        ("sources", '{"x": [1.0, "2"]}', "one score or none for each"),
    ],
)
def test_a_check_finds_what_contradicts_itself(tmp_path: Path, column: str, value: str, message: str) -> None:
    store = filled(tmp_path / "ledger", steps=STEPS, sources=SOURCES)
    assert contradictions(store) == []
    store.db.execute(f"UPDATE answers SET {column} = ?", (value,))
    found = contradictions(store)
    assert found
    assert message in " ".join(found), found
    store.close()


def test_a_check_finds_a_cached_value_with_other_steps(tmp_path: Path) -> None:
    ledger = opened(tmp_path / "ledger", Stepwise(halves))
    step(ledger, 0, make_group(0, "abc", "a"))
    assert contradictions(ledger.store) == []
    (text,) = ledger.store.db.execute("SELECT steps FROM cache WHERE steps != '[]'").fetchone()
    unit, [*_, (end, reward)] = json.loads(text)
    other = json.dumps([unit, [[end, reward + 0.1]]])
    ledger.store.db.execute("UPDATE cache SET steps = ? WHERE steps != '[]'", (other,))
    assert any("is no answer that step 0 took" in each for each in contradictions(ledger.store))
    ledger.close()
