"""Repeat tests of other files in a cold process: a new interpreter that does all imports itself.

The other files fork a process that has already imported everything. So only the tests here see what a library
leaves or writes while it is imported. The cold tests of row R1 are in `test_kill.py` and
`test_kill_series.py`.
"""

import fcntl
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from ends import ENDS, End
from fixtures import World, cold, in_session, kill_at, named, oat

from oat.commands.digest import digest_run

Figure = Callable[[str], None]


def command(name: str, config: str, *flags: str) -> int:
    return oat(name, config, *flags)


def ended(name: str, config: str, place: str, numbers: str) -> int:
    """Run a command that gets signals at the first call of `place`, and return its exit code."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    if numbers:
        kill_at(*named(place), 1, signals=[int(number) for number in numbers.split()])
    return oat(name, config)


def limited(config: str, run_dir: str, most: str) -> int:
    """Run `oat train` with a limit on the size of each file, as on a full disk, and return its exit code."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(most), resource.RLIM_INFINITY))
    return oat("train", config, "--run_dir", run_dir)


@pytest.mark.large
@pytest.mark.fault("R4")
@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
def test_no_end_of_a_cold_process_leaves_anything(
    world: World, tmp_path: Path, end: End, figure: Figure
) -> None:
    scratch = tmp_path / "scratch"
    home = tmp_path / "home"
    log = tmp_path / "log"
    changes = dict(end.changes or {})
    scratch.mkdir()
    home.mkdir()
    if changes.get("oracle.name") == "forbidden":
        changes["oracle.name"] = world.oracle.replace(":reward", ":forbidden")
    config, numbers = (
        world.config("dpo", tmp_path, changes),
        " ".join(str(int(number)) for number in end.signals),
    )
    folders = {"TMPDIR": scratch, "HOME": home, "XDG_CACHE_HOME": ""}
    code = cold("test_cold:ended", end.command, config, end.place, numbers, log=log, environment=folders)
    assert code == end.code, log.read_text()
    left = (
        in_session(int(log.with_suffix(".session").read_text())),
        sorted(file.name for file in scratch.iterdir()),
    )
    figure(
        f"{int(left[0] == [] and len(left[1]) <= end.at_most)} of 1 ways to end a cold process leave "
        f"nothing behind"
    )
    assert left[0] == []
    assert len(left[1]) <= end.at_most, left[1]


