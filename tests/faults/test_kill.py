"""A run that is killed at a named moment and continued by the same command is bitwise the unbroken run.

Each run is a child, forked from this process after its imports. `kill_at` sends SIGKILL to the child at a
named call, so no handler of `oat` runs.
"""

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from fixtures import World, cold, in_session, kill_at, logged, named, oat, tried

pytestmark = [pytest.mark.fault("R1"), pytest.mark.usefixtures("over_the_wire")]


@dataclass(frozen=True)
class Moment:
    """The moment of a kill: before or after call number `call` (from 1) of `place`, which is written
    "module:owner.name"."""

    algorithm: str
    place: str
    call: int
    after: bool = False
    flags: tuple[str, ...] = ()


AHEAD = ("--oracle.max_outstanding", "5", "--learner.sync_every", "2")
PLAIN = ("--compute.serialise", "false")
LATE = ("--oracle.name", "late", *AHEAD)
"""Questions are asked ahead, and a random generator chooses when each answer arrives."""

MOMENTS = {
    "run made, its configuration not yet written": Moment("dpo", "oat.opening.open_run:write_stored", 1),
    "inside a round's transaction": Moment("dpo", "oat.ledger.store:Store.add_round", 4, after=True),
    "trajectories on disk, their round not": Moment(
        "grpo", "oat.ledger.trajectory_files:TrajectoryFiles.write", 4, after=True
    ),
    "trajectories under their temporary name": Moment(
        "dpo", "oat.ledger.trajectory_files:replacing", 4, after=True
    ),
    "trajectories dropped, their files not removed": Moment(
        "dpo", "oat.ledger.trajectory_files:TrajectoryFiles.remove", 1
    ),
    "intents on disk, not sent": Moment("grpo", "oat.ledger.outstanding:Outstanding.submit", 5),
    "answers made, not on disk": Moment("dpo", "answers are recorded", 9),
    "inside an answer batch's transaction": Moment(
        "grpo", "oat.ledger.store:Store.add_answers", 6, after=True
    ),
    "answers on disk, the take not recorded": Moment("grpo", "oat.ledger.store:Store.add_take", 5),
    "the take recorded, nothing learned": Moment("dpo", "what is taken is forgotten", 6),
    "before the first checkpoint": Moment("dpo", "oat.learner.learner:Learner.update", 2),
    "after an optimiser step": Moment("grpo", "torch.optim.adamw:AdamW.step", 3, after=True),
    "between the two streams of a row": Moment("grpo", "a row is written", 18),
    "between two files of a save": Moment("grpo", "safetensors.torch:save_file", 2, after=True),
    "files of a save written, no manifest": Moment("dpo", "a checkpoint is hashed", 5),
    "saved under its temporary name": Moment("dpo", "a checkpoint is published", 2),
    "saved, before the pointer": Moment("grpo", "the newest checkpoint is named", 1),
    "before old checkpoints are removed": Moment("dpo", "old checkpoints are removed", 2),
    "written in the background, the next step learned": Moment(
        "grpo", "oat.learner.learner:Learner.update", 3, after=True
    ),
    "while a checkpoint waits for the one before": Moment(
        "dpo", "oat.rundir.checkpoints:Checkpoints.wait", 3
    ),
    "between the modes of the first evaluation": Moment("grpo", "an evaluation samples", 2),
    "between the modes of a later evaluation": Moment("dpo", "an evaluation samples", 4),
    "an evaluation's answers made, not on disk": Moment("grpo", "answers are recorded", 7),
    "an evaluation taken, its file not written": Moment("dpo", "an evaluation is written", 2),
    "inside a weight sync": Moment("grpo", "oat.engines.torch:TorchEngine.load", 6),
    "inside a weight sync of a copy": Moment(
        "dpo", "oat.engines.torch:TorchEngine.load", 3, after=True, flags=AHEAD
    ),
    "ahead of unanswered questions": Moment(
        "dpo", "oat.ledger.outstanding:Outstanding.submit", 8, flags=AHEAD
    ),
    "between the first files of a save": Moment("dpo", "safetensors.torch:save_file", 1, after=True),
    "some late answers on disk, the take not recorded": Moment(
        "dpo", "oat.ledger.store:Store.add_take", 6, flags=LATE
    ),
    "late answers made, not on disk": Moment("dpo", "answers are recorded", 9, flags=LATE),
    "ahead of late answers, nothing sent": Moment(
        "dpo", "oat.ledger.outstanding:Outstanding.submit", 5, flags=LATE
    ),
    "scores made, not on disk": Moment("grpo", "answers are recorded", 9),
    "without a wire, after an optimiser step": Moment(
        "grpo", "torch.optim.adamw:AdamW.step", 3, after=True, flags=PLAIN
    ),
    "without a wire, answers made, not on disk": Moment("dpo", "answers are recorded", 9, flags=PLAIN),
}


def given(config: Path, run_dir: Path, flags: tuple[str, ...]) -> list[Any]:
    """Return the words of a command line. The flag `late` is the name of the late oracle."""
    late = yaml.safe_load(config.read_text())["oracle"]["name"].replace(":reward", ":late")
    return ["train", config, "--run_dir", run_dir, *(late if flag == "late" else flag for flag in flags)]


