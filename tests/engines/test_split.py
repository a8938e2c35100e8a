"""An engine of its own for the reference (`engine.own_reference`)."""

from pathlib import Path

import pytest
from fixtures import World, oat

from oat.commands.export import digest_run

XPO = {"algorithm": {"name": "xpo", "prompts": 4}, "stop.max_steps": 3}


@pytest.mark.inventory(17)
def test_a_second_engine_changes_no_sample(world: World, tmp_path: Path) -> None:
    digests = []
    for name, own in (("one", False), ("two", True)):
        changes = {**XPO, "engine.own_reference": own, "run_dir": str(tmp_path / name)}
        assert oat("train", world.config("dpo", tmp_path, changes)) == 0
        digests.append({key: value for key, value in digest_run(tmp_path / name).items()})
    assert digests[0] == digests[1]


def test_it_follows_a_reference_that_moves(world: World, tmp_path: Path) -> None:
    """The second engine gets the weights of each update of the reference, and proves that it has them."""
    moving = {**XPO, "model.reference_update": {"every": 1}, "engine.own_reference": True}
    assert oat("train", world.config("dpo", tmp_path, moving)) == 0


def test_without_a_reference_it_is_refused(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = {"algorithm": {"name": "simpo", "prompts": 4}, "engine.own_reference": True}
    assert oat("check", world.config("dpo", tmp_path, changes)) == 2
    assert "engine.own_reference is True: this run's engine has no slot" in capsys.readouterr().err
