"""Actors in processes of their own and the learner, each with a simulated GPU (tests/support/pretended.py).
Every tensor is on the right device on each side, and what travels is on the CPU."""

import json
from pathlib import Path
from typing import Any

import pytest
from exploring import EXPLORING
from fixtures import World, oat
from planned_kills import Kill, StruckMachine
from pretended import pretended_gpu

from oat.metrics import repeatable

APART = {"compute.runtime": "processes", "compute.profile": "gpu", "compute.gpus": 3}
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "grpo": ("grpo", {"algorithm.kl_coef": 0.1}),
    "bfloat16": ("grpo", {"engine.dtype": "bfloat16"}),
    "an adapter": ("dpo", {"model.lora": {"rank": 2}, "model.reference_update": {"mix": 0.3}}),
    "a lagging sampler": ("grpo", {"learner.sync_every": 2}),
    **{name: EXPLORING[name] for name in ("policy", "reference")},
}


def rows(folder: Path) -> list[dict[str, Any]]:
    (file,) = folder.glob("*/metrics.jsonl")
    return [json.loads(line) for line in file.open()]


@pytest.mark.sample("grpo", seconds=21.5)
@pytest.mark.parametrize("name", RUNS)
def test_a_run_with_a_device_in_every_process(
    name: str, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An actor is killed, and another one gets all weights. In float32 the run equals the run on the CPU."""
    recipe, changes = RUNS[name]
    machine = StruckMachine([Kill("sample", 3)], has_gpus=True)
    monkeypatch.setattr("oat.assemble.apart.Machine", machine)
    monkeypatch.setattr("oat.assemble.apart._ACTOR", "device_actor:DeviceActor")
    for folder in ("gpu", "cpu"):
        (tmp_path / folder).mkdir()
    with pretended_gpu() as operations:
        assert oat("train", world.config(recipe, tmp_path / "gpu", {**changes, **APART})) == 0
        assert operations.on_device > 100
    assert machine.killed
    assert {machine.calls[what] > 0 for what in ("begin", "put", "commit", "sample")} == {True}
    if "engine.dtype" in changes:
        return
    assert oat("train", world.config(recipe, tmp_path / "cpu", changes)) == 0
    for one, other in zip(rows(tmp_path / "gpu"), rows(tmp_path / "cpu"), strict=True):
        assert repeatable(one) == pytest.approx(repeatable(other), rel=1e-4, abs=1e-6)
