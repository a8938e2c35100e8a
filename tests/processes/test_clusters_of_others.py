"""Runs at `compute.address`: the cluster is another's, so it goes on when a run ends, and nothing of the run
is left on it."""

import os
import signal
from pathlib import Path

import pytest
from apart_runs import ON_RAY, pair
from fixtures import Finished, forked
from ray_nodes import Nodes
from ray_runs import RayStrikes, gone, marked

from oat.processes.ray_cluster import Cluster
from oat.runtime.worker import WORKER

ENDS = {signal.SIGINT: 130, signal.SIGKILL: -signal.SIGKILL}


def works_on(head: str, run_dir: Path) -> list[int]:
    """Return the processes of a cluster that write into the logs of a run."""
    logs = f"{run_dir.resolve() / 'logs'}/"
    return [process for process in marked(head) if os.path.realpath(f"/proc/{process}/fd/1").startswith(logs)]


def parts(head: str) -> set[int]:
    """Return the processes of Ray itself that make up a cluster."""
    programs = {process: Path(os.path.realpath(f"/proc/{process}/exe")).name for process in marked(head)}
    return {process for process, program in programs.items() if program in ("gcs_server", "raylet")}


def free(address: str, logs: Path) -> tuple[float, float]:
    """Return how many CPUs a cluster has, and how many of them are free."""
    cluster = Cluster(address, logs, 60.0, WORKER)

    def cpus() -> tuple[float, float]:
        nodes, left = cluster.ask("resources")
        total, unused = sum(node.get("CPU", 0.0) for node in nodes), left.get("CPU", 0.0)
        return total, unused

    try:
        gone(lambda: len({*cpus()}) > 1, 10.0)
        return cpus()
    finally:
        cluster.close()


@pytest.mark.slow
@pytest.mark.parametrize("number", ENDS, ids=lambda number: number.name)
def test_a_cluster_goes_on_when_a_run_on_it_ends(
    number: signal.Signals, finished: Finished, tmp_path: Path, nodes: Nodes, strikes: RayStrikes
) -> None:
    """A signal ends the run while it samples. The same command, which needs all CPUs of the cluster, then
    ends as the local run."""
    head, worked = f"{tmp_path}/head", tmp_path / "worked"
    nodes.start(head, 1)
    own = {**ON_RAY, "compute.address": nodes.address, "compute.deadline_s": 60}
    run, log, before = pair(finished, "grpo", tmp_path, {}, own), tmp_path / "log", parts(head)

    def strike() -> None:
        worked.write_text(f"{len(works_on(head, run.run_dir))} actors, {len(strikes.left())} broker")
        os.kill(os.getpid(), number)

    strikes.doing["sample", 7] = strike
    assert forked(run.train, log) == ENDS[number], log.read_text()
    assert worked.read_text() == "2 actors, 1 broker"
    assert gone(lambda: [*works_on(head, run.run_dir), *strikes.left()], 20.0)
    assert free(nodes.address, tmp_path) == (1.0, 1.0)
    assert 0 < run.rows < 7
    strikes.plan([])
    assert run.train() == 0
    assert run.is_equal
    assert gone(lambda: [*works_on(head, run.run_dir), *strikes.left()], 20.0)
    assert len(before) == 2
    assert parts(head) == before
