"""`environment.json`: the software and code that made each row of a run, in each process that continued
it."""

import json
import platform
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures import World, forked, kill_at, named, oat

from oat.errors import ConfigError, DirectoryError
from oat.files import write_atomically
from oat.rundir.provenance import (
    ProvenanceWriter,
    add_entry,
    command_line,
    entries,
    environment_of,
    git_state,
    versions,
)
from oat.rundir.reading import load_run


def told(run_dir: Path) -> list[dict[str, Any]]:
    return json.loads((run_dir / "environment.json").read_text())


def git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false")
    return subprocess.run(
        ["git", *identity, *arguments], cwd=folder, check=True, capture_output=True, text=True
    ).stdout


@pytest.mark.slow(instead="test_a_fork_has_its_own", seconds=1.7)
def test_one_entry_a_process_that_made_rows(world: World, tmp_path: Path) -> None:
    """environment.json has one entry per process that made rows. The run is started, killed, continued,
    continued without anything to do, and made longer."""
    config = world.config("dpo", tmp_path)
    assert (
        forked(
            lambda: kill_at(*named("oat.learner.learner:Learner.update"), 4) or oat("train", config),
            tmp_path / "log",
        )
        == -signal.SIGKILL
    )
    run_dir = tmp_path / "dpo"
    (first,) = told(run_dir)
    assert (first["first_row"], first["seed"], first["versions"]["torch"]) == (0, 0, torch.__version__)
    assert first["versions"]["python"] == platform.python_version()
    for flags in ((), (), ("--stop.max_steps", 6)):
        assert forked(lambda flags=flags: oat("train", config, *flags), tmp_path / "log") == 0
    assert [entry["first_row"] for entry in told(run_dir)] == [0, 3, 5]
    assert told(run_dir)[0] == first
    assert [entry["when"] for entry in told(run_dir)] == sorted(entry["when"] for entry in told(run_dir))
    assert load_run(run_dir).environment == told(run_dir)


def test_a_run_that_fails_before_its_first_row_has_one(world: World, tmp_path: Path) -> None:
    config = world.config(
        "dpo",
        tmp_path,
        {"seed": 7, "oracle.name": f"{world.folder / 'reward.py'}:forbidden", "evaluation": None},
    )
    assert forked(lambda: oat("train", config), tmp_path / "log") == 1
    assert [(entry["first_row"], entry["seed"]) for entry in told(tmp_path / "dpo")] == [(0, 7)]


def test_a_fork_has_its_own(world: World, tmp_path: Path) -> None:
    assert forked(lambda: oat("train", world.config("dpo", tmp_path)), tmp_path / "log") == 0
    config, fork = world.config("dpo", tmp_path, {"run_dir": str(tmp_path / "fork")}), tmp_path / "fork"
    assert (
        forked(lambda: oat("train", config, "--from", f"{tmp_path / 'dpo'}@2", "--seed", 3), tmp_path / "log")
        == 0
    )
    assert [(entry["first_row"], entry["seed"]) for entry in told(fork)] == [(3, 3)]
    assert len(told(tmp_path / "dpo")) == 1


@pytest.mark.sample("nested", seconds=0.9)
@pytest.mark.parametrize("text", ["{", "{}", "[" * 100_000], ids=["cut", "an object", "nested"])
def test_a_file_that_is_not_ours_is_left_alone(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    config, file = (
        world.config("dpo", tmp_path, {"stop.max_steps": 1, "evaluation": None}),
        tmp_path / "dpo" / "environment.json",
    )
    file.parent.mkdir()
    assert forked(lambda: oat("train", config), tmp_path / "log") == 0
    file.write_text(text)
    assert oat("train", config, "--stop.max_steps", "2") == 2
    assert f"{file}: " in capsys.readouterr().err
    assert file.read_text() == text
    with pytest.raises(ConfigError, match="move it away"):
        add_entry(file, {})


@pytest.mark.parametrize("how", ["removed", "replaced"])
@pytest.mark.parametrize("imports", [False, True])
def test_a_file_that_is_lost_under_a_run_ends_it(tmp_path: Path, how: str, imports: bool) -> None:
    """A run ends if environment.json is moved or replaced. Nothing writes the record of the environment a
    second time."""
    modules, file = {"reward.py": "1"}, tmp_path / "environment.json"
    process = ProvenanceWriter(file, lambda: {"seed": 0}, {}, lambda: modules)
    process.begin(0)
    process.tell()
    whole = file.read_bytes()
    file.rename(tmp_path / "other")
    if how == "replaced":
        write_atomically(file, whole.decode())
    if imports:
        modules["late.py"] = "2"
    for act in (process.tell, process.amend):
        with pytest.raises(
            DirectoryError,
            match=r"environment\.json: was moved, removed or replaced while a run worked with it",
        ):
            act()
    assert file.exists() == (how == "replaced")


def test_no_environment_and_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OAT_TEST_TOKEN", "hush-hush")
    monkeypatch.setattr(
        "sys.argv", ["/home/somebody/bin/oat", "train", "a.yaml", "--oracle.api_key", "hush-hush"]
    )
    entry = environment_of(5)
    assert entry["command"] == ["oat", "train", "a.yaml", "--oracle.api_key", "***"]
    text = json.dumps(entry)
    for secret in ("hush-hush", "somebody", "OAT_TEST", platform.node()):
        assert secret not in text


def test_command_lines_by_hand() -> None:
    assert command_line([]) == [""]
    assert command_line(["/x/oat/__main__.py", "train"]) == ["oat", "train"]
    flags = [
        "--api_key=a=b",
        "--oracle.hf_token",
        "a",
        "--password",
        "--seed",
        "1",
        "--stop.max_tokens",
        "9",
        "--prompts.prompt_key",
        "q",
    ]
    told = [
        "--api_key=***",
        "--oracle.hf_token",
        "***",
        "--password",
        "--seed",
        "1",
        "--stop.max_tokens",
        "9",
        "--prompts.prompt_key",
        "q",
    ]
    assert command_line(["oat", *flags]) == ["oat", *told]


def test_versions_are_of_what_is_installed() -> None:
    found = versions()
    assert found["torch"] == torch.__version__
    assert {"oat-align", "transformers", "numpy"} <= found.keys()
    assert all(found.values())


@pytest.mark.skipif(shutil.which("git") is None, reason="no git here")
def test_git_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    assert git_state() is None
    git(folder, "init")
    assert git_state() is None, "no commit yet"
    (folder / "a").write_text("1")
    git(folder, "add", "a")
    git(folder, "commit", "-m", "one")
    commit = git(folder, "rev-parse", "HEAD").strip()
    (folder / "runs").mkdir()
    (folder / "runs" / "new").write_text("what git does not know is no change")
    assert git_state() == {"commit": commit, "dirty": False}
    (folder / "a").write_text("2")
    canary = tmp_path / "canary"
    git(folder, "config", "core.fsmonitor", f"touch {canary}")
    assert git_state() == {"commit": commit, "dirty": True}
    assert not canary.exists(), "what a repository names is not run"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_state() is None, "no git"


def test_entries_of_no_file(tmp_path: Path) -> None:
    assert entries(tmp_path / "environment.json") == []
