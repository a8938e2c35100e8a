"""Stop rules end a run at a step boundary, with an evaluation and a checkpoint. Prompts that do not fit the
context are refused, or cut by a named rule."""

import json
from pathlib import Path

import pytest
from fixtures import World, oat

from oat.commands.digest import digest_run
from oat.control.stop import Stop
from oat.types import Price, Spent
from oat.types.questions import Budget


def rows(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_the_first_rule_that_is_met_ends_it() -> None:
    stop = Stop(last=5, budget=Budget(queries=100, cost=2.5), max_hours=1.0)
    assert stop.reason(4, Spent(Price(99, 10_000, 2.4))) is None
    assert stop.reason(5, Spent()) == "all 5 steps are done"
    assert stop.reason(7, Spent()) == "7 steps are done, and it was to end after 5"
    assert "100 queries are spent (stop.max_queries 100)" in str(stop.reason(1, Spent(Price(100))))
    assert "2.5 cost are spent" in str(stop.reason(1, Spent(Price(1, 0, 2.5))))
    assert "; spent: 0.3 of stop.max_cost 0.4" in str(
        Budget(cost=0.4).used_up(Spent(Price(0, 0, 0.1 + 0.2), refused=Price(0, 0, 0.2)))
    )
    stop.load_state({"seconds": 3601.0})
    assert "stop.max_hours 1.0" in str(stop.reason(1, Spent()))


def test_a_rest_that_buys_nothing_ends_it() -> None:
    stop = Stop(last=None, budget=Budget(queries=10))
    assert "pays no further question; spent: 8 of stop.max_queries 10" in str(
        stop.reason(3, Spent(Price(8), refused=Price(3)))
    )
    assert stop.reason(3, Spent(Price(8), refused=Price(2))) is None, (
        "answers cost less than was set aside for them"
    )


def test_queries_end_a_run_and_its_end_is_evaluated_and_saved(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = world.config(
        "grpo", tmp_path, {"stop": {"max_queries": 30}, "evaluation.every": 100, "checkpoint.every": 100}
    )
    assert oat("train", config) == 0
    found = rows(tmp_path / "grpo")
    spent = [row["oracle/queries"] for row in found[1:]]
    assert spent[-2] < 30 == spent[-1]
    assert found[-1]["answers/unpaid_frac"] > 0
    assert "eval/sampled" in found[-1]
    assert "queries are spent (stop.max_queries 30)" in capsys.readouterr().out
    before = digest_run(tmp_path / "grpo")
    assert oat("train", config) == 0
    assert digest_run(tmp_path / "grpo") == before


def test_hours_end_a_run_over_all_its_restarts(world: World, tmp_path: Path) -> None:
    config = world.config("dpo", tmp_path, {"stop": {"max_hours": 1e-9}})
    assert oat("train", config) == 0
    assert [row["step"] for row in rows(tmp_path / "dpo")] == [0]
    assert oat("train", config, "--stop.max_hours", "1", "--stop.max_steps", "2") == 0
    assert [row["step"] for row in rows(tmp_path / "dpo")] == [0, 1, 2]


def test_a_run_without_an_end_is_refused(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = world.config("dpo", tmp_path, {"stop": {}})
    assert oat("train", config) == 2
    assert "the run would never end" in capsys.readouterr().err
    assert oat("train", config, "--prompts.epochs", "1") == 0


def test_fewer_steps_than_are_done(world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = world.config("grpo", tmp_path, {"stop.max_steps": 3, "evaluation": None})
    assert oat("train", config) == 0
    before = digest_run(tmp_path / "grpo")
    assert oat("train", config, "--stop.max_steps", "2") == 0
    assert "finished, 3 steps are done, and it was to end after 2" in capsys.readouterr().out
    assert digest_run(tmp_path / "grpo") == before


def test_a_schedule_that_ends_with_the_run_is_made_longer_by_name(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = world.config(
        "grpo", tmp_path, {"stop.max_steps": 2, "learner.schedule": "linear", "evaluation": None}
    )
    assert oat("train", config) == 0
    assert oat("train", config, "--stop.max_steps", "3") == 2
    refused = capsys.readouterr().err
    assert "learner.schedule_steps: 2 -> 3 (it follows from stop.max_steps" in refused
    assert "--learner.schedule_steps 2" in refused
    assert oat("train", config, "--stop.max_steps", "3", "--learner.schedule_steps", "4") == 2
    assert "stop.max_steps" not in capsys.readouterr().err
    assert oat("train", config, "--stop.max_steps", "3", "--learner.schedule_steps", "2") == 0
    assert len(rows(tmp_path / "grpo")) == 4


def test_a_prompt_that_leaves_too_little_context(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = world.config(
        "grpo", tmp_path, {"sampling.max_new_tokens": 62, "stop.max_steps": 1, "evaluation": None}
    )
    assert oat("train", config) == 2
    refused = capsys.readouterr().err
    assert "sampling.overflow" in refused
    assert "lower sampling.max_new_tokens" in refused
    assert "prompts.max_tokens" not in refused, "no prompt has 2 tokens or fewer"
    assert oat("train", config, "--sampling.max_new_tokens", "64", "--run_dir", tmp_path / "none") == 2
    refused = capsys.readouterr().err
    assert "leaves room for 0 (64 tokens less sampling.max_new_tokens: 64)" in refused
    (tmp_path / "bare.yaml").write_text(config.read_text().replace("max_new_tokens: 62", "temperature: 1.0"))
    assert oat("check", tmp_path / "bare.yaml") == 2
    assert "(64 tokens less sampling.max_new_tokens: 256, the default)" in capsys.readouterr().err
    assert "prompts.max_tokens" not in refused
    assert oat("train", config, "--sampling.overflow", "cut", "--run_dir", tmp_path / "cut") == 0
