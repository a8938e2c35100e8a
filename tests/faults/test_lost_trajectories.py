"""R8: files of trajectories that a run still reads are lost, changed or another run's. Every command that
goes on with the run says so, and nothing is learned."""

import json
import os
import shutil
import signal
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from fixtures import World, forked, kill_at, named, oat
from old_ledgers import make_old

from oat.commands.digest import digest_run
from oat.ledger.reader import Reader
from oat.ledger.store import Store
from oat.rundir.mark import MARK

pytestmark = pytest.mark.fault("R8")

Figure = Callable[[str], None]


def train(
    config: Path, run_dir: Path, *flags: object, before: Callable[[], object] = lambda: None
) -> tuple[int, str]:
    """Train in a child. Return its exit code and its output."""
    log = run_dir.with_name(f"{run_dir.name}.log")
    log.unlink(missing_ok=True)
    code = forked(lambda: before() or oat("train", config, "--run_dir", run_dir, *flags), log)
    return code, log.read_text()


@pytest.fixture(scope="module")
def run(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the configuration of a run of four steps that was killed in its fourth, with a checkpoint of
    step 2. It is in the folder `killed`. Beside it are `whole`, the run that was not killed, and `other`, a
    run with seed 1."""
    folder = tmp_path_factory.mktemp("run")
    config = world.config("grpo", folder, {"tracking.keep_trajectories": True})
    code, printed = train(
        config,
        folder / "killed",
        before=lambda: kill_at(*named("oat.learner.learner:Learner.update"), 4),
    )
    assert code == -signal.SIGKILL, printed
    for name, seed in (("whole", "0"), ("other", "1")):
        assert train(config, folder / name, "--seed", seed)[0] == 0
    return config


@pytest.fixture
def killed(run: Path, tmp_path: Path) -> Path:
    return shutil.copytree(run.parent / "killed", tmp_path / "run")


def folder_of(run_dir: Path) -> Path:
    return run_dir / "ledger.trajectories"


def files_of(run_dir: Path, step: int) -> list[Path]:
    """Return the files of a step of training."""
    with closing(Reader(run_dir / "ledger.sqlite")) as store:
        names = store.rows("SELECT groups FROM rounds WHERE purpose = 'train' AND step = ?", (step,))
        return [store.files.path(name) for (name,) in names]


def replace(run_dir: Path, run: Path) -> None:
    shutil.rmtree(folder_of(run_dir))
    shutil.copytree(folder_of(run.parent / "other"), folder_of(run_dir))


LOSSES: dict[str, Callable[[Path, Path], Any]] = {
    "gone": lambda run_dir, run: shutil.rmtree(folder_of(run_dir)),
    "another run's": replace,
    "one file": lambda run_dir, run: [file.unlink() for file in files_of(run_dir, 3)],
    "a file in their place": lambda run_dir, run: (
        shutil.rmtree(folder_of(run_dir)),
        folder_of(run_dir).write_text(""),
    ),
}


def tree(folder: Path) -> dict[str, bytes]:
    """Return the files of a run, but for those that say which process works in it."""
    return {
        str(path): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and not path.name.endswith(("-shm", "-wal", "lock"))
    }


@pytest.mark.parametrize("loss", LOSSES)
def test_lost_trajectories_are_refused_and_go_on_when_they_are_back(
    run: Path, killed: Path, tmp_path: Path, loss: str, figure: Figure, capsys: pytest.CaptureFixture[str]
) -> None:
    """The refusal changes nothing. With the folder put back, the run ends like the whole one."""
    whole = shutil.copytree(folder_of(killed), tmp_path / "aside")
    LOSSES[loss](killed, run)
    before = tree(killed)
    for command in (("train", run, "--run_dir", killed), ("check", run, "--run_dir", killed)):
        assert oat(*command) == 1, command
        error = capsys.readouterr().err
        assert "ledger.trajectories: the trajectories of " in error
        assert "are missing there, and the run still reads them" in error
        assert "Traceback" not in error
    assert oat("ledger", killed, "--check") == 1
    assert "the trajectories of a round are missing or damaged: train 3 0" in capsys.readouterr().err
    assert tree(killed) == before
    forking = oat("train", run, "--from", f"{killed}@2", "--run_dir", tmp_path / "fork")
    assert forking == (0 if loss == "one file" else 1), "a fork of step 2 does not read the file of step 4"
    assert (tmp_path / "fork").exists() == (loss == "one file")
    if folder_of(killed).is_file():
        folder_of(killed).unlink()
    shutil.copytree(whole, folder_of(killed), dirs_exist_ok=True)
    assert oat("train", run, "--run_dir", killed) == 0
    assert digest_run(killed) == digest_run(run.parent / "whole")
    figure("1 of 1 runs with lost trajectories refused")


@pytest.mark.parametrize("name", ["a begun run", "a folder without a configuration"])
def test_trajectories_without_their_ledger_begin_no_run(
    run: Path, killed: Path, name: str, figure: Figure, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that lost its ledger and everything else would ask again, and remove the trajectories."""
    is_begun = name == "a begun run"
    for left in killed.iterdir():
        if left.name not in (MARK, "ledger.trajectories", *(["config.yaml"] if is_begun else [])):
            shutil.rmtree(left) if left.is_dir() else left.unlink()
    before = tree(folder_of(killed))
    code = oat("train", run, "--run_dir", killed)
    error = capsys.readouterr().err
    if is_begun:
        assert code == 1
        assert "ledger.sqlite: it is missing, and " in error
        assert "What is lost would be asked and paid again" in error
    else:
        assert code == 2
        assert "is not empty and holds no run" in error
    assert tree(folder_of(killed)) == before
    figure("1 of 1 runs with lost trajectories refused")


def test_a_changed_file_ends_the_run_before_it_learns(
    run: Path, killed: Path, figure: Figure, capsys: pytest.CaptureFixture[str]
) -> None:
    (file,) = files_of(killed, 3)
    os.truncate(file, file.stat().st_size - 1)
    assert oat("train", run, "--run_dir", killed) == 1
    error = capsys.readouterr().err
    assert f"oat train: {file}: is not what was written there, it was cut or changed; put it back" in error
    rows = [json.loads(line)["step"] for line in (killed / "metrics.jsonl").read_text().splitlines()]
    assert rows == [0, 1, 2, 3]
    figure("1 of 1 runs with damaged trajectories end with an error")


def test_what_no_step_reads_again_may_be_gone(
    run: Path, killed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run goes on without the trajectories of steps that its checkpoint has done. The check names them,
    and a replay would miss them."""
    (file,) = files_of(killed, 0)
    file.unlink()
    assert oat("train", run, "--run_dir", killed) == 0
    assert digest_run(killed) == digest_run(run.parent / "whole")
    assert oat("ledger", killed, "--check") == 1
    assert f"train 0 0: {file}: is missing" in capsys.readouterr().err


def test_a_buffer_reads_older_steps(world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    buffer = {"learner.buffer": {"questions": 20}, "evaluation": None, "stop.max_steps": 2}
    config = world.config("dpo", tmp_path, buffer)
    assert oat("train", config) == 0
    (file,) = files_of(tmp_path / "dpo", 0)
    file.unlink()
    longer = ("train", config, "--stop.max_steps", "3")
    assert oat(*longer) == 1
    assert f"(the first is the file {file.name})" in capsys.readouterr().err


def test_what_a_kill_left_is_told_and_is_no_fault(
    killed: Path, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (file,) = files_of(killed, 0)
    left = file.with_name("0" * 64)
    left.write_text("left")
    assert oat("ledger", killed, "--check") == 0
    printed = capsys.readouterr().out
    assert "the ledger is sound" in printed
    assert f"1 file of trajectories (4 bytes) belong to no round, the first is {left}" in printed
    assert oat("train", run, "--run_dir", killed) == 0
    assert not left.exists()


@pytest.mark.sample("4", seconds=0.5)
@pytest.mark.parametrize("version", [8, 4])
def test_a_killed_run_of_an_older_schema_goes_on(
    run: Path, killed: Path, tmp_path: Path, version: int
) -> None:
    """Its blobs become files, in the run and in a fork of it. The fork reads the run, and changes nothing."""
    with closing(Store(killed / "ledger.sqlite")) as store:
        make_old(store.db, version)
        store.db.execute("PRAGMA journal_mode = DELETE")
    before = tree(killed)
    assert oat("train", run, "--run_dir", tmp_path / "fork", "--from", f"{killed}@2") == 0
    assert tree(killed) == before
    assert not folder_of(killed).exists()
    assert oat("train", run, "--run_dir", killed) == 0
    for run_dir in (killed, tmp_path / "fork"):
        assert oat("ledger", run_dir, "--check") == 0
        assert digest_run(run_dir)["weights"] == digest_run(run.parent / "whole")["weights"]


def test_a_fork_shares_files_and_outlives_its_parent(run: Path, tmp_path: Path) -> None:
    """A fork has hard links to the files of its parent. Each run removes only its own names."""
    parent, fork = shutil.copytree(run.parent / "whole", tmp_path / "parent"), tmp_path / "fork"
    assert oat("train", run, "--run_dir", fork, "--from", f"{parent}@4", "--stop.max_steps", "5") == 0
    shared = [file for file in folder_of(fork).rglob("*") if file.is_file() and file.stat().st_nlink == 2]
    assert len(shared) >= 4
    shutil.rmtree(parent)
    assert oat("ledger", fork, "--check") == 0