@pytest.mark.parametrize(
    ("chosen", "folder"),
    [
        ({"HOME": "/dev/null"}, None),
        ({"HOME": "nowhere"}, None),
        ({"HOME": "{}"}, "{}/.cache/torch/inductor"),
        ({"XDG_CACHE_HOME": "{}"}, "{}/torch/inductor"),
        ({"XDG_CACHE_HOME": "{}", "TORCHINDUCTOR_CACHE_DIR": "/chosen"}, "/chosen"),
    ],
)
def test_where_the_compilers_cache_lies(tmp_path: Path, chosen: dict[str, str], folder: str | None) -> None:
    """Importing `oat` sets `TORCHINDUCTOR_CACHE_DIR` to a folder below the user's cache folder, and makes no
    file. If that folder cannot be written, the variable stays unset (None)."""
    environment = {
        "PATH": os.environ["PATH"],
        **{name: value.format(tmp_path) for name, value in chosen.items()},
    }
    script = "import oat, os; print(os.environ.get('TORCHINDUCTOR_CACHE_DIR'))"
    found = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True, cwd="/"
    ).stdout.strip()
    assert found == str(folder and folder.format(tmp_path))
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def unbroken(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a finished run of a cold process."""
    folder = tmp_path_factory.mktemp("unbroken")
    assert cold("test_cold:command", "train", world.config("dpo", folder), log=folder / "log") == 0, (
        folder / "log"
    ).read_text()
    return folder


@pytest.mark.large
@pytest.mark.fault("R7")
def test_the_order_of_a_save_of_a_cold_process(tmp_path: Path, figure: Figure) -> None:
    from known_checkpoints import two_good_ones
    from saves import SAVED

    two_good_ones(tmp_path / "checkpoints")
    assert (
        cold(
            "saves:recorded_save",
            tmp_path / "checkpoints",
            "verifies",
            tmp_path / "events.json",
            log=tmp_path / "log",
        )
        == 0
    )
    events = [
        event
        for event in json.loads((tmp_path / "events.json").read_text())
        if not event.startswith("write events")
    ]
    assert events == [*SAVED, "remove step_00000002"], (tmp_path / "log").read_text()
    figure(f"a save makes its {len(events)} system calls in the right order")


@pytest.mark.large
@pytest.mark.fault("R8")
def test_a_cold_process_goes_on_from_the_one_before(unbroken: Path, tmp_path: Path, figure: Figure) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(unbroken / "dpo", run_dir)
    file = run_dir / "checkpoints" / "step_00000004" / "tensors.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    code = cold(
        "test_cold:command", "train", unbroken / "dpo.yaml", "--run_dir", run_dir, log=tmp_path / "log"
    )
    assert code == 0, (tmp_path / "log").read_text()
    assert "tensors.safetensors" in (tmp_path / "log").read_text()
    assert digest_run(run_dir) == digest_run(unbroken / "dpo")
    figure("the last good checkpoint is used, and the run ends bitwise equal")


@pytest.mark.large
@pytest.mark.fault("R9")
def test_files_of_a_cold_process_that_may_not_grow(unbroken: Path, tmp_path: Path, figure: Figure) -> None:
    config = unbroken / "dpo.yaml"
    run_dir = tmp_path / "run"
    log = tmp_path / "log"
    largest = max(file.stat().st_size for file in (unbroken / "dpo").rglob("*") if file.is_file())
    assert cold("test_cold:limited", config, run_dir, largest // 2, log=log) == 1, log.read_text()
    assert "Traceback" not in log.read_text()
    assert cold("test_cold:command", "train", config, "--run_dir", run_dir, log=log) == 0, log.read_text()
    assert digest_run(run_dir) == digest_run(unbroken / "dpo")
    figure("a kernel's limit on file sizes: one message, then the run ends bitwise equal")


@pytest.mark.large
@pytest.mark.fault("R10")
def test_a_cold_process_is_refused_a_directory_in_use(unbroken: Path, tmp_path: Path, figure: Figure) -> None:
    with (unbroken / "dpo" / "lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert cold("test_cold:command", "train", unbroken / "dpo.yaml", log=tmp_path / "log") == 2
    assert f"{unbroken / 'dpo'} is in use by another process" in (tmp_path / "log").read_text()
    figure("of two processes on one run directory, the second is refused and the first ends well")


@pytest.mark.large
@pytest.mark.fault("R20")
def test_a_cold_process_skips_what_a_killed_one_skipped(world: World, tmp_path: Path) -> None:
    from not_finite import SKIP, poisoned

    config, log = poisoned(world, tmp_path, [1, 2, 4], SKIP), tmp_path / "log"
    assert cold("test_cold:command", "train", config, log=log) == 0, log.read_text()
    run = ("--run_dir", tmp_path / "run")
    code = cold(
        "test_cold:killed_after", "oat.learner.learner:Learner.update", 3, "train", config, *run, log=log
    )
    assert code == -signal.SIGKILL, log.read_text()
    assert cold("test_cold:command", "train", config, *run, log=log) == 0, log.read_text()
    assert digest_run(tmp_path / "run") == digest_run(tmp_path / "grpo")


def killed_after(place: str, call: str, name: str, *arguments: str) -> int:
    kill_at(*named(place), int(call), after=True)
    return oat(name, *arguments)


@pytest.mark.large
@pytest.mark.fault("R23")
def test_a_long_run_of_a_cold_process_does_not_grow(world: World, tmp_path: Path, figure: Figure) -> None:
    from growth import growth_is_bounded

    code = cold("growth:grow", world.folder, tmp_path, 100, 250, log=tmp_path / "log")
    assert code == 0, (tmp_path / "log").read_text()
    growth_is_bounded(tmp_path, 100, 250, figure)


@pytest.mark.large
@pytest.mark.fault("R24")
def test_a_cold_process_runs_nothing_and_opens_nothing(tmp_path: Path) -> None:
    assert cold("hostile_text:graded_quietly", log=tmp_path / "log") == 0, (tmp_path / "log").read_text()
