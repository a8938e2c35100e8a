"""Answers without a value: a judge without verdicts ends the run that pays for it, and other oracles cause a
warning. Each message has a hint that fits the cause."""

import json
import signal
import warnings
from pathlib import Path
from typing import Any

import pytest
from faulty_server import Reply
from fixtures import World, forked, kill_at, make_group, make_questions, oat
from openai_server import Shown, judging

from oat.config.alarm_settings import AlarmsConfig
from oat.control.alarms import Alarm, Alarms, alarms_of
from oat.control.silence import MISSING, WASTED, missing, warn_of_silence, why
from oat.errors import OatWarning
from oat.learner.learner import Learner
from oat.ledger.store import Store
from oat.oracles.http_client import HttpClient
from oat.types import UNASKED, Answer, Item, Mark


def rows_of(run_dir: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def judge_of(url: str, **options: Any) -> dict[str, Any]:
    return {
        "name": "judge",
        "model": "m",
        "url": url,
        "orders": "one",
        "invalid": "skip",
        "timeout_s": 5.0,
        **options,
    }


def none_of(folder: Path, condition: str) -> str:
    """Return the name of a reward function that returns None if a condition of `place` holds."""
    (folder / "none.py").write_text(
        f"def reward(prompts, completions, **columns):\n    return [None if {condition} else float(place) "
        "for place, _ in enumerate(completions)]\n"
    )
    return f"{folder / 'none.py'}:reward"


def item_of(*marks: Mark, tokens: int = 0, cost: float = 0.0, oracle: str = "o") -> Item:
    group = make_group(0, *(f"a{place}" for place in range(max(2, len(marks)))))
    (question,) = make_questions([group], "score", 0, oracle=oracle)
    return Item(
        group, question, Answer(question.key, (0.0,) * len(marks), marks, 1, cost, tokens=tokens), None
    )


def test_shares_by_hand() -> None:
    """The shares of missing and wasted answers are of values, not of questions. A value that no oracle was
    asked for is not missing, and a value without cost is not wasted."""
    assert missing([]) == missing([item_of("tie", oracle=UNASKED)]) == {}
    items = [item_of("ok", "abstain", "tie"), item_of("failed"), item_of("tie", oracle=UNASKED)]
    assert missing(items) == {MISSING: 0.5}
    paid = [
        item_of("ok", "failed", tokens=3),
        item_of("abstain", "failed", cost=0.1),
        item_of("unpaid", "unpaid"),
    ]
    assert missing(paid) == {MISSING: pytest.approx(5 / 6), WASTED: 0.5}


@pytest.mark.parametrize(
    ("mark", "metric"), [("abstain", "abstained"), ("failed", "failed"), ("unpaid", "unpaid")]
)
def test_the_hint_is_that_of_the_commonest_cause(mark: str, metric: str) -> None:
    shares = {f"answers/{name}_frac": 0.2 for name in ("abstained", "failed", "unpaid")} | {
        f"answers/{metric}_frac": 0.4
    }
    alarms = Alarms({"unanswered": Alarm(MISSING, 1, "warn", -1.0, 0.49)}, 3, oracle="judge")
    with pytest.warns(
        UserWarning, match=r"alarm unanswered: answers/missing_frac is 0\.5, above 0\.49, in one step; "
    ) as said:
        alarms.check(1, {MISSING: 0.5, **shares}, is_saved=False)
    assert str(said[0].message).endswith(why(mark, "judge"))
    assert len(
        {why(mark, oracle) for oracle in ("judge", "remote", "reward_model", "gsm8k", "my.py:reward")}
    ) == (5 if mark == "abstain" else 1)


def test_by_default_half_is_warned_of_and_waste_ends_the_run() -> None:
    rules = alarms_of(AlarmsConfig(), {MISSING, WASTED})
    assert {name: (rule.patience, rule.action) for name, rule in rules.items()} == {
        "unanswered": (2, "warn"),
        "wasted": (3, "stop"),
    }
    assert rules["unanswered"].above < 0.5
    assert 0.5 < rules["wasted"].above < 1.0


def test_a_judge_without_verdicts_ends_the_run(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with judging(lambda shown: "Hmm.") as (_, model, url):
        config = world.config(
            "dpo", tmp_path, {"oracle": judge_of(url), "evaluation": None, "stop.max_steps": 16}
        )
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert oat("train", config) == 3
        asked = len(model.shown)
        said = capsys.readouterr().err.splitlines()[-1]
        assert oat("train", config) == 3
        assert capsys.readouterr().err.splitlines()[-1] == said
        assert len(model.shown) == asked
    assert "the run ended after 3 steps: alarm wasted: answers/wasted_frac is 1" in said
    texts = [str(each.message) for each in caught]
    assert sum("after 2 steps: alarm unanswered: answers/missing_frac is 1" in text for text in texts) == 1
    about = [text for text in (*texts, said) if "abstained: " in text]
    assert len(about) == 4, "at the first step, by both alarms, and of a run that has learned nothing yet"
    assert all("its replies have no verdict" in text and "docs/oracles/judge.md" in text for text in about)
    assert not any("reference_key" in text for text in texts)
    rows = rows_of(tmp_path / "dpo")
    assert [row.get(WASTED) for row in rows] == [None, 1, 1, 1]
    assert rows[-1]["optim/steps"] == 0
    assert Store(tmp_path / "dpo" / "ledger.sqlite").asked("train", 99, 0) <= 12


def test_what_costs_and_fails_ends_the_run_with_another_hint(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A judge's service fails every try but the first. Each try may have been paid, so the alarm ends the
    run, with a hint at the service's log. The test shortens the rest between two tries."""
    monkeypatch.setitem(HttpClient.__init__.__kwdefaults__, "rest_s", 0.01)
    monkeypatch.setitem(HttpClient.__init__.__kwdefaults__, "max_backoff_s", 0.01)

    def says(shown: Shown) -> Reply | dict[str, float]:
        return {"0": 0.9, "1": 0.1} if shown.number == 0 else Reply(status=500)

    with judging(says) as (_, _, url):
        changes = {"oracle": judge_of(url, tries=1), "evaluation": None, "stop.max_steps": 9}
        with pytest.warns(
            UserWarning, match="alarm unanswered: .*it failed: look at the log of what was asked"
        ):
            assert oat("train", world.config("dpo", tmp_path, changes)) == 3
    assert "after 4 steps: alarm wasted: " in (said := capsys.readouterr().err.splitlines()[-1])
    assert "it failed: look at the log of what was asked" in said


@pytest.mark.slow(instead="tests/faults/test_kill.py; the other tests of the file", seconds=1.3)
@pytest.mark.parametrize("every", [1, 100])
def test_a_run_that_is_killed_between_ends_at_the_same_step(world: World, tmp_path: Path, every: int) -> None:
    with judging(lambda shown: "Hmm.") as (_, _, url):
        changes = {
            "oracle": judge_of(url),
            "evaluation": None,
            "stop.max_steps": 16,
            "checkpoint.every": every,
        }
        config = world.config("dpo", tmp_path, changes)
        assert (
            forked(lambda: kill_at(Learner, "update", 3) or oat("train", config), tmp_path / "log")
            == -signal.SIGKILL
        )
        assert forked(lambda: oat("train", config), tmp_path / "log") == 3
    assert "the run ended after 3 steps: alarm wasted" in (tmp_path / "log").read_text()
    assert [row["alarms/raised"] for row in rows_of(tmp_path / "dpo")[1:]] == [0, 1, 2]


@pytest.mark.sample("grpo-place % 3*", seconds=0.8)
@pytest.mark.parametrize(
    ("algorithm", "condition", "raised"),
    [("grpo", "place % 2", [0, 1, 1]), ("grpo", "place % 3 == 0", [0, 0, 0]), ("sft", "True", [0, 1, 1])],
)
def test_what_is_free_is_warned_of(
    world: World, tmp_path: Path, algorithm: str, condition: str, raised: list[int]
) -> None:
    """The alarm is raised if half of the values of each question are missing, at any places. It is not raised
    for a third."""
    changes = {
        "oracle.name": none_of(tmp_path, condition),
        "evaluation": None,
        "stop.max_steps": 3,
        "algorithm.samples": 4,
    }
    changes |= {"algorithm.threshold": 1.0} if algorithm == "sft" else {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert oat("train", world.config(algorithm, tmp_path, changes)) == 0
    rows = rows_of(tmp_path / algorithm)[1:]
    assert [row["alarms/raised"] for row in rows] == raised
    assert not any(WASTED in row for row in rows)
    texts = [str(each.message) for each in caught if "alarm unanswered" in str(each.message)]
    assert len(texts) == raised[-1]
    assert all("its function returned None; look at prompts.reference_key" in text for text in texts)


def test_what_the_budget_does_not_allow_is_called_so(world: World, tmp_path: Path) -> None:
    """The budget pays for one of a step's four questions: each costs 4 queries. The alarm's message says that
    the budget did not allow the others."""
    changes = {
        "evaluation": None,
        "stop": {"max_queries": 4},
        "algorithm.samples": 4,
        "alarms.unanswered.patience": 1,
    }
    with pytest.warns(
        UserWarning,
        match=(
            r"alarm unanswered: answers/missing_frac is 0\.75, .*the budget did not allow them: raise "
            r"stop\.max_cost"
        ),
    ):
        assert oat("train", world.config("grpo", tmp_path, changes)) == 0


def test_late_episodes_name_the_deadline_of_the_environment() -> None:
    with pytest.warns(OatWarning) as said:
        warn_of_silence(set(), "train", 0, [item_of("failed", oracle="environment")])
    text = str(said[0].message)
    assert "sampling.environment_deadline_s" in text
    assert "oracle.deadline_s" not in text
    assert why("failed", "environment") in text
    assert "oracle.deadline_s" in why("failed", "remote")
