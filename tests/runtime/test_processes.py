"""Runs whose work is done by processes of this machine are bitwise the local ones, and leave nothing."""

from pathlib import Path

import pytest
from apart_runs import FAMILIES
from fixtures import Finished, World, oat
from planned_kills import StruckMachine

from oat.commands.digest import digest_run
from oat.processes.marks import marked, own_mark

APART = {"compute.runtime": "processes", "compute.actor_cpus": 0.25}
ALL = {
    **APART,
    "compute.actors": 2,
    "compute.standby": 1,
    "compute.learner": "actor",
    "compute.learner_cpus": 0.25,
    "compute.oracle_clients": 1,
    "compute.oracle_cpus": 0.25,
}


@pytest.mark.sample("grpo-2", "ppo-1", seconds=4)
@pytest.mark.parametrize("actors", [1, 2, 3])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_run_with_actors_is_the_local_run(
    name: str, actors: int, finished: Finished, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("oat.assemble.apart.Machine", machine := StruckMachine())
    recipe, changes = FAMILIES[name]
    changes = {**changes, "engine.deterministic": True, "engine.threads": 1}
    config = world.config(recipe, tmp_path, {**changes, **APART, "compute.actors": actors})
    assert oat("train", config) == 0
    assert digest_run(tmp_path / recipe) == digest_run(finished.only_read(recipe, changes))
    assert len(machine.remotes) == actors
    assert not machine.left()


@pytest.mark.slow(
    instead="tests/faults/test_killed_processes.py::test_any_process_may_be_killed_at_any_time", seconds=7
)
def test_a_run_with_all_kinds_of_processes_is_the_local_run(
    finished: Finished, world: World, tmp_path: Path
) -> None:
    """Its fork server is its own. Afterwards nothing is left."""
    before = marked(own_mark())
    changes = {"engine.deterministic": True, "engine.threads": 1}
    assert oat("train", world.config("grpo", tmp_path, {**changes, **ALL})) == 0
    assert digest_run(tmp_path / "grpo") == digest_run(finished.only_read("grpo", changes))
    assert {file.stem for file in (tmp_path / "grpo" / "logs").iterdir()} == {
        "fork-server",
        "actor-0",
        "actor-1",
        "actor-2",
        "learner-0",
        "oracle-client-0",
    }
    assert marked(own_mark()).keys() <= before.keys()
