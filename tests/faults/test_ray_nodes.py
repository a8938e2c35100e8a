"""R15 on a Ray cluster of two nodes, of which one is lost with its actor."""

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
    assert "the cluster has no room for another process in its place" in said[0]
    assert run.saved == run.rows - 1
    assert gone(strikes.left, 10)
    nodes.start(f"{tmp_path}/third", 1)
    assert run.train() == 0
    figure(f"{int(run.is_equal)} of 1 runs that lost a node equal the local one bitwise")
    assert run.is_equal
