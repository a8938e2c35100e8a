"""R15 on real Ray clusters: actors are killed at random moments."""

from collections.abc import Callable
from pathlib import Path

import pytest
from apart_runs import ON_RAY, RUNS, pair
from fixtures import Finished
from planned_kills import StruckMachine, drawn_kills
from ray_runs import MARK, RayStrikes

KILLS = 5
"""Kills of a run."""

pytestmark = [pytest.mark.fault("R15-ray"), pytest.mark.large]


@pytest.mark.parametrize("part", range(2))
@pytest.mark.parametrize("standby", [0, 1])
@pytest.mark.parametrize("name", RUNS)
def test_actors_killed_at_any_moment(
    name: str,
    standby: int,
    part: int,
    finished: Finished,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    strikes: RayStrikes,
    figure: Callable[[str], None],
) -> None:
    with monkeypatch.context() as patched:
        patched.delenv(MARK)
        patched.setattr("oat.assemble.apart.Machine", machine := StruckMachine())
        assert pair(finished, name, tmp_path / "whole", {}).train() == 0
    kills = drawn_kills(f"{name} {standby}", machine.calls, 2 * KILLS)[part * KILLS : (part + 1) * KILLS]
    own = {**ON_RAY, "compute.standby": standby, "compute.max_restarts": 20}
    run = pair(finished, name, tmp_path / "ray", {}, own)
    strikes.plan(kills)
    assert run.train() == 0
    assert strikes.left() == []
    assert strikes.files_left() == []
    figure(f"{strikes.hits} of {KILLS} planned kills met an actor that was there")
    figure(f"{int(run.is_equal)} of 1 runs with {KILLS} killed actors equal the local one bitwise")
    assert run.is_equal
    run.note_books(tmp_path, figure)
    assert len(strikes.killed) == KILLS
    assert strikes.hits > 0
