"""R15 on Ray clusters of several nodes: one is lost with its actor, or they cannot do the work of a run."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from apart_runs import pair
from fixtures import Finished
from ray_nodes import Nodes
from ray_runs import RayStrikes, gone

pytestmark = [pytest.mark.fault("R15-ray"), pytest.mark.large]


def on(nodes: Nodes, cpus: float, restarts: int) -> Mapping[str, Any]:
    return {
        "compute.runtime": "ray",
        "compute.address": nodes.address,
        "compute.actors": 2,
        "compute.actor_cpus": cpus,
        "compute.max_restarts": restarts,
        "compute.deadline_s": 12,
    }


def test_actors_come_up_on_the_other_node(
    finished: Finished,
    tmp_path: Path,
    nodes: Nodes,
    strikes: RayStrikes,
    figure: Callable[[str], None],
) -> None:
    nodes.start(f"{tmp_path}/head", 1)
    nodes.start(f"{tmp_path}/second", 1)
    run = pair(finished, "grpo", tmp_path, {}, on(nodes, 0.5, 10))
    strikes.doing["sample", 5] = lambda: nodes.lose(f"{tmp_path}/second")
    with pytest.warns(UserWarning, match="actor . has ended in the call .*; it is replaced"):
        assert run.train() == 0
    figure(f"{int(run.is_equal)} of 1 runs that lost a node equal the local one bitwise")
    assert run.is_equal
    run.note_books(tmp_path, figure)


def test_a_node_is_lost_and_there_is_no_room(
    finished: Finished,
    tmp_path: Path,
    nodes: Nodes,
    strikes: RayStrikes,
    capsys: pytest.CaptureFixture[str],
    figure: Callable[[str], None],
) -> None:
    """The run ends with one message and its state saved. When there is another node, the same command
    continues it."""
    nodes.start(f"{tmp_path}/head", 1)
    nodes.start(f"{tmp_path}/second", 1)
    run = pair(finished, "grpo", tmp_path, {}, on(nodes, 1, 10))
    strikes.doing["sample", 6] = lambda: nodes.lose(f"{tmp_path}/second")
    capsys.readouterr()
    assert run.train() == 1
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1, said
    assert "there is no room for another process in its place" in said[0]
    assert run.saved == run.rows - 1
    assert gone(strikes.left, 10)
    nodes.start(f"{tmp_path}/third", 1)
    assert run.train() == 0
    figure(f"{int(run.is_equal)} of 1 runs that lost a node equal the local one bitwise")
    assert run.is_equal


def refused(
    finished: Finished, tmp_path: Path, nodes: Nodes, cpus: float, capsys: pytest.CaptureFixture[str]
) -> str:
    """Begin a run that the cluster cannot do, and return the only line that it says."""
    run = pair(finished, "grpo", tmp_path, {}, on(nodes, cpus, 10))
    capsys.readouterr()
    assert run.train() == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1, said
    return said[0]


def test_machines_that_are_too_small(
    finished: Finished, tmp_path: Path, nodes: Nodes, capsys: pytest.CaptureFixture[str]
) -> None:
    """Together they have the CPUs of the actors, and none has those of an actor."""
    for number in range(4):
        nodes.start(f"{tmp_path}/node{number}", 1)
    said = refused(finished, tmp_path, nodes, 2, capsys)
    assert "2 actors at 2 need 4 logical CPUs, and 0 of the 2 processes with 2 or more have room on" in said


def test_a_machine_with_an_oat_that_has_no_workers(
    finished: Finished, tmp_path: Path, nodes: Nodes, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "old" / "oat").mkdir(parents=True)
    (tmp_path / "old" / "oat" / "__init__.py").touch()
    nodes.start(f"{tmp_path}/head", 2, str(tmp_path / "old"))
    said = refused(finished, tmp_path, nodes, 1, capsys)
    assert "a machine of the cluster cannot start a process of oat (ModuleNotFoundError: " in said
