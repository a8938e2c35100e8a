"""Budgets of an evaluation: separate from training, never exceeded, and with the payments of a failed
evaluation."""

import itertools
import warnings
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from evaluations import evaluated, killed_and_continued, records, rows
from fixtures import World, forked, kill_at, logged, named, oat

from oat.commands.digest import digest_run
from oat.evaluation.evaluation import Evaluation
from oat.ledger.store import Store
from oat.reports.accounts import accounts
from oat.types import Price


def test_budgets_and_waits_that_nobody_fills(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Refused are a wait for queries of an oracle that costs none, a budget of an environment that costs
    nothing, and a prompt column whose name the records need."""
    free = {
        "oracle.name": "recorded",
        "prompts.responses": ["answer"],
        "algorithm": {"name": "sft", "prompts": 4},
    }
    config = world.config(
        "sft", tmp_path, {**free, "evaluation.oracle": world.oracle, "evaluation.every_queries": 5}
    )
    assert oat("train", config) == 2
    assert "evaluation.every_queries is 5: recorded costs no queries" in capsys.readouterr().err
    (tmp_path / "game.py").write_text("class Game: ...\n", encoding="utf-8")
    played = {
        "oracle.name": "environment",
        "sampling.environment": f"{tmp_path / 'game.py'}:Game",
        "evaluation.max_queries": 5,
    }
    assert oat("train", world.config("grpo", tmp_path, played)) == 2
    assert "environment costs nothing; remove max_queries" in capsys.readouterr().err
    assert oat("train", world.config("grpo", tmp_path, {"prompts.prompt_key": "output"})) == 2
    assert "prompts.prompt_key is 'output': records" in capsys.readouterr().err


def test_a_budget(world: World, tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    """An evaluation takes twelve queries and the budget has thirty. Two evaluations are made, two are
    skipped, and one warning says so."""
    config = world.config(
        "grpo", tmp_path, {"evaluation.max_queries": 30, "oracle.repeats": 0, "stop.max_steps": 6}
    )
    assert oat("train", config) == 0
    assert evaluated(tmp_path / "grpo").keys() == {0, 2}
    assert evaluated(tmp_path / "grpo", "eval/skipped") == {4: 1.0, 6: 1.0}
    said = [str(warning.message) for warning in recwarn if "max_queries" in str(warning.message)]
    assert len(said) == 1
    assert "an evaluation may cost 12 queries, and 24 of 30 are spent (evaluation.max_queries)" in said[0]
    with closing(Store(tmp_path / "grpo" / "ledger.sqlite")) as store:
        assert store.spent("eval") == Price(24)
    assert not (tmp_path / "grpo" / "evaluations" / "step_00000004.jsonl").exists()


@pytest.mark.sample("gold", seconds=0.6)
@pytest.mark.parametrize("judge", ["oracle", "gold"])
def test_a_budget_is_held_against_what_the_oracle_says_it_costs(
    world: World,
    tmp_path: Path,
    judges: str,
    judge: str,
    recwarn: pytest.WarningsRecorder,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An evaluation costs twenty-four queries by the oracle's own price, so the second does not fit into
    thirty. After it, samples are drawn only for the judge that has a budget left."""
    drawn, answer = [], Evaluation._sample
    monkeypatch.setattr(
        Evaluation, "_sample", lambda self, mode: drawn.append(mode.name) or answer(self, mode)
    )
    budget = (
        {"evaluation.max_queries": 30, f"evaluation.{judge}.max_queries": 30}
        if judge == "gold"
        else {"evaluation.max_queries": 30}
    )
    changes = {
        f"evaluation.{judge}": {"name": f"{judges}:Dear"},
        **budget,
        "oracle.repeats": 0,
        "stop.max_steps": 8,
    }
    assert oat("train", world.config("grpo", tmp_path, changes)) == 0
    prefix, purpose, section = (
        ("eval/", "eval", "evaluation") if judge == "oracle" else ("eval/gold_", "gold", "evaluation.gold")
    )
    assert evaluated(tmp_path / "grpo", f"{prefix}sampled").keys() == {0}
    skipped = evaluated(tmp_path / "grpo", f"{prefix}skipped")
    assert skipped == ({2: 1.0, 4: 1.0, 6: 1.0, 8: 1.0} if judge == "oracle" else {2: 1.0})
    said = [str(warning.message) for warning in recwarn if f"({section}.max_queries)" in str(warning.message)]
    assert len(said) == 1
    assert "after 2 steps" in said[0]
    assert "an evaluation may cost 24 queries, and 24 of 30 are spent" in said[0]
    assert drawn == ["sampled", "greedy"] * (2 if judge == "oracle" else 3)
    with closing(Store(tmp_path / "grpo" / "ledger.sqlite")) as store:
        assert store.spent(purpose) == Price(24)
        assert not any(account.unpaid for account in accounts(store))


@pytest.mark.sample("oracle-*", seconds=0.3)
@pytest.mark.parametrize(
    ("judge", "limit", "words"),
    [
        ("oracle", {"max_tokens": 100}, "84 tokens, and 84 of 100 are spent (evaluation.max_tokens)"),
        ("gold", {"max_cost": 4.0}, "3 cost, and 3 of 4 are spent (evaluation.gold.max_cost)"),
    ],
)
def test_a_budget_of_tokens_or_money(
    world: World,
    tmp_path: Path,
    judges: str,
    judge: str,
    limit: dict[str, float],
    words: str,
    recwarn: pytest.WarningsRecorder,
) -> None:
    """The budget pays for one evaluation, and the second is skipped. An evaluation has twelve responses of
    seven tokens and 0.25 in money each."""
    section = "evaluation.gold." if judge == "gold" else "evaluation."
    changes = {
        f"evaluation.{judge}": {"name": f"{judges}:Metered"},
        **{f"{section}{name}": value for name, value in limit.items()},
    }
    assert (
        oat("train", world.config("grpo", tmp_path, {**changes, "oracle.repeats": 0, "stop.max_steps": 4}))
        == 0
    )
    prefix = "eval/gold_" if judge == "gold" else "eval/"
    assert evaluated(tmp_path / "grpo", f"{prefix}sampled").keys() == {0}
    assert evaluated(tmp_path / "grpo", f"{prefix}skipped").keys() >= {2}
    assert len([warning for warning in recwarn if words in str(warning.message)]) == 1


@pytest.mark.parametrize("limit", ["max_tokens", "max_cost"])
def test_a_limit_that_an_oracle_cannot_keep_is_refused(
    world: World, tmp_path: Path, judges: str, limit: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = world.config("grpo", tmp_path, {"evaluation.gold": {"name": f"{judges}:Constant", limit: 5}})
    for command in ("check", "train"):
        assert oat(command, config) == 2
        assert (
            f"evaluation.gold.{limit} is set, and the oracle {judges}:Constant does not say what a "
            "question costs"
        ) in capsys.readouterr().err


def test_what_is_known_costs_a_budget_nothing(world: World, tmp_path: Path) -> None:
    """Evaluations of the reference have the same responses every time. The first one pays for all, so the
    budget allows the later ones."""
    changes = {
        "evaluation.slot": "reference",
        "evaluation.max_queries": 12,
        "oracle.whole_groups": False,  # else a function is shown equal responses again
    }
    config = world.config("grpo", tmp_path, changes)
    assert oat("train", config) == 0
    assert evaluated(tmp_path / "grpo").keys() == {0, 2, 4}


@pytest.mark.slow(
    instead="tests/faults/test_waves_killed.py; test_a_killed_run_makes_the_same_evaluations", seconds=3.6
)
@pytest.mark.parametrize(
    ("place", "call"),
    [("oat.ledger.outstanding:Outstanding.submit", 8), ("an evaluation is written", 2)],
)
def test_a_budget_that_a_kill_left_half_empty(world: World, tmp_path: Path, place: str, call: int) -> None:
    """A run is killed in an evaluation with a budget. Continued, it finishes this evaluation at any price,
    and decides later ones as the unbroken run does."""
    flags = ("--evaluation.max_queries", "30", "--stop.max_steps", "6")
    config = world.config("grpo", tmp_path)
    assert oat("train", config, "--run_dir", tmp_path / "unbroken", *flags) == 0
    killed_and_continued(config, tmp_path / "killed", place, call, *flags)
    assert digest_run(tmp_path / "killed") == digest_run(tmp_path / "unbroken")


def test_answers_about_an_evaluation_that_failed_do_not_stand_for_a_later_one(
    world: World, tmp_path: Path, judges: str
) -> None:
    """An evaluation fails with half of its answers, and its questions are closed. The next evaluation gets
    its own answers."""
    found = []
    for fails in ("", "half"):
        folder = tmp_path / f"fails {fails}"
        folder.mkdir()
        own = {"name": f"{judges}:Constant", "fails": fails, "value": None}
        config = world.config("grpo", folder, {"evaluation.oracle": own, "learner.learning_rate": 0.03})
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert oat("train", config) == 0
        found.append((rows(folder / "grpo"), records(folder / "grpo", 4)))
    assert found[1][0][2]["eval/failed"] == 1.0
    for step, name in itertools.product((0, 4), ("eval/sampled", "eval/greedy")):
        assert found[0][0][step][name] == found[1][0][step][name]
    assert found[0][1] == found[1][1]
    assert found[0][0][2]["eval/sampled"] != found[0][0][4]["eval/sampled"]


@pytest.mark.sample("section0-*", seconds=3.7)
@pytest.mark.inventory(101)
@pytest.mark.parametrize(
    ("section", "steps"),
    [
        ({"every": 2}, [0, 2, 4, 6, 8, 10]),
        ({"every": 2, "every_queries": 30}, [0, 3, 6, 9, 10]),
        ({"every": 1, "every_queries": 30}, [0, 3, 6, 9, 10]),
        ({"every": 4, "every_queries": 30}, [0, 4, 8, 10]),
        ({"every": 4, "every_queries": 60}, [0, 5, 10]),
        ({"every": 1, "every_hours": 1}, [0, 10]),
    ],
)
def test_an_evaluation_that_is_due_waits_for_queries(
    world: World, tmp_path: Path, section: dict[str, Any], steps: list[int]
) -> None:
    """With `evaluation.every_queries`, evaluations come at the listed steps. A step costs twelve queries. The
    start and the end have an evaluation in every case."""
    changes = {f"evaluation.{name}": value for name, value in section.items()}
    assert (
        oat("train", world.config("grpo", tmp_path, {**changes, "stop.max_steps": 10, "oracle.repeats": 0}))
        == 0
    )
    assert list(evaluated(tmp_path / "grpo")) == steps


def test_what_an_evaluation_lost_is_not_asked_again_by_training(
    world: World, tmp_path: Path, judges: str
) -> None:
    """The evaluation's oracle fails when it is asked, and the run is killed. Continued, the run does not ask
    the lost questions in a training step."""
    config = world.config(
        "grpo", tmp_path, {"evaluation.oracle": {"name": f"{judges}:Constant", "fails": "submit"}}
    )
    place, log = named("oat.learner.learner:Learner.update"), tmp_path / "log"
    assert forked(lambda: kill_at(*place, 3) or oat("train", config), log) < 0
    assert logged(log, "train", config) == 0, log.read_text()
