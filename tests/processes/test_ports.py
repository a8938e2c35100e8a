"""The ports of a Ray cluster that a run starts: a fixed one may be taken, and all others are free ones."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from fixtures import World, oat

from oat.commands.digest import digest_run

APART = {"compute.runtime": "ray", "compute.actors": 1, "compute.actor_cpus": 0.5}
BITWISE = {"engine.deterministic": True, "engine.threads": 1, "compute.threads": 1}


def test_a_port_that_is_taken(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setenv("RAY_GCS_SERVER_PORT", str(port))
        assert oat("train", world.config("grpo", tmp_path, APART)) == 2
    error = capsys.readouterr().err
    assert f"the environment variable RAY_GCS_SERVER_PORT is {port}, and no cluster can be started" in error
    assert error.count("\n") == 1


def test_a_port_that_is_none(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RAY_GCS_SERVER_PORT", "many")
    assert oat("train", world.config("grpo", tmp_path, APART)) == 2
    assert "RAY_GCS_SERVER_PORT is many" in capsys.readouterr().err


@pytest.mark.slow(instead="test_a_port_that_is_taken", seconds=40)
def test_two_runs_on_one_machine(world: World, tmp_path: Path) -> None:
    """Two runs begin at the same time, each with its own cluster. Both end as a run without a cluster."""
    assert oat("train", world.config("grpo", tmp_path, {**BITWISE, "run_dir": str(tmp_path / "local")})) == 0
    folders = [tmp_path / name for name in ("one", "other")]
    for folder in folders:
        folder.mkdir()
    configs = [world.config("grpo", folder, {**BITWISE, **APART}) for folder in folders]
    runs = [
        subprocess.Popen([sys.executable, "-m", "oat", "train", str(config)], env={**os.environ})
        for config in configs
    ]
    assert [run.wait(timeout=300) for run in runs] == [0, 0]
    local = digest_run(tmp_path / "local")
    assert [digest_run(folder / "grpo") for folder in folders] == [local, local]
