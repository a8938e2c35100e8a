"""A run that gets SIGTERM or Ctrl-C at named moments. The same command then ends like the unbroken run,
bitwise."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import pytest
from fixtures import Finished, World, kill_at, named, tried

from oat.commands.digest import digest_run
from oat.control.interruption import Interruption
from oat.errors import Interrupted
from oat.rundir.checkpoint_files import verify

pytestmark = pytest.mark.fault("R4")


@dataclass(frozen=True)
class Moment:
    """Signals at the beginning of call number `call` (from 1) of `place`, "module:owner.name", and the step
    of the newest checkpoint afterwards."""

    algorithm: str
    place: str
    call: int
    saved: int | tuple[int, ...]
    signals: tuple[int, ...] = (signal.SIGTERM,)
    code: int = 75
    flags: tuple[str, ...] = ()


OFTEN = ("--checkpoint.every", "1")
"""A save waits for the save before it. So a signal that comes while a checkpoint is written comes before the
run has ended."""

MOMENTS = {
    "before the first question": Moment("dpo", "oat.collector:Collector.fill", 1, 0),
    "while it samples": Moment("grpo", "oat.rollout.actor:Actor.sample", 8, 3),
    "while it asks": Moment("dpo", "answers are recorded", 11, 3),
    "while it learns": Moment("grpo", "oat.learner.learner:Learner.update", 3, 3),
    "in the first evaluation": Moment("grpo", "an evaluation samples", 1, 0),
    "in a later evaluation": Moment("dpo", "an evaluation samples", 3, 2),
    "in the last evaluation": Moment("grpo", "an evaluation is written", 3, 4),
    "in a save": Moment(
        "grpo",
        "a checkpoint is published",
        1,
        2,
        flags=("--checkpoint.background", "false"),
    ),
    "beside a save": Moment("grpo", "a checkpoint is published", 1, (1, 2), flags=OFTEN),
    "by Ctrl-C": Moment("dpo", "oat.learner.learner:Learner.update", 3, 3, (signal.SIGINT,), 130),
    "by Ctrl-C twice": Moment(
        "dpo", "oat.learner.learner:Learner.update", 4, 2, (signal.SIGINT, signal.SIGINT), 130
    ),
    "by SIGTERM twice": Moment(
        "dpo", "oat.learner.learner:Learner.update", 3, 3, (signal.SIGTERM, signal.SIGTERM)
    ),
}


STARTS = {
    "while the configuration is read": ("oat.config.load:read_tree", signal.SIGTERM, 75),
    "while data and oracles are made": ("oat.opening.open_run:gather_inputs", signal.SIGTERM, 75),
    "while weights are loaded": ("oat.models.loading:module_from_files", signal.SIGTERM, 75),
    "while the ledger is opened": ("oat.ledger.store:Store.__init__", signal.SIGTERM, 75),
    "while it is measured": ("oat.assemble.learner_side:choose_threads", signal.SIGTERM, 75),
    "before the configuration is kept": ("oat.opening.open_run:write_stored", signal.SIGINT, 130),
    "before its state is taken up": ("oat.loop:restore", signal.SIGTERM, 75),
}


def train(
    config: Path, run_dir: Path, before: Callable[[], None] | None = None, flags: tuple[str, ...] = ()
) -> int:
    return tried(run_dir.parent / "log", "train", config, "--run_dir", run_dir, *flags, before=before)


@pytest.fixture(scope="module")
def unbroken(finished: Finished) -> dict[str, dict[str, str]]:
    return {algorithm: digest_run(finished.only_read(algorithm)) for algorithm in ("dpo", "grpo")}


@pytest.mark.sample("while it learns", seconds=7.8)
@pytest.mark.parametrize("moment", MOMENTS.values(), ids=MOMENTS.keys())
def test_an_interrupted_run_is_the_unbroken_run(
    world: World,
    tmp_path: Path,
    unbroken: dict[str, dict[str, str]],
    moment: Moment,
    figure: Callable[[str], None],
) -> None:
    config, run_dir = world.config(moment.algorithm, tmp_path), tmp_path / "run"
    assert (
        train(
            config,
            run_dir,
            lambda: kill_at(*named(moment.place), moment.call, signals=moment.signals),
            moment.flags,
        )
        == moment.code
    )
    log = (tmp_path / "log").read_text()
    assert "Traceback" not in log
    assert "the same command goes on" in log
    pointer = run_dir / "checkpoints" / "latest"
    saved = int(pointer.read_text().strip().removeprefix("step_")) if pointer.exists() else 0
    assert saved in (moment.saved if isinstance(moment.saved, tuple) else (moment.saved,))
    assert (f"saved after step {saved};" if pointer.exists() else "no step is saved yet;") in log
    assert train(config, run_dir) == 0, (tmp_path / "log").read_text()
    is_equal = digest_run(run_dir) == unbroken[moment.algorithm]
    figure(f"{int(is_equal)} of 1 interrupted runs equal the unbroken one bitwise")
    assert is_equal


@pytest.mark.sample(
    "while weights are loaded", "while the ledger is opened", "before the configuration is kept", seconds=1.2
)
@pytest.mark.parametrize("moment", STARTS.values(), ids=STARTS.keys())
def test_a_run_that_is_told_to_end_while_it_starts(
    world: World, tmp_path: Path, unbroken: dict[str, dict[str, str]], moment: tuple[str, int, int]
) -> None:
    place, number, code = moment
    config = world.config("grpo", tmp_path, {"compute": {}} if "threads" in place else None)
    owner, name = named(place)

    assert train(config, tmp_path / "cut", lambda: kill_at(owner, name, 1, signals=(number,))) == code
    said = (tmp_path / "log").read_text()
    assert f"{signal.Signals(number).name} ended it; " in said
    assert "Traceback" not in said
    has_begun = name == "restore"
    assert ("no step is saved yet; " if has_begun else "nothing was begun; ") in said
    assert (tmp_path / "cut").exists() == has_begun
    if has_begun:
        assert train(config, tmp_path / "cut") == 0
        assert digest_run(tmp_path / "cut") == unbroken["grpo"]


@pytest.mark.sample("train", seconds=1.4)
@pytest.mark.parametrize("command", ["train", "eval"])
def test_it_hears_signals_while_torch_is_imported(world: World, tmp_path: Path, command: str) -> None:
    """A process gets SIGTERM while it imports torch, and ends with code 75."""
    config = world.config("grpo", tmp_path)
    log = (tmp_path / "log").open("wb")
    process = subprocess.Popen([sys.executable, "-m", "oat", command, str(config)], stdout=log, stderr=log)
    try:
        maps = Path(f"/proc/{process.pid}/maps")
        while process.poll() is None and "libtorch" not in maps.read_text():
            time.sleep(0.005)
        process.terminate()
        assert process.wait(60) == 75
    finally:
        process.kill()
        log.close()
    log_text = (tmp_path / "log").read_text()
    assert "Traceback" not in log_text
    assert ANEW[command] in log_text
    assert not (tmp_path / "grpo").exists()


WITHIN_C = """
import signal, sys
from oat.cli import main

