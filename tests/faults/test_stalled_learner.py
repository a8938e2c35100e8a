"""R17: actors are fast and the learner stalls. What waits between them is bounded, and so is memory."""

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from fixtures import World, forked
from planned_kills import StruckMachine
from stalls import CHANGES, is_bounded, resident, stalled_run


@pytest.mark.fault("R17")
def test_what_waits_is_bounded(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, figure: Callable[[str], None]
) -> None:
    machine = StruckMachine()
    config = world.config("dpo", tmp_path, CHANGES)

    def sizes() -> Mapping[str, int]:
        actors = {remote.name: resident(remote.number or 0) for remote in machine.remotes}
        return {"the run's process": resident("self"), **actors}

    def action() -> int:
        monkeypatch.setattr("oat.assemble.apart.Machine", machine)
        return stalled_run(config, tmp_path / "seen", sizes)

    assert forked(action, tmp_path / "log") == 0, (tmp_path / "log").read_text()
    is_bounded(tmp_path / "seen", figure)
