"""`oat check --time`: what is measured, and what is left alone."""

import json
from pathlib import Path

import pytest
from fixtures import World, oat

PARTS = ("sampling", "learning", "weights")


@pytest.fixture(scope="module")
def config(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose oracle may not be asked, and whose rows go to a sink."""
    changes = {
        "oracle.name": f"{world.folder / 'reward.py'}:forbidden",
        "tracking.sinks": ["tensorboard"],
        "stop": {"max_steps": 5, "max_queries": 60},
    }
    return world.config("grpo", tmp_path_factory.mktemp("timed"), changes)


def test_the_time_of_a_run(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The parts add up, and the whole lies between its least and its most. Nothing is asked or kept, and
    stdout has the JSON alone."""
    assert oat("check", config, "--time", "--json") == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    told = {row["name"].removeprefix("time of "): row["number"] for row in rows if row["unit"] == "s"}
    assert all(seconds > 0 for seconds in told.values())
    assert told["a step"] == pytest.approx(sum(told[f"{part} in a step"] for part in PARTS))
    for name in ("a step", "an evaluation", "the run"):
        assert told[f"{name}, least"] <= told[name] <= told[f"{name}, most"]
    numbers = {row["name"]: row["number"] for row in rows}
    whole = told["the start"]
    saved = told["a checkpoint"] / numbers["steps between checkpoints"]
    whole += numbers["steps left"] * (told["a step"] + saved)
    whole += numbers["evaluations left"] * told["an evaluation"]
    assert told["the run"] == pytest.approx(whole)
    assert all(row["number"] > 1 for row in rows if row["name"] == "a step is faster")
    assert sorted(config.parent.iterdir()) == [config]


@pytest.mark.slow(instead="test_the_time_of_a_run", seconds=1.5)
def test_long_steps_are_measured_in_part(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """If a step takes too long, steps of fewer prompts are measured, and evaluations of fewer prompts."""
    monkeypatch.setattr("oat.forecast.step_time._ENOUGH_S", 0.0)
    monkeypatch.setattr("oat.forecast.step_time._EVALUATION_S", 0.0)
    monkeypatch.setattr("oat.forecast.step_time._FEW", 3)
    assert oat("check", world.config("dpo", tmp_path), "--time", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    numbers = {row["name"]: row["number"] for row in found["rows"]}
    assert numbers["prompts of a measured step"] < numbers["prompts a step"]
    assert any("scaled" in note for note in found["notes"])


def test_a_run_on_a_cluster_is_not_measured(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = {"compute.runtime": "ray", "compute.actors": 1}
    assert oat("check", world.config("grpo", tmp_path, changes), "--time") == 2
    assert "compute.runtime" in capsys.readouterr().err
