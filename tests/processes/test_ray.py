"""Runs whose responses are sampled in processes of a Ray cluster are bitwise the local ones."""

import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path

import pytest
import torch
from apart_runs import FAMILIES
from fixtures import Finished, World, checked, oat
from pretended import pretended_gpu
from ray_runs import RayStrikes

from oat.commands.digest import digest_run
from oat.errors import OatWarning


@pytest.mark.sample("grpo-2", seconds=15)
@pytest.mark.parametrize("actors", [1, 2, 3])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_run_on_ray_is_the_local_run(
    name: str, actors: int, finished: Finished, world: World, tmp_path: Path
) -> None:
    recipe, changes = FAMILIES[name]
    changes = {**changes, "engine.deterministic": True, "engine.threads": 1}
    cluster = {"compute.runtime": "ray", "compute.actors": actors, "compute.actor_cpus": 0.5}
    assert oat("train", world.config(recipe, tmp_path, {**changes, **cluster})) == 0
    assert digest_run(tmp_path / recipe) == digest_run(finished.only_read(recipe, changes))


def workers() -> list[int]:
    """Return the processes of Ray that are descendants of this one and sample."""
    listed = subprocess.run(["ps", "-eo", "pid,ppid,args"], capture_output=True, text=True, check=True).stdout
    rows = [line.split(maxsplit=2) for line in listed.splitlines()[1:]]
    above = {int(pid): int(parent) for pid, parent, *_ in rows}

    def is_ours(pid: int) -> bool:
        while pid in above and pid != os.getpid():
            pid = above[pid]
        return pid == os.getpid()

    return [int(pid) for pid, _, *args in rows if args[:1] and "ray::Worker" in args[0] and is_ours(int(pid))]


@pytest.mark.slow(
    instead="tests/runtime/test_wanted.py::test_more_actors_than_there_is_room_for", seconds=0.7
)
def test_more_actors_than_the_cluster_has_room_for(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = {"compute.runtime": "ray", "compute.actors": 999, "compute.memory_gb": 1000}
    assert oat("train", world.config("grpo", tmp_path, changes)) == 2
    error = capsys.readouterr().err
    assert "999 actors at 1 need 999 logical CPUs, and the cluster has" in error


def test_more_oracle_clients_than_the_cluster_has_room_for(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = {"compute.runtime": "ray", "compute.oracle_clients": 999, "compute.oracle_cpus": 0.5}
    assert oat("train", world.config("grpo", tmp_path, {**changes, "compute.memory_gb": 100})) == 2
    assert "lower compute.oracle_clients, or set compute.runtime to local" in capsys.readouterr().err
    changes["compute.memory_gb"] = 1000
    assert oat("train", world.config("grpo", tmp_path, changes)) == 2
    error = capsys.readouterr().err
    assert "1 actor at 1, 999 oracle clients at 0.5 need 500.5 logical CPUs, and the" in error
    assert "lower their number, or the CPUs of each" in error


@pytest.mark.slow
def test_a_refusal_when_the_cluster_works_already_is_a_message(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The reference was changed after the run had begun, which is seen when it is loaded."""
    model = tmp_path / "model"
    shutil.copytree(world.folder / "model", model)
    changes = {"model.path": str(model), "algorithm.kl_coef": 0.1, "stop.max_steps": 1, "evaluation": None}
    changes |= {"compute.runtime": "ray", "compute.actor_cpus": 0.5}
    config = world.config("grpo", tmp_path, changes)
    assert oat("train", config) == 0
    weights = model / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-500] + bytes(500))
    capsys.readouterr()
    assert oat("train", config, "--stop.max_steps", "2") == 2
    said = capsys.readouterr().err
    assert "put the files back as they were, or begin a new run" in said
    assert "Traceback" not in said


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is here")
def test_gpus_that_the_cluster_does_not_have(
    world: World,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    strikes: RayStrikes,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The run's own process sees a GPU, and its cluster has none. The run is refused before it learns, and
    nothing of the cluster is left."""
    monkeypatch.delenv("RAY_OVERRIDE_RESOURCES", raising=False)
    changes = {"compute.runtime": "ray", "compute.profile": "gpu", "compute.gpus": 1}
    with pretended_gpu():
        assert oat("train", world.config("grpo", tmp_path, changes)) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert "compute.gpus is 1, and the cluster has 0 GPUs; lower compute.gpus" in said
    assert (strikes.left(), strikes.files_left()) == ([], [])
    assert not (tmp_path / "grpo" / "metrics.jsonl").exists()


@pytest.mark.slow
def test_a_run_goes_on_although_an_oracle_client_was_killed(world: World, tmp_path: Path) -> None:
    """The run on Ray, one of whose clients is killed while it works, is the local run."""
    common = {"engine.deterministic": True, "engine.threads": 1, "stop.max_steps": 40, "evaluation.every": 20}
    assert oat("train", world.config("grpo", tmp_path, {**common, "run_dir": str(tmp_path / "local")})) == 0
    cluster = {"compute.runtime": "ray", "compute.actor_cpus": 0.5}
    asking = {"compute.oracle_clients": 2, "compute.oracle_cpus": 0.25}
    run_dir = tmp_path / "ray"
    config = world.config("grpo", tmp_path, {**common, **cluster, **asking, "run_dir": str(run_dir)})
    before: list[int] = []

    def kill() -> None:
        deadline = time.monotonic() + 120
        while not any((run_dir / "checkpoints").glob("step_0*")) and time.monotonic() < deadline:
            time.sleep(0.01)
        before.extend(workers())
        for process in before:
            if "oracle-client" in os.readlink(f"/proc/{process}/fd/1"):
                os.kill(process, signal.SIGKILL)
                break

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.warns(
        OatWarning, match=r"oracle client [01] has ended in the call .*; it is replaced \(1 of"
    ):
        assert oat("train", config) == 0
    killer.join()
    assert len(before) == 3
    assert workers() == []
    assert digest_run(run_dir) == digest_run(tmp_path / "local")


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("127.0.0.1:1", "refused"),
        ("127.0.0.1:99999", "no address of the form host:port"),
        ("127.0.0.1", "no address of the form host:port"),
        (":6379", "no address of the form host:port"),
    ],
)
def test_no_cluster_answers_at_the_address(
    address: str, why: str, world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = {"compute.runtime": "ray", "compute.address": address}
    assert oat("train", world.config("grpo", tmp_path, changes)) == 2
    said = capsys.readouterr().err
    assert f"no Ray cluster can be used at {address} (" in said
    assert why in said


@pytest.mark.slow
def test_something_else_answers_at_the_address(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        changes = {"compute.runtime": "ray", "compute.address": address}
        assert oat("train", world.config("grpo", tmp_path, changes)) == 2
    said = capsys.readouterr().err
    assert f"something answers at {address}, but no Ray cluster lets this process in (" in said
    assert ".h:" not in said


def test_settings_of_a_cluster_without_one(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert oat("check", world.config("grpo", tmp_path, {"compute.actors": 2})) == 2
    assert "nothing reads compute.actors" in capsys.readouterr().err


@pytest.mark.usefixtures("several_cpus")
def test_the_places_of_a_run_on_a_cluster(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`oat check` starts no cluster."""
    changes = {"compute.runtime": "ray", "compute.actors": 2}
    assert checked(capsys, world.config("grpo", tmp_path, changes))[0]["actors"] == 2
