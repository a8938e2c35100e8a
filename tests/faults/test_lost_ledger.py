"""R8: the ledger lacks questions that a run has learned from, since it is missing, older, without its log, of
another run, or removed during the run. Every command refuses to continue, so no question is paid for
twice."""

import contextlib
import hashlib
import json
import os
import re
import shutil
import signal
import sqlite3
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
from fixtures import World, kill_at, named, oat, tried

from oat.commands.digest import digest_run
from oat.errors import LedgerError, OatWarning
from oat.rundir.reading import load_run

pytestmark = pytest.mark.fault("R8")

Figure = Callable[[str], None]

LONGER = ("--stop.max_steps", "6")


def train(
    config: Path, run_dir: Path, *flags: object, before: Callable[[], object] | None = None
) -> tuple[int, str]:
    """Train, and return the exit code and the output."""
    log = run_dir.with_name(f"{run_dir.name}.log")
    log.unlink(missing_ok=True)
    return tried(log, "train", config, "--run_dir", run_dir, *flags, before=before), log.read_text()


@pytest.fixture(scope="module")
def run(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the configuration of a finished run of four steps. Beside it are the folder `run`, with
    checkpoints of steps 2 and 4; `two`, a copy of the run after step 2; and `other`, a run with seed 1."""
    folder = tmp_path_factory.mktemp("run")
    config = world.config("grpo", folder, {"tracking.keep_trajectories": True, "checkpoint.keep_last": 5})
    assert train(config, folder / "run", "--stop.max_steps", "2")[0] == 0
    shutil.copytree(folder / "run", folder / "two")
    assert train(config, folder / "run")[0] == 0
    assert train(config, folder / "other", "--seed", "1")[0] == 0
    return config


@pytest.fixture
def copied(run: Path, tmp_path: Path) -> Path:
    return shutil.copytree(run.parent / "run", tmp_path / "run")


def older(copied: Path, run: Path) -> None:
    shutil.copy(run.parent / "two" / "ledger.sqlite", copied)


def foreign(copied: Path, run: Path) -> None:
    shutil.copy(run.parent / "other" / "ledger.sqlite", copied)


def emptied(copied: Path, run: Path) -> None:
    (copied / "ledger.sqlite").write_bytes(b"")


def without_the_last_evaluation(copied: Path, run: Path) -> None:
    with contextlib.closing(sqlite3.connect(copied / "ledger.sqlite")) as database, database:
        for table in ("takes", "taken"):
            database.execute(f"DELETE FROM {table} WHERE purpose = 'eval' AND step = 4")


def with_less_spent(copied: Path, run: Path) -> None:
    with contextlib.closing(sqlite3.connect(copied / "ledger.sqlite")) as database, database:
        database.execute("UPDATE takes SET queries = queries - 1 WHERE purpose = 'train' AND step = 3")


LOSSES = {
    "gone": (
        lambda copied, run: (copied / "ledger.sqlite").unlink(),
        "it is missing, and the checkpoint step_00000004 was written when ",
    ),
    "older": (
        older,
        (
            "step_00000004 was written when step 4 had taken its answers, and the ledger ends with those of "
            "step 2"
        ),
    ),
    "another run's": (
        foreign,
        "step_00000004 was written when step 4 had taken its answers, and those in the ledger are others",
    ),
    "empty": (
        emptied,
        "step_00000004 was written when step 4 had taken its answers, and the ledger has none of that kind",
    ),
    "without an evaluation": (
        without_the_last_evaluation,
        "the evaluation after 4 steps (eval) had taken its answers, and the ledger ends with those of ",
    ),
    "less is spent": (with_less_spent, "queries were spent, and the ledger counts "),
}


def tree(folder: Path) -> dict[str, bytes]:
    """Return the files of a run, but for those that say which process works in it."""
    return {
        str(path): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and not path.name.endswith(("-shm", "-wal", "lock"))
    }


@pytest.mark.parametrize("loss", LOSSES)
def test_what_a_checkpoint_needs_is_not_in_the_ledger(
    run: Path, copied: Path, tmp_path: Path, loss: str, figure: Figure, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every command that needs the ledger refuses it, with one message that says what is lost, and changes
    nothing."""
    lose, words = LOSSES[loss]
    lose(copied, run)
    before = tree(copied)
    fork = ("--from", f"{copied}@4", "--run_dir", tmp_path / "fork")
    for command in (
        ("train", run, "--run_dir", copied, *LONGER),
        ("train", run, "--run_dir", copied),
        ("check", run, "--run_dir", copied, *LONGER),
        ("ledger", copied, "--check"),
        ("ledger", copied, "--check", "--export", tmp_path / "rows.jsonl"),
        ("ledger", copied, "--export", tmp_path / "rows.jsonl"),
        ("train", run, *fork),
        ("check", run, *fork),
    ):
        assert oat(*command) == 1, command
        error = capsys.readouterr().err
        assert words in error, command
        assert "Traceback" not in error
    with pytest.raises(LedgerError, match=re.escape(words)):
        load_run(copied).questions  # noqa: B018 (a property)
    assert tree(copied) == before
    assert not (tmp_path / "fork").exists()
    assert not (tmp_path / "rows.jsonl").exists()
    figure("1 of 1 lost ledgers refused")


@pytest.mark.parametrize("line", ["[" * 100_000, json.dumps({"step": 10**30})], ids=["nested", "far away"])
def test_a_damaged_last_row_claims_nothing(
    copied: Path, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A damaged last row of metrics is ignored; the row before it counts."""
    with (copied / "metrics.jsonl").open("a") as file:
        file.write(line + "\n")
    assert oat("ledger", copied, "--check") == 0
    (copied / "ledger.sqlite").unlink()
    (copied / "checkpoints").rename(copied / "aside")
    assert oat("ledger", copied, "--check") == 1
    assert "row 4 of metrics.jsonl" in capsys.readouterr().err


def test_a_log_that_is_lost_after_a_kill(run: Path, tmp_path: Path, figure: Figure) -> None:
    """After a kill, recent records of the ledger may be only in the file ledger.sqlite-wal. If this file is
    lost, the run refuses to continue and says what the ledger lacks."""
    run_dir = tmp_path / "run"
    assert (
        train(run, run_dir, before=lambda: kill_at(*named("oat.learner.learner:Learner.update"), 4))[0]
        == -signal.SIGKILL
    )
    whole = shutil.copytree(run_dir, tmp_path / "whole")
    (run_dir / "ledger.sqlite-wal").unlink()
    code, printed = train(run, run_dir)
    assert code == 1
    assert (
        "ledger.sqlite: the checkpoint step_00000002 was written when step 2 had taken its answers, and "
        "the ledger has none"
    ) in printed
    assert train(run, whole)[0] == 0
    figure("1 of 1 lost ledgers refused")


@pytest.mark.sample("0.5", seconds=0.5)
@pytest.mark.parametrize("size", [0.0, 0.5])
def test_a_log_that_is_lost_behind_the_newest_checkpoint(
    run: Path, copied: Path, size: float, figure: Figure
) -> None:
    """The ledger has lost only records after the newest checkpoint. The rows of metrics after the checkpoint
    show what is lost, and the run refuses to continue."""
    flags = ("--checkpoint.every", "10", "--stop.max_steps", "8")
    assert (
        train(run, copied, *flags, before=lambda: kill_at(*named("oat.learner.learner:Learner.update"), 4))[0]
        == -signal.SIGKILL
    )
    log = copied / "ledger.sqlite-wal"
    os.truncate(log, int(log.stat().st_size * size))
    code, printed = train(run, copied, *flags)
    assert code == 1
    assert (
        "row 7 of metrics.jsonl was written when step 7 had taken its answers, and the ledger ends with "
        "those of step "
    ) in printed
    figure("1 of 1 lost ledgers refused")


TAKEN_AWAY = {
    "removed": "os.unlink(LEDGER)",
    "replaced": "shutil.copy(LEDGER, LEDGER + '.copy'); os.replace(LEDGER + '.copy', LEDGER)",
    "moved": "os.rename(LEDGER, LEDGER + '.moved')",
    "its log removed": "os.unlink(LEDGER + '-wal')",
    "in its place a folder": "os.unlink(LEDGER); os.mkdir(LEDGER)",
    "its trajectories removed": "shutil.rmtree(TRAJECTORIES)",
    "its trajectories moved": "os.rename(TRAJECTORIES, TRAJECTORIES + '.moved')",
}


@pytest.mark.sample("removed", seconds=1.3)
@pytest.mark.parametrize("how", TAKEN_AWAY)
def test_a_ledger_that_vanishes_under_a_run_ends_it(
    run: Path, world: World, tmp_path: Path, how: str, figure: Figure
) -> None:
    """In the third step the reward function removes, moves or replaces the ledger of its own run. The run
    ends with an error, and its rows of metrics end with step 2."""
    run_dir, reward = tmp_path / "run", tmp_path / "reward.py"
    reward.write_text(
        f"import os, shutil\nLEDGER, calls = {str(run_dir / 'ledger.sqlite')!r}, 0\n"
        f"TRAJECTORIES = {str(run_dir / 'ledger.trajectories')!r}\n\ndef reward(prompts, "
        "completions, **columns):\n    global calls\n    calls += 1\n    if calls == 3:\n        "
        f"{TAKEN_AWAY[how]}\n    return [text.count('a') + 0.1 * text.count('b') for text in completions]\n"
    )
    config = world.config("grpo", tmp_path, {"evaluation": None, "oracle.name": f"{reward}:reward"})
    code, printed = train(config, run_dir)
    assert code == 1, printed
    assert re.search(
        (
            r"oat train: \S+ledger.(sqlite(-wal)?|trajectories): was moved, removed or replaced while a run "
            r"worked with it, and nothing more"
        ),
        printed,
    )
    assert "Traceback" not in printed
    assert "finished" not in printed
    assert [json.loads(line)["step"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()] == [
        0,
        1,
        2,
    ]
    figure("1 of 1 runs whose ledger vanishes end with an error")


def test_a_ledger_that_is_ahead_is_sound(
    run: Path, copied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A ledger with more records than the checkpoint needs is accepted: after the run is set back to an older
    checkpoint, after a fork of an older step, or after all checkpoints are removed."""
    (copied / "checkpoints" / "latest").write_text("step_00000002\n")
    assert oat("ledger", copied, "--check") == 0
    assert oat("train", run, "--run_dir", tmp_path / "fork", "--from", f"{copied}@2") == 0
    assert oat("ledger", tmp_path / "fork", "--check") == 0
    assert oat("train", run, "--run_dir", copied) == 0
    shutil.rmtree(copied / "checkpoints")
    assert oat("train", run, "--run_dir", copied, *LONGER) == 0
    assert oat("ledger", copied, "--check", "--export", tmp_path / "rows.jsonl") == 0
    assert "lost" not in capsys.readouterr().err


def test_a_fork_of_the_start_goes_on(run: Path, tmp_path: Path) -> None:
    """A fork of step 0 makes the first evaluation itself, although its origin has answers of it. The origin
    may be rolled back, so it still has its checkpoint of step 0."""
    origin, fork = tmp_path / "origin", tmp_path / "fork"
    flags = (
        "--alarms.spread.action",
        "roll_back",
        "--alarms.spread.patience",
        "100",
        "--stop.max_steps",
        "2",
    )
    assert train(run, origin, *flags)[0] == 0
    code, printed = train(run, fork, *flags, "--from", f"{origin}@0")
    assert code == 0, printed
    assert digest_run(fork) == digest_run(origin)


def test_an_older_ledger_goes_on_from_a_checkpoint_that_it_reaches(
    run: Path, copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With an older ledger, a run continues after the remedy of the message: set `latest` back to the older
    checkpoint, and remove the rows of metrics after it."""
    older(copied, run)
    (copied / "checkpoints" / "latest").write_text("step_00000002\n")
    assert oat("train", run, "--run_dir", copied) == 1
    assert "row 4 of metrics.jsonl was written when step 4 had taken its answers" in capsys.readouterr().err
    rows = (copied / "metrics.jsonl").read_text().splitlines(keepends=True)
    (copied / "metrics.jsonl").write_text("".join(rows[:3]))
    assert oat("train", run, "--run_dir", copied) == 0


def unmarked(run_dir: Path) -> None:
    """Rewrite the checkpoints as an earlier version of `oat` wrote them, without the ledger's state."""
    for folder in (run_dir / "checkpoints").glob("step_*"):
        state, manifest = (
            json.loads((folder / name).read_text()) for name in ("state.json", "manifest.json")
        )
        text = json.dumps(
            {name: value for name, value in state.items() if name != "ledger"}, indent=1, sort_keys=True
        ).encode()
        (folder / "state.json").write_bytes(text)
        manifest["state.json"] = {"sha256": hashlib.sha256(text).hexdigest(), "bytes": len(text)}
        (folder / "manifest.json").write_text(json.dumps(manifest))


def test_a_run_of_an_earlier_version_goes_on_with_one_warning(
    run: Path, copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    unmarked(copied)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert oat("train", run, "--run_dir", copied, *LONGER) == 0
    (said,) = [str(warning.message) for warning in caught if issubclass(warning.category, OatWarning)]
    assert said.endswith(
        "checkpoints/step_00000004: an earlier version of oat wrote it, without what its ledger must hold; "
        "only the queries of its row are held against the ledger"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert oat("train", run, "--run_dir", copied, "--stop.max_steps", "7") == 0


@pytest.mark.parametrize("loss", ["gone", "older", "empty", "without an evaluation", "less is spent"])
def test_a_run_of_an_earlier_version_is_refused_by_its_row(
    run: Path, copied: Path, loss: str, capsys: pytest.CaptureFixture[str]
) -> None:
    unmarked(copied)
    (copied / "metrics.jsonl").unlink()
    LOSSES[loss][0](copied, run)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for command in (("train", run, "--run_dir", copied, *LONGER), ("ledger", copied, "--check")):
            assert oat(*command) == 1
            assert LOSSES[loss][1] in capsys.readouterr().err
