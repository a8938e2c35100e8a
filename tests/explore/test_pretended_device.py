"""Runs with an explorer on a simulated GPU (tests/support/pretended.py). Every tensor is on the right device,
and in float32 the run equals the run on the CPU."""

import json
from pathlib import Path

import pytest
from exploring import EXPLORING
from fixtures import World, oat
from pretended import pretended_gpu

from oat.metrics import repeatable


@pytest.mark.slow(
    instead="tests/resolve/test_compute_profile.py::test_a_run_on_a_pretended_device", seconds=7.1
)
@pytest.mark.parametrize("case", EXPLORING)
def test_an_exploring_run_on_a_pretended_device(world: World, tmp_path: Path, case: str) -> None:
    algorithm, changes = EXPLORING[case]
    (tmp_path / "gpu").mkdir()
    config = world.config(algorithm, tmp_path / "gpu", {**changes, "compute.profile": "gpu"})
    with pretended_gpu():
        assert [oat("train", config, "--stop.max_steps", steps) for steps in (2, 4)] == [0, 0]
    assert oat("train", world.config(algorithm, tmp_path, changes)) == 0
    found, expected = (
        [json.loads(line) for line in (at / algorithm / "metrics.jsonl").open()]
        for at in (tmp_path / "gpu", tmp_path)
    )
    assert len(found) == len(expected) == 5
    for one, other in zip(found, expected, strict=True):
        assert repeatable(one) == pytest.approx(repeatable(other), rel=1e-4, abs=1e-6)