within = False

def seen(frame, event, called):
    global within
    if event == "c_call" and called.__name__ == "_c10d_init":
        within = True
    elif event == "call" and within:
        sys.setprofile(None)
        signal.raise_signal(signal.SIGTERM)

sys.setprofile(seen)
sys.exit(main(sys.argv[1:]))
"""
"""A program that sends itself a signal during `import torch`, in Python code that torch's C++ calls. An
exception cannot pass through C++, and would abort the process."""


ANEW = {
    "train": "nothing was begun; give the same command again",
    "eval": "the same command begins anew",
}


@pytest.mark.slow(instead="test_it_hears_signals_while_torch_is_imported", seconds=3.1)
@pytest.mark.parametrize(("command", "how"), ANEW.items())
def test_a_signal_within_the_import_of_torch_aborts_nothing(
    world: World, tmp_path: Path, command: str, how: str
) -> None:
    config = world.config("grpo", tmp_path)
    loaded = config if command == "eval" else world.folder / "model"
    ended = subprocess.run(
        [sys.executable, "-c", WITHIN_C, command, str(config)], capture_output=True, text=True, timeout=120
    )
    assert (ended.returncode, ended.stderr) == (
        75,
        f"oat {command}: loading torch and {loaded} ...\noat {command}: SIGTERM ended it; {how}\n",
    )
    assert not (tmp_path / "grpo").exists()


def test_a_row_that_was_left_open_is_written_once(
    world: World, tmp_path: Path, unbroken: dict[str, dict[str, str]]
) -> None:
    """A run gets SIGTERM while it learns, and ends with a checkpoint and without the row of that step.
    Continued, it writes the row and is killed before the next checkpoint. Continued again, it has the row
    once."""
    config, run_dir = world.config("dpo", tmp_path), tmp_path / "run"
    assert (
        train(
            config,
            run_dir,
            lambda: kill_at(*named("oat.learner.learner:Learner.update"), 1, signals=(signal.SIGTERM,)),
        )
        == 75
    )
    assert (run_dir / "checkpoints" / "latest").read_text() == "step_00000001\n"
    assert (
        train(config, run_dir, lambda: kill_at(*named("oat.learner.learner:Learner.update"), 1))
        == -signal.SIGKILL
    )
    assert train(config, run_dir) == 0
    steps = [json.loads(line)["step"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(5))
    assert digest_run(run_dir) == unbroken["dpo"]


def test_what_is_being_written_is_on_disk_when_the_process_ends(
    world: World, tmp_path: Path, unbroken: dict[str, dict[str, str]]
) -> None:
    """SIGTERM comes while a slow disk writes a checkpoint. The process ends only after the checkpoint is on
    disk."""
    config, run_dir = world.config("grpo", tmp_path), tmp_path / "run"

    def slow() -> None:
        from oat.rundir.checkpoints import Checkpoints

        publish = Checkpoints._publish

        def late(self: Checkpoints, new: Path, step: int) -> Path:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.3)
            return publish(self, new, step)

        Checkpoints._publish = late  # type: ignore[method-assign]

    assert train(config, run_dir, slow, OFTEN) == 75
    saved = (run_dir / "checkpoints" / "latest").read_text().strip()
    assert saved in ("step_00000001", "step_00000002")
    assert verify(run_dir / "checkpoints" / saved) is None
    assert not list((run_dir / "checkpoints").glob(".new-*"))
    assert train(config, run_dir) == 0
    assert digest_run(run_dir) == unbroken["grpo"]


def test_ctrl_c_again_does_not_cut_off_what_is_being_written(
    world: World, tmp_path: Path, unbroken: dict[str, dict[str, str]]
) -> None:
    """The run gets SIGTERM, and Ctrl-C twice while a slow disk writes the last checkpoint. The run keeps its
    directory locked until the checkpoint is written."""
    config, run_dir = world.config("grpo", tmp_path), tmp_path / "run"

    def slow() -> None:
        from oat.rundir.checkpoints import Checkpoints

        publish = Checkpoints._publish

        def late(self: Checkpoints, new: Path, step: int) -> Path:
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.3)
            with (run_dir / "lock").open("a") as file, pytest.raises(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return publish(self, new, step)

        Checkpoints._publish = late  # type: ignore[method-assign]
        kill_at(*named("oat.learner.learner:Learner.update"), 1, signals=(signal.SIGINT,))

    assert train(config, run_dir, slow, ("--checkpoint.every", "9")) == 130, (tmp_path / "log").read_text()
    assert (run_dir / "checkpoints" / "latest").read_text() == "step_00000001\n"
    assert verify(run_dir / "checkpoints" / "step_00000001") is None
    assert train(config, run_dir) == 0
    assert digest_run(run_dir) == unbroken["grpo"]


def test_signals_are_heard_within_only() -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    interruption = Interruption()
    with interruption.heard():
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(Interrupted) as end, interruption.at_once():
            raise AssertionError("it was asked to end before this")
        assert (end.value.name, end.value.exit_code) == ("SIGTERM", 75)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def test_another_thread_hears_nothing_and_takes_nothing() -> None:
    before, found = signal.getsignal(signal.SIGTERM), []

    def elsewhere() -> None:
        with Interruption().heard():
            found.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert found == [before]


@pytest.mark.parametrize("while_it_asks", [False, True])
def test_a_process_that_users_code_forks_ends_by_sigterm(while_it_asks: bool) -> None:
    """A child that user code forks ends at once by SIGTERM: a pool that ends its workers sends SIGTERM and
    waits."""
    told = Interruption()
    reads, writes = os.pipe()
    with told.heard(), told.at_once() if while_it_asks else nullcontext():
        child = os.fork()
        if child == 0:
            try:
                os.write(writes, b"x")
                time.sleep(20)
            finally:
                os._exit(1)
        os.read(reads, 1)
        os.kill(child, signal.SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
    os.close(reads)
    os.close(writes)
