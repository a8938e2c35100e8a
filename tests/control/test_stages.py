"""A user who waits for a large model is told what is being done."""

from pathlib import Path

import pytest
from fixtures import World, oat
from trainers import lines

from oat import Trainer
from oat.control import stages

ONE_STEP = {"stop": {"max_steps": 1}}


def told(err: str, speaker: str) -> list[str]:
    """Return the first words of the stages."""
    return [
        line.removeprefix(f"{speaker}: ").split(" ")[0] for line in err.splitlines() if line[-4:] == " ..."
    ]


def test_each_stage_of_a_start_with_a_large_model_is_told(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stages, "_LEAST", 0)
    assert oat("train", world.config("grpo", tmp_path), "--stop.max_steps", "1") == 0
    assert told(capsys.readouterr().err, "oat train") == ["reading", "trying"]
    Trainer(**lines(world, tmp_path / "loud", **ONE_STEP), quiet=False).train()
    assert told(capsys.readouterr().err, "oat.Trainer") == ["loading", "reading", "trying"]
    Trainer(**lines(world, tmp_path / "quiet", **ONE_STEP), quiet=True).train()
    assert told(capsys.readouterr().err, "oat.Trainer") == []
    assert oat("check", world.config("grpo", tmp_path), "--memory") == 0
    assert told(capsys.readouterr().err, "oat check") == [], "a formula takes no time"


def test_with_a_small_model_nobody_waits(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Trainer(**lines(world, tmp_path / "run", **ONE_STEP), quiet=False).train()
    assert told(capsys.readouterr().err, "oat.Trainer") == ["loading"]
