"""Conditions on metrics that end a run (`stop.when`)."""

import json
import signal
from pathlib import Path

import pytest
from fixtures import World, forked, kill_at, oat

from oat.commands.digest import digest_run
from oat.control.stop import Stop, conditions_of
from oat.errors import ConfigError
from oat.types import Spent

WHEN = {"stop.when": {"eval/sampled": ">= -1e9"}, "evaluation.every": 3, "stop.max_steps": 9}


def rows(run_dir: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("text", "value", "holds"),
    [
        (">= 0.5", 0.5, True),
        ("> 0.5", 0.5, False),
        ("<0.5", 0.4, True),
        ("<= -1e-3", -0.001, True),
        ("< -1", 0.0, False),
    ],
)
def test_a_condition_is_a_sign_and_a_number(text: str, value: float, holds: bool) -> None:
    stop = Stop(last=None, when=conditions_of({"user/m": text}))
    assert stop.note({"other": value}) is None, "a missing metric fulfils nothing"
    assert (stop.note({"user/m": value}) is not None) == holds
    assert (stop.reason(1, Spent()) is not None) == holds


@pytest.mark.parametrize("text", ["0.5", "== 1", ">= much", ">", "", ">= nan"])
def test_what_is_no_condition_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^stop\.when of user/m is "):
        conditions_of({"user/m": text})


def test_a_condition_that_held_counts_only_while_the_run_has_it() -> None:
    stop = Stop(last=None, when=conditions_of({"user/m": "> 0"}))
    stop.note({"user/m": 1.0})
    again, other = (Stop(last=None, when=conditions_of({"user/m": text})) for text in ("> 0", "> 2"))
    for each in (again, other):
        each.load_state(stop.state)
    assert again.reason(3, Spent()) == "user/m > 0 (stop.when)"
    assert other.reason(3, Spent()) is None


def test_a_run_ends_where_its_condition_holds(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The condition holds at the first evaluation, after three steps. The run saves there, and the same
    command again does nothing. With a condition that does not hold, it goes on."""
    config = world.config("dpo", tmp_path, WHEN)
    assert oat("train", config) == 0
    assert "eval/sampled >= -1e+09 (stop.when)" in capsys.readouterr().out
    assert rows(tmp_path / "dpo")[-1]["step"] == 3
    assert (tmp_path / "dpo" / "checkpoints" / "step_00000003").exists()
    before = digest_run(tmp_path / "dpo")
    assert oat("train", config) == 0
    assert digest_run(tmp_path / "dpo") == before
    (tmp_path / "dpo.yaml").write_text(config.read_text().replace(">= -1e9", ">= 1e9"))
    assert oat("train", config, "--stop.max_steps", "5") == 0
    assert rows(tmp_path / "dpo")[-1]["step"] == 5


def test_a_metric_of_the_step_ends_the_run_with_an_evaluation(world: World, tmp_path: Path) -> None:
    changes = {**WHEN, "stop.when": {"loss/total": "> -1e9"}}
    assert oat("train", world.config("dpo", tmp_path, changes)) == 0
    last = rows(tmp_path / "dpo")[-1]
    assert last["step"] == 1
    assert "eval/sampled" in last


@pytest.mark.slow(instead="tests/faults/test_kill.py; test_a_run_ends_where_its_condition_holds", seconds=0.9)
def test_killed_before_the_end_is_saved(world: World, tmp_path: Path) -> None:
    config = world.config("dpo", tmp_path, WHEN)
    assert oat("train", config) == 0

    def die() -> int:
        from oat.rundir.checkpoints import Checkpoints

        kill_at(Checkpoints, "save", 1)
        return oat("train", config, "--run_dir", tmp_path / "other")

    assert forked(die, tmp_path / "log") == -signal.SIGKILL, (tmp_path / "log").read_text()
    assert oat("train", config, "--run_dir", tmp_path / "other") == 0
    assert digest_run(tmp_path / "other") == digest_run(tmp_path / "dpo")


@pytest.mark.parametrize(
    ("when", "said"),
    [
        ({"eval/sampeld": "> 0"}, "there is no metric 'eval/sampeld'; did you mean"),
        ({"loss/total": "0"}, "stop.when of loss/total is '0'; write a sign"),
    ],
)
def test_conditions_are_checked_before_the_run(
    world: World, tmp_path: Path, when: dict[str, str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert oat("check", world.config("dpo", tmp_path, {**WHEN, "stop.when": when})) == 2
    assert said in capsys.readouterr().err
