"""An engine of its own for the reference (`engine.own_reference`)."""

from pathlib import Path
from typing import Any

import pytest
from fixtures import World, made, oat

from oat.assemble.run import build
from oat.commands.digest import digest_run
from oat.config.load import load_config
from oat.engines.split import SplitEngine
from oat.engines.torch import TorchEngine
from oat.errors import EngineError
from oat.resolve.resolve import resolve

XPO = {"algorithm": {"name": "xpo", "prompts": 4}, "stop.max_steps": 3}


@pytest.mark.inventory(17)
def test_a_second_engine_changes_no_sample(world: World, tmp_path: Path) -> None:
    digests = []
    for name, own in (("one", False), ("two", True)):
        changes = {**XPO, "engine.own_reference": own, "run_dir": str(tmp_path / name)}
        assert oat("train", world.config("dpo", tmp_path, changes)) == 0
        digests.append({key: value for key, value in digest_run(tmp_path / name).items()})
    assert digests[0] == digests[1]


def engine_of(world: World, folder: Path, own: bool) -> object:
    """Return the engine of a run of XPO, without the wire encoding."""
    config = world.config("dpo", folder, {**XPO, "engine.own_reference": own})
    run: Any = build(resolve(*load_config(config)), directory=made(folder / f"own-{own}"))
    run.ledger.close()
    engine = getattr(run.collector.actor, "_box", run.collector.actor).engine
    return getattr(engine, "_box", engine)


@pytest.mark.inventory(17)
def test_the_reference_has_an_engine_of_its_own_where_that_is_set(world: World, tmp_path: Path) -> None:
    """Of a run's two engines, one has the slot of the reference alone, and the other that of the policy.
    Without the setting, one engine has both."""
    one, two = (engine_of(world, tmp_path, own) for own in (False, True))
    assert isinstance(one, TorchEngine)
    assert one.version("reference") == one.version("sampler") == 0
    assert isinstance(two, SplitEngine)
    assert two.main.version("sampler") == two.reference.version("reference") == 0
    for engine, slot in ((two.main, "reference"), (two.reference, "sampler")):
        with pytest.raises(EngineError, match=f"no slot `{slot}`"):
            engine.version(slot)


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