def train(
    config: Path, run_dir: Path, flags: tuple[str, ...], before: Callable[[], None] | None = None
) -> int:
    return tried(run_dir.parent / "log", *given(config, run_dir, flags), before=before)


def digest(run_dir: Path) -> dict[str, str]:
    from oat.commands.digest import digest_run

    return digest_run(run_dir)


@pytest.fixture(scope="module")
def unbroken(
    world: World, tmp_path_factory: pytest.TempPathFactory, over_the_wire: bool
) -> Callable[[str, tuple[str, ...]], dict[str, str]]:
    """Return a function that gives the digest of the unbroken run of an algorithm and flags. Each run is made
    once."""
    import oat.assemble.run  # noqa: F401 (so that children start warm)

    found: dict[Any, dict[str, str]] = {}

    def make(algorithm: str, flags: tuple[str, ...]) -> dict[str, str]:
        if (algorithm, flags) not in found:
            folder = tmp_path_factory.mktemp("unbroken")
            run = given(world.config(algorithm, folder), folder / "run", flags)
            assert logged(folder / "log", *run) == 0, (folder / "log").read_text()
            found[algorithm, flags] = digest(folder / "run")
        return found[algorithm, flags]

    return make


@pytest.mark.sample(
    "*-inside an answer batch's transaction", "*-without a wire, answers made, not on disk", seconds=22.6
)
@pytest.mark.parametrize("moment", MOMENTS.values(), ids=MOMENTS.keys())
def test_a_killed_run_is_the_unbroken_run(
    world: World, tmp_path: Path, unbroken: Any, moment: Moment
) -> None:
    config, run_dir = world.config(moment.algorithm, tmp_path), tmp_path / "run"

    def arm() -> None:
        kill_at(*named(moment.place), moment.call, after=moment.after)

    assert train(config, run_dir, moment.flags, arm) == -signal.SIGKILL, (tmp_path / "log").read_text()
    assert oat("ledger", run_dir, "--check") == 0
    assert train(config, run_dir, moment.flags) == 0, (tmp_path / "log").read_text()
    assert digest(run_dir) == unbroken(moment.algorithm, moment.flags)


@pytest.mark.parametrize("algorithm", ["dpo", "grpo"])
def test_the_wire_changes_nothing(unbroken: Any, algorithm: str, over_the_wire: bool) -> None:
    other = ("--compute.serialise", str(not over_the_wire).lower())
    assert unbroken(algorithm, other) == unbroken(algorithm, ())


@pytest.mark.slow(instead="test_a_killed_run_is_the_unbroken_run", seconds=1.5)
def test_a_run_killed_again_and_again(world: World, tmp_path: Path, unbroken: Any) -> None:
    """Every attempt is killed in its second save, after the first save is on disk. The run must end after
    three kills."""
    config, run_dir = world.config("grpo", tmp_path, {"checkpoint.every": 1}), tmp_path / "run"
    flags = ("--checkpoint.every", "1")

    def arm() -> None:
        kill_at(*named("tensors are copied for a save"), 2)

    attempts = 0
    while train(config, run_dir, flags, arm) != 0:
        attempts += 1
        assert attempts < 6
    assert attempts == 3
    assert digest(run_dir) == unbroken("grpo", ())


def test_continuing_a_finished_run_changes_nothing(world: World, tmp_path: Path, unbroken: Any) -> None:
    config, run_dir = world.config("dpo", tmp_path), tmp_path / "run"
    assert train(config, run_dir, ()) == 0
    before = {
        file: file.read_bytes() for file in run_dir.rglob("*") if file.is_file() and "sqlite" not in file.name
    }
    for _ in range(2):
        assert train(config, run_dir, ()) == 0
    assert {
        file: file.read_bytes() for file in run_dir.rglob("*") if file.is_file() and "sqlite" not in file.name
    } == before
    assert digest(run_dir) == unbroken("dpo", ())


@pytest.mark.slow(instead="test_a_killed_run_is_the_unbroken_run, in forked processes", seconds=5.2)
def test_from_a_cold_shell(world: World, tmp_path: Path, unbroken: Any) -> None:
    """Two processes have different hash seeds. The first is killed at any moment after row 2; the second
    starts from a shell. The result does not depend on the order of a set, and the second process leaves no
    process and no file."""
    config, run_dir = world.config("dpo", tmp_path), tmp_path / "run"
    metrics = run_dir / "metrics.jsonl"

    def end() -> None:
        while not (metrics.exists() and metrics.read_bytes().count(b"\n") >= 3):
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGKILL)

    # made in the child: a thread object from before a fork counts as started in it (Python 3.12)
    ended = train(config, run_dir, PLAIN, lambda: threading.Thread(target=end, daemon=True).start())
    assert ended in (0, -signal.SIGKILL), (tmp_path / "log").read_text()
    log, scratch, home = (tmp_path / name for name in ("log", "scratch", "home"))
    scratch.mkdir()
    home.mkdir()
    environment = {"PYTHONHASHSEED": 2, "TMPDIR": scratch, "HOME": home, "XDG_CACHE_HOME": ""}
    words = ("train", config, "--run_dir", run_dir)
    assert cold("fixtures:oat", *words, log=log, environment=environment) == 0, log.read_text()
    assert in_session(int(log.with_suffix(".session").read_text())) == []
    assert list(scratch.iterdir()) == []
    assert digest(run_dir) == unbroken("dpo", PLAIN)
