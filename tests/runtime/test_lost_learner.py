"""The learner in a process of its own: the run is the local one, and goes on by itself if it is killed."""

from pathlib import Path
from typing import Any

import pytest
from fixtures import World, oat
from planned_kills import Kill, StruckMachine

from oat.commands.digest import digest_run

CHANGES: dict[str, Any] = {"engine.deterministic": True, "engine.threads": 1, "stop.max_steps": 6}
APART = {"compute.runtime": "processes", "compute.actors": 1, "compute.learner": "actor"}
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "grpo": ("grpo", {}),
    "ppo": ("ppo", {}),
    "dpo, a lagging sampler": ("dpo", {"learner.sync_every": 2}),
    "an ensemble": (
        "dpo",
        {"explorer": {"name": "ensemble", "samples": 4, "ensemble": {"members": 2, "hidden": 4}}},
    ),
    "a reference that follows": (
        "grpo",
        {
            "algorithm": {"name": "grpo", "prompts": 4, "samples": 3, "kl_coef": 0.1},
            "model.reference_update": {"mix": 0.3},
        },
    ),
}


@pytest.mark.sample("ppo", seconds=9.2)
@pytest.mark.parametrize("name", RUNS)
def test_a_learner_apart(name: str, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm, changes = RUNS[name]
    digests = []
    for where in ("local", "apart"):
        monkeypatch.setattr("oat.assemble.apart.Machine", StruckMachine())
        own = {"run_dir": str(tmp_path / where), **(APART if where == "apart" else {})}
        assert oat("train", world.config(algorithm, tmp_path, {**CHANGES, **changes, **own})) == 0
        digests.append(digest_run(tmp_path / where))
    assert digests[0] == digests[1]


@pytest.mark.sample("kill3", seconds=9.4)
@pytest.mark.parametrize(
    "kill",
    [Kill("make", 1), Kill("update", 3), Kill("update", 3, 0.003), Kill("some", 2), Kill("plain_state", 3)],
)
def test_a_killed_learner(kill: Kill, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digests = []
    for where in ("local", "apart"):
        monkeypatch.setattr("oat.assemble.apart.Machine", machine := StruckMachine([kill]))
        own = {"run_dir": str(tmp_path / where), **(APART if where == "apart" else {})}
        assert oat("train", world.config("grpo", tmp_path, {**CHANGES, **own})) == 0
        digests.append(digest_run(tmp_path / where))
    assert machine.killed == [kill]
    assert digests[0] == digests[1]
