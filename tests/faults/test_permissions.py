"""R10: the run reports files that it may not read or write before its first step, and leaves no half-made
file.

Root may read and write everything. If the tests run as root, `oat` runs in a child with the user id of
`nobody`.
"""

import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fixtures import World, forked, kill_at, named, oat

from oat.rundir.checkpoints import Checkpoints

NOBODY = 65534
Figure = Callable[[str], None]


@pytest.fixture(scope="module", autouse=True)
def _imported(world: World, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Import every module that a run needs, since another user may not be able to read Python's files."""
    assert oat("train", world.config("dpo", tmp_path_factory.mktemp("imported"), {"stop.max_steps": 1})) == 0


@pytest.fixture
def place(world: World) -> Iterator[World]:
    """Yield a copy of the world in which every user may write. Pytest's own folders are closed to other
    users, and so may be the one that TMPDIR names."""
    given = [Path(name).resolve() for name in (tempfile.gettempdir(), "/tmp", "/var/tmp")]
    entered = [path for path in given if all(part.stat().st_mode & 0o001 for part in (path, *path.parents))]
    folder = Path(tempfile.mkdtemp(dir=entered[0]))
    shutil.copytree(world.folder, folder, dirs_exist_ok=True)
    folder.chmod(0o777)
    (folder / "model" / "model.safetensors").chmod(0o644)
    yield World(folder)
    for path in folder.rglob("*"):
        path.chmod(0o755)
    shutil.rmtree(folder)


def as_nobody(log: Path, *arguments: object) -> tuple[int, str]:
    """Run a command under another user id. Return its exit code and its output."""

    def child() -> int:
        if os.geteuid() == 0:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
        return oat(*arguments)

    log.unlink(missing_ok=True)
    return forked(child, log), log.read_text()


def train(place: World, config: Path, log: Path) -> tuple[int, str]:
    return as_nobody(log, "train", config)


def tree(folder: Path) -> dict[str, tuple[int, float]]:
    """Return size and time of every file below a folder, without Python's caches."""
    return {
        str(path): (path.stat().st_size, path.stat().st_mtime)
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in str(path)
    }


def standing(folder: Path) -> list[Path]:
    """Return all paths below a folder, without Python's caches."""
    return [path for path in sorted(folder.rglob("*")) if "__pycache__" not in str(path)]


def refused(place: World, config: Path, path: Path, log: Path) -> None:
    """Check that the run ends with exit code 2 and a line that names the path, and that no file is added or
    changed."""
    before, paths = tree(place.folder), standing(place.folder)
    code, printed = train(place, config, log)
    assert code == 2, printed
    assert "Traceback" not in printed
    assert printed.splitlines()[-1].startswith("oat train: ")
    assert str(path) in printed.splitlines()[-1]
    assert tree(place.folder) == before
    assert standing(place.folder) == paths


@pytest.mark.fault("R10")
def test_another_user_may_run(place: World, tmp_path: Path) -> None:
    """The user `nobody` can run `oat` at all. Otherwise the refusals below would prove nothing."""
    code, printed = train(place, place.config("dpo", place.folder, {"stop.max_steps": 2}), tmp_path / "log")
    assert code == 0, printed
    assert Checkpoints(place.folder / "dpo" / "checkpoints", every=1, keep_last=1).steps == [2]


@pytest.mark.fault("R10")
@pytest.mark.parametrize(
    "name",
    [
        "model/model.safetensors",
        "model/config.json",
        "model/tokenizer.json",
        "model",
        "train.jsonl",
        "held_out.jsonl",
    ],
)
def test_what_cannot_be_read(place: World, tmp_path: Path, figure: Figure, name: str) -> None:
    config = place.config("dpo", place.folder)
    (place.folder / name).chmod(0)
    refused(place, config, place.folder / ("model" if name.startswith("model") else name), tmp_path / "log")
    figure("an unreadable file: exit code 2, nothing left behind")


@pytest.mark.fault("R10")
@pytest.mark.parametrize("name", ["reward.py", "dpo.yaml"])
def test_code_and_configuration_that_cannot_be_read(
    place: World, tmp_path: Path, figure: Figure, name: str
) -> None:
    config = place.config("dpo", place.folder)
    (place.folder / name).chmod(0)
    refused(place, config, place.folder / name, tmp_path / "log")
    figure("an unreadable file: exit code 2, nothing left behind")


@pytest.mark.fault("R10")
@pytest.mark.parametrize("made", ["runs", "runs/dpo"])
def test_a_directory_that_cannot_be_written(place: World, tmp_path: Path, figure: Figure, made: str) -> None:
    """The run is refused if it may not write its own directory, or the one in which its directory would be
    made."""
    (place.folder / made).mkdir(parents=True)
    (place.folder / made).chmod(0o555)
    config = place.config("dpo", place.folder, {"run_dir": str(place.folder / "runs" / "dpo")})
    refused(place, config, place.folder / "runs" / "dpo", tmp_path / "log")
    figure("an unwritable directory: exit code 2, nothing left behind")


@pytest.mark.sample("checkpoints", seconds=1.8)
@pytest.mark.fault("R10")
@pytest.mark.parametrize(
    "name",
    [
        "ledger.sqlite",
        "ledger.trajectories",
        "lock",
        "checkpoints",
        "checkpoints/step_00000002",
        "evaluations",
    ],
)
def test_a_run_of_which_a_part_cannot_be_written(
    place: World, tmp_path: Path, figure: Figure, name: str
) -> None:
    config = place.config("dpo", place.folder, {"stop.max_steps": 2})
    assert train(place, config, tmp_path / "log")[0] == 0
    path = place.folder / "dpo" / name
    path.chmod(0o555 if path.is_dir() else 0o444)
    refused(place, config, path, tmp_path / "log")
    figure("an unwritable directory: exit code 2, nothing left behind")


@pytest.mark.fault("R10")
def test_a_run_that_may_only_be_read(place: World, tmp_path: Path, figure: Figure) -> None:
    """`oat ledger`, `oat digest` and a fork work on a run that may only be read, and change nothing in it."""
    config = place.config("dpo", place.folder, {"stop.max_steps": 2})
    run_dir = place.folder / "dpo"
    log = tmp_path / "log"
    assert train(place, config, log)[0] == 0
    for path in [*run_dir.rglob("*"), run_dir]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    before = tree(run_dir)
    for command in (
        ("ledger", run_dir, "--check"),
        ("digest", run_dir),
        ("train", config, "--from", run_dir, "--run_dir", place.folder / "fork"),
    ):
        code, printed = as_nobody(log, *command)
        assert code == 0, printed
    assert tree(run_dir) == before
    figure("a read-only run can be read and forked")


@pytest.mark.fault("R10")
def test_two_processes_on_one_directory(world: World, tmp_path: Path, figure: Figure) -> None:
    """The second process starts when the first one has its lock and has not begun its first step. The second
    is refused, and the first ends well."""
    config = world.config("dpo", tmp_path, {"stop.max_steps": 2})
    ready, told = os.pipe(), os.pipe()

    def first() -> int:
        from oat.collector import Collector

        fill = Collector.fill

        def waiting(*arguments: object) -> dict[str, float]:
            Collector.fill = fill  # type: ignore[method-assign]
            os.write(ready[1], b"x")
            os.read(told[0], 1)
            return fill(*arguments)  # type: ignore[arg-type]

        Collector.fill = waiting  # type: ignore[method-assign, assignment]
        return oat("train", config)

    child = os.fork()
    if child == 0:
        os._exit(forked(first, tmp_path / "first"))
    assert os.read(ready[0], 1) == b"x"
    before = tree(tmp_path / "dpo")
    assert forked(lambda: oat("train", config), tmp_path / "second") == 2
    assert f"{tmp_path / 'dpo'} is in use by another process" in (tmp_path / "second").read_text()
    assert tree(tmp_path / "dpo") == before
    os.write(told[1], b"x")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, (tmp_path / "first").read_text()
    figure("of two processes on one run directory, the second is refused and the first ends well")


POOL = """
import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

pool = None


def count(text):
    return os.getpid(), float(text.count("a"))


def reward(prompts, completions, **columns):
    global pool
    pool = pool or ProcessPoolExecutor(1)
    counted = list(pool.map(count, completions))
    with Path(__file__).with_name("workers").open("a") as file:
        file.writelines(f"{worker}\\n" for worker in {worker for worker, _ in counted})
    return [value for _, value in counted]
"""


@pytest.mark.fault("R10")
def test_what_a_dead_owner_leaves_running_does_not_hold_the_directory(
    world: World, tmp_path: Path, figure: Figure
) -> None:
    """The workers of a reward function survive a SIGKILL of the run. The same command then continues the run
    although they still exist."""
    (tmp_path / "pool.py").write_text(POOL)
    config, log = (
        world.config("dpo", tmp_path, {"oracle.name": f"{tmp_path / 'pool.py'}:reward", "evaluation": None}),
        tmp_path / "log",
    )
    try:
        assert (
            forked(
                lambda: kill_at(*named("oat.learner.learner:Learner.update"), 2) or oat("train", config), log
            )
            == -signal.SIGKILL
        )
        left = {int(worker) for worker in (tmp_path / "workers").read_text().split()}
        assert len(left) == 1
        os.kill(*left, 0)
        assert forked(lambda: oat("train", config), log) == 0, log.read_text()
    finally:
        for worker in {int(worker) for worker in (tmp_path / "workers").read_text().split()}:
            os.kill(worker, signal.SIGKILL)
    figure("the workers of a killed run hold no lock")
