"""Budgets with late answers: the run learns from all paid answers, asks no needless question, and loses no
answer."""

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from fixtures import World, forked, kill_at, logged, make_group, make_questions, named, oat

from oat.commands.digest import digest_run
from oat.ledger.audit import contradictions
from oat.ledger.ledger import Ledger
from oat.ledger.store import Store
from oat.oracles.base import Oracle
from oat.oracles.callables import CallableOracle
from oat.reports.accounts import accounts
from oat.seeds import Seeds
from oat.types import Answer, Kind, Question
from oat.types.questions import Budget

SLOW = """
import asyncio

async def reward(prompts, completions, **columns):
    await asyncio.sleep(0.3)
    return [text.count("a") + 0.1 * text.count("b") for text in completions]
"""


def rows(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.sample("36-late", seconds=2.0)
@pytest.mark.parametrize("oracle", ["at once", "late"])
@pytest.mark.parametrize("ahead", [0, 36])
def test_a_run_ends_when_it_has_learned_from_all_it_paid_for(
    world: World, tmp_path: Path, oracle: str, ahead: int
) -> None:
    """A budget of 80 queries pays for 40 pairs, that is ten steps of four. After they are asked, nothing more
    is sampled, and the run ends when all are learned."""
    (tmp_path / "slow.py").write_text(SLOW)
    name = world.oracle if oracle == "at once" else f"{tmp_path / 'slow.py'}:reward"
    changes = {
        "oracle": {"name": name, "max_outstanding": ahead, "repeats": 0},
        "stop": {"max_queries": 80},
        "evaluation": None,
    }
    assert oat("train", world.config("dpo", tmp_path, changes)) == 0
    found, store = rows(tmp_path / "dpo"), Store(tmp_path / "dpo" / "ledger.sqlite")
    account = next(account for account in accounts(store) if account.oracle != "none")
    assert (account.queries, account.pending, account.asked - account.taken) == (80, 0, 0)
    assert account.answered - account.unpaid == 40
    assert account.unpaid <= 4, "of the round that spent the last of it"
    asked = {step for (step,) in store.db.execute("SELECT DISTINCT step FROM rounds")}
    assert asked == {*range(max(asked) + 1)}
    assert (max(asked) < 3) == bool(ahead), "what is asked ahead is asked early, and then nothing"
    assert 10 <= found[-1]["step"] <= 12
    assert contradictions(store) == []


@pytest.mark.slow(instead="test_a_run_ends_when_it_has_learned_from_all_it_paid_for", seconds=2.0)
def test_a_killed_run_learns_from_all_it_paid_for_too(world: World, tmp_path: Path) -> None:
    """A run is killed while it takes its last paid answers, two steps after a checkpoint. Continued, it
    learns from all answers that it paid for."""
    changes = {
        "oracle.max_outstanding": 20,
        "oracle.repeats": 0,
        "stop": {"max_queries": 80},
        "evaluation": None,
        "engine.threads": 1,
    }
    configs = []
    for name in ("unbroken", "killed"):
        (tmp_path / name).mkdir()
        configs.append(world.config("dpo", tmp_path / name, changes))
    assert oat("train", configs[0]) == 0
    last = int(rows(tmp_path / "unbroken" / "dpo")[-1]["step"])
    assert (
        forked(
            lambda: (
                kill_at(*named("oat.learner.learner:Learner.update"), last - 1) or oat("train", configs[1])
            ),
            tmp_path / "log",
        )
        < 0
    )
    assert logged(tmp_path / "log", "train", configs[1]) == 0
    assert digest_run(tmp_path / "killed" / "dpo") == digest_run(tmp_path / "unbroken" / "dpo")


class Post(Oracle):
    """An oracle whose answers arrive one per call."""

    answers: Kind = "compare"

    def __init__(self) -> None:
        self.open: dict[str, Question] = {}
        self.asked = 0

    def submit(self, questions: Sequence[Question]) -> list[str]:
        self.asked += len(questions)
        self.open.update({str(question.key): question for question in questions})
        return [str(question.key) for question in questions]

    def collect(self, tickets: Sequence[str], seconds: float) -> list[tuple[str, Answer]]:
        return [(ticket, Answer(self.open.pop(ticket).key, (0.9,), ("ok",), 1)) for ticket in tickets[:1]]


@pytest.fixture
def opened(tmp_path: Path) -> Callable[..., Ledger]:
    def make(oracle: object, deadline_s: float = 60.0, limit: int | None = None) -> Ledger:
        ledger = {"o": oracle}
        budgets = {"train": Budget(queries=limit)}
        return Ledger(
            Store(tmp_path / "ledger.sqlite"),
            ledger,
            Seeds(0),
            labels="threshold",
            deadline_s=deadline_s,
            budgets=budgets,
        )  # type: ignore[arg-type]

    return make


def ask(ledger: Ledger, step: int, number: int, kind: Kind = "compare") -> None:
    groups = [make_group(10 * step + place, "a", "b") for place in range(number)]
    ledger.ask(step, 0, groups, make_questions(groups, kind, step, oracle="o"))


def test_what_has_come_is_taken_in_also_beyond_what_a_step_needs(opened: Callable[..., Ledger]) -> None:
    """Answers that arrive beyond the need of a step are recorded. So a kill does not make the run pay for
    them twice."""
    ledger, post = opened(Post()), Post()
    ask(ledger, 0, 5)
    assert len(ledger.take_feedback(0, 2).items) == 2
    ledger.close()
    again = opened(post)
    assert (len(again.take_feedback(1, 3).items), post.asked) == (3, 0)


def test_an_answer_that_is_there_is_taken_also_past_its_deadline(opened: Callable[..., Ledger]) -> None:
    ledger = opened(Post(), deadline_s=0.05)
    ask(ledger, 0, 5)
    time.sleep(0.1)
    assert {item.answer.marks for item in ledger.take_feedback(0, 5).items} == {("ok",)}


def test_an_async_function_runs_from_when_it_was_asked(opened: Callable[..., Ledger]) -> None:
    async def reward(prompts: list[str], completions: list[str]) -> list[float]:
        return [1.0] * len(prompts)

    ledger = opened(CallableOracle(reward, "o"), deadline_s=1.0)
    ask(ledger, 0, 3, "score")
    time.sleep(1.2)
    assert {item.answer.marks for item in ledger.take_feedback(0, 3).items} == {("ok", "ok")}


def test_what_could_not_be_paid_is_no_answer_to_wait_for(opened: Callable[..., Ledger]) -> None:
    """The budget pays for four of six pairs. A step of two finds the two unpaid ones at once, and yet the
    four paid ones are taken first."""
    ledger = opened(Post(), limit=4)
    ask(ledger, 0, 6)
    assert [item.answer.marks for item in ledger.take_feedback(0, 2).items] == [("ok",)] * 2
    assert ledger.is_spent(1)
    assert ledger.spent_before(1).open == 2
    assert [item.answer.marks for item in ledger.take_feedback(1, 2).items] == [("ok",)] * 2
    assert ledger.spent_before(2).open == 0


CATCHES = """
import os, signal

def reward(prompts, completions, **columns):
    values = [float(len(text)) for text in completions]
    try:
        if os.path.exists({place!r}):
            os.remove({place!r})
            os.kill(os.getpid(), signal.SIGTERM)
            for _ in range(1000):
                pass
        return values
    except:
        return [0.0 for _ in completions]
"""


@pytest.mark.slow(instead="tests/faults/test_signals.py; tests/oracles/test_hostile_rewards.py", seconds=1.5)
def test_a_signal_that_a_reward_function_swallows_leaves_no_false_answer(
    world: World, tmp_path: Path
) -> None:
    place = tmp_path / "not yet"
    (tmp_path / "catches.py").write_text(CATCHES.format(place=str(place)))
    configs = []
    for name in ("unbroken", "ended"):
        (tmp_path / name).mkdir()
        changes = {"oracle.name": f"{tmp_path / 'catches.py'}:reward", "engine.threads": 1}
        configs.append(world.config("grpo", tmp_path / name, changes))
    assert logged(tmp_path / "log", "train", configs[0]) == 0
    place.touch()
    assert forked(lambda: oat("train", configs[1]), tmp_path / "log") == 75
    assert logged(tmp_path / "log", "train", configs[1]) == 0
    assert digest_run(tmp_path / "ended" / "grpo") == digest_run(tmp_path / "unbroken" / "grpo")
