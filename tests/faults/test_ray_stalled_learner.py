"""R17 on a real Ray cluster: old weights do not stay in its store."""

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from fixtures import World, forked, make_model
from ray_runs import BROKER, RayStrikes, part
from stalls import CHANGES, STORE, is_bounded, resident, stalled_run


@pytest.mark.large
@pytest.mark.fault("R17-ray")
def test_what_waits_is_bounded(
    world: World, tmp_path: Path, strikes: RayStrikes, figure: Callable[[str], None]
) -> None:
    """The weights are large enough for the store, which the raylet maps into its memory."""
    make_model(tmp_path / "model", hidden=128, layers=2)
    config = world.config(
        "dpo", tmp_path, {**CHANGES, "compute.runtime": "ray", "model.path": str(tmp_path / "model")}
    )

    def sizes() -> Mapping[str, int]:
        actors = {f"actor {number}": resident(strikes.worker(f"actor {number}") or 0) for number in range(2)}
        broker, raylet = (resident(part(strikes, name)) for name in (BROKER, "raylet"))
        return {"the run's process": resident("self"), **actors, "the broker": broker, STORE: raylet}

    assert forked(lambda: stalled_run(config, tmp_path / "seen", sizes), tmp_path / "log") == 0, (
        tmp_path / "log"
    ).read_text()
    is_bounded(tmp_path / "seen", figure)
