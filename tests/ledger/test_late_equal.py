"""The feedback, counts and decisions of a run do not depend on the arrival times of answers, if the run waits
for each answer (docs/ledger.md, Late answers)."""

import json
import random
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from fixtures import World, oat
from late import Played, Slow, play

from oat.commands.digest import digest_run
from oat.ledger.audit import contradictions
from oat.ledger.ledger import Ledger
from oat.ledger.store import Store
from oat.seeds import Seeds
from oat.types.questions import Budget

SETTINGS: dict[str, dict[str, Any]] = {
    "asked ahead": {},
    "every time anew": {"repeats": 0},
    "means of three": {"repeats": 3},
    "an answer's age": {"max_age": 1},
    "a budget in queries": {"budgets": {"train": Budget(queries=50)}},
    "a budget in money": {"budgets": {"train": Budget(cost=30.0)}},
    "a budget in tokens, and an age": {"budgets": {"train": Budget(tokens=120)}, "max_age": 2},
}


def played(
    path: Path, delays: random.Random | None, settings: dict[str, Any], **plan: int
) -> tuple[Played, str]:
    """Return what a run with its own ledger saw, and the digest of the ledger."""
    with closing(Store(path)) as store:
        ledger = Ledger(
            store, {"o": Slow(delays)}, Seeds(0), labels="threshold", deadline_s=600.0, **settings
        )
        found = play(ledger, **plan)
        assert contradictions(store) == []
        return found, store.digest()


@pytest.mark.sample("*-11", seconds=1.2)
@pytest.mark.parametrize("ahead", [0, 11])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
def test_delays_change_nothing_that_is_read(tmp_path: Path, settings: dict[str, Any], ahead: int) -> None:
    """Runs with late answers take the same feedback as a run whose answers come at once. A round has three
    questions and a step takes four, so some questions always remain."""
    plan = {"steps": 7, "count": 4, "size": 3, "ahead": ahead}
    first, digest = played(tmp_path / "at once", None, settings, **plan)
    assert first.feedback[-1].queries > 0
    for seed in range(2):
        other, again = played(tmp_path / f"late {seed}", random.Random(seed), settings, **plan)
        assert [feedback.queries for feedback in other.feedback] == [
            feedback.queries for feedback in first.feedback
        ]
        for one, two in zip(first.feedback, other.feedback, strict=True):
            assert [item.question.key for item in two.items] == [item.question.key for item in one.items]
            assert two.expired == one.expired
        assert other.spent == first.spent
        assert again == digest


def test_what_is_known_at_a_step_is_what_steps_took(tmp_path: Path) -> None:
    """Two rounds are answered and a step takes one of them. The queries of the second round count with the
    step that takes it."""
    with closing(Store(tmp_path / "ledger")) as store:
        ledger = Ledger(store, {"o": Slow()}, Seeds(0), labels="threshold", deadline_s=600.0)
        found = play(ledger, steps=3, count=2, ahead=2)
        taken = [
            sum(item.answer.queries for feedback in found.feedback[: step + 1] for item in feedback.items)
            for step in range(3)
        ]
        assert [feedback.queries for feedback in found.feedback] == taken
        assert [store.take_price("train", step).queries for step in range(3)] == taken


def test_a_ledger_of_before_keeps_its_numbers(tmp_path: Path) -> None:
    """In an older ledger, a step's number of queries includes all answers that had arrived. These numbers are
    replayed, and later steps count taken answers only."""
    plan = {"count": 2, "ahead": 2}
    with closing(Store(tmp_path / "ledger")) as store:
        ledger = Ledger(store, {"o": Slow()}, Seeds(0), labels="threshold", deadline_s=600.0)
        found = [feedback.queries for feedback in play(ledger, steps=3, **plan).feedback]
        store.db.execute("UPDATE takes SET queries = queries + 5")
        replayed = play(ledger, steps=5, **plan)
        assert [feedback.queries for feedback in replayed.feedback[:3]] == [queries + 5 for queries in found]
        assert [store.take_price("train", step).queries for step in range(5)] == [
            feedback.queries for feedback in replayed.feedback
        ]
        assert replayed.feedback[-1].queries == store.spent("train").queries


RUNS: dict[str, dict[str, Any]] = {
    "evaluated by queries": {
        "evaluation.every": 1,
        "evaluation.every_queries": 20,
        "oracle.max_answer_age": 2,
        "learner.sync_every": 2,
    },
    "a budget": {"stop": {"max_queries": 45}, "learner.buffer": {"questions": 10}},
}


@pytest.mark.sample("a budget", seconds=1.3)
@pytest.mark.parametrize("changes", RUNS.values(), ids=RUNS.keys())
def test_runs_whose_answers_come_at_other_times_are_one(
    world: World, tmp_path: Path, changes: dict[str, Any]
) -> None:
    oracle = {
        "oracle.name": world.late,
        "oracle.max_outstanding": 9,
        "engine": {"name": "torch", "threads": 1},
    }
    digests = []
    for number in range(2):
        (tmp_path / str(number)).mkdir()
        assert oat("train", world.config("dpo", tmp_path / str(number), {**oracle, **changes})) == 0
        digests.append(digest_run(tmp_path / str(number) / "dpo"))
    assert digests[0] == digests[1]
    rows = [json.loads(line) for line in (tmp_path / "0" / "dpo" / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["oracle/queries"] > 20
