"""Actors that are killed at any moment are replaced. The run ends as if none had been."""

from pathlib import Path
from typing import Any

import pytest
from fixtures import World, oat
from forked_cluster import ForkedCluster, drawn_kills

from oat.commands.export import digest_run

CHANGES: dict[str, Any] = {"engine.deterministic": True, "engine.threads": 1, "stop.max_steps": 8}
APART = {"compute.runtime": "ray", "compute.actors": 2, "compute.max_restarts": 100}


def trained(
    world: World, folder: Path, monkeypatch: pytest.MonkeyPatch, cluster: ForkedCluster | None, **changes: Any
) -> dict[str, str]:
    folder.mkdir()
    where = {} if cluster is None else APART
    if cluster is not None:
        monkeypatch.setattr("oat.build.apart.Cluster", cluster)
    assert oat("train", world.config("grpo", folder, {**CHANGES, **where, **changes})) == 0
    return digest_run(folder / "grpo")


def test_a_killed_actor(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    local = trained(world, tmp_path / "local", monkeypatch, None)
    counted = ForkedCluster()
    assert trained(world, tmp_path / "whole", monkeypatch, counted) == local
    print(counted.calls)
    for number in range(10):
        cluster = ForkedCluster(drawn_kills(f"{number}", counted.calls, 1))
        assert trained(world, tmp_path / f"{number}", monkeypatch, cluster) == local, cluster.killed
        print(cluster.killed, cluster.calls)
