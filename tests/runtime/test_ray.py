"""Runs whose responses are sampled in processes of a Ray cluster are bitwise the local ones."""

from pathlib import Path
from typing import Any

import pytest
from fixtures import World, oat

from oat.commands.export import digest_run

RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "grpo": ("grpo", {}),
    "dpo": ("dpo", {"learner.sync_every": 2}),
    "an ensemble": (
        "dpo",
        {"explorer": {"name": "ensemble", "samples": 4, "ensemble": {"members": 2, "hidden": 4}}},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("actors", [1, 2, 3])
@pytest.mark.parametrize("name", RUNS)
def test_a_run_on_ray_is_the_local_run(name: str, actors: int, world: World, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    recipe, changes = RUNS[name]
    changes = {**changes, "engine.deterministic": True, "engine.threads": 1}
    digests = []
    for where in ("local", "ray"):
        own = {
            "compute.runtime": where,
            "compute.actors": actors if where == "ray" else 1,
            "compute.actor_cpus": 0.5,
            "run_dir": str(tmp_path / where),
        }
        assert oat("train", world.config(recipe, tmp_path, {**changes, **own})) == 0
        digests.append(digest_run(tmp_path / where))
    assert digests[0] == digests[1]
