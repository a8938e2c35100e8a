"""A run that an alarm rolls back is killed, or is signalled to end, at a named moment. Continued by the same
command, it is bitwise the unbroken run."""

import functools
import json
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from fixtures import World, forked, kill_at, named, oat, tried
from flat_steps import flat_steps

from oat.commands.digest import digest_run

KILL, TERM = (signal.SIGKILL,), (signal.SIGTERM,)
AHEAD = ("--oracle.max_outstanding", "5", "--learner.sync_every", "2")
WIRE = ("--compute.serialise", "true")


@dataclass(frozen=True)
class Moment:
    """The moment when a run gets signals: before or after call number `call` (from 1) of `place`,
    "module:owner.name". The rewards of steps 4 and 7 have no variance, so the run rolls back after 5 and 8
    updates. Every second step has a checkpoint, and row 5 an evaluation."""

    place: str
    call: int
    after: bool = False
    signals: tuple[int, ...] = KILL
    algorithm: str = "grpo"
    flags: tuple[str, ...] = ()


MOMENTS = {
    "before the start is saved": Moment("a checkpoint is published", 1),
    "the start saved, no row written": Moment("oat.tracking.files:Tracking.row", 1),
    "before the alarm is raised": Moment("oat.loop:react_to_alarms", 5),
    "raised, nothing taken back": Moment("oat.loop:load_states", 1),
    "taken back, the sampler not": Moment("oat.runtime.weights:Weights.load", 6),
    "the sampler too, the row not evaluated": Moment("oat.runtime.weights:Weights.load", 6, after=True),
    "in the row's evaluation": Moment("an evaluation samples", 3),
    "the row not written": Moment("oat.tracking.files:Tracking.row", 6),
    "the row written, no checkpoint behind it": Moment("oat.learner.learner:Learner.update", 6),
    "before the next checkpoint is published": Moment("a checkpoint is published", 4),
    "the next checkpoint published, older ones not removed": Moment("old checkpoints are removed", 4),
    "after the second roll back": Moment("oat.loop:react_to_alarms", 8, after=True),
    "told to end between two checkpoints, before the alarm": Moment(
        "oat.collector:Collector.fill", 4, signals=TERM
    ),
    "told to end while the alarm is raised": Moment("oat.loop:load_states", 1, signals=TERM),
    "told to end in the row's evaluation": Moment("an evaluation samples", 3, signals=TERM),
    "told to end in the step after it": Moment("oat.collector:Collector.fill", 6, signals=TERM),
    "with a lagging copy of the weights": Moment(
        "oat.learner.learner:Learner.update", 6, algorithm="dpo", flags=AHEAD
    ),
    "told to end, with a lagging copy": Moment(
        "oat.collector:Collector.fill", 8, signals=TERM, algorithm="dpo", flags=AHEAD
    ),
    "over the wire": Moment("oat.loop:load_states", 1, after=True, flags=WIRE),
}


def train(world: World, folder: Path, moment: Moment, before: Callable[[], None] | None = None) -> int:
    changes = {
        **flat_steps(world.folder, {4, 7}, patience=1, action="roll_back"),
        "checkpoint": {"every": 2, "keep_last": 1},
        "evaluation.every": 5,
        "stop.max_steps": 9,
    }
    config = world.config(moment.algorithm, folder, changes)

    return tried(folder / "log", "train", config, "--run_dir", folder / "run", *moment.flags, before=before)


@pytest.fixture(scope="module")
def unbroken(world: World, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Moment], dict[str, str]]:
    """Return a function that gives the digest of the run without signals, for a moment's algorithm and flags.
    Each run is made once."""
    import oat.assemble.run  # noqa: F401 (so that children start warm)

    found: dict[Any, dict[str, str]] = {}

    def make(moment: Moment) -> dict[str, str]:
        if (moment.algorithm, moment.flags) not in found:
            folder = tmp_path_factory.mktemp("unbroken")
            assert train(world, folder, moment) == 0, (folder / "log").read_text()
            rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
            assert [row["step"] for row in rows[1:] if row["alarms/rolled_back"]] == [5, 8]
            found[moment.algorithm, moment.flags] = digest_run(folder / "run")
        return found[moment.algorithm, moment.flags]

    return make


@pytest.mark.slow(instead="test_a_rolled_back_run_that_is_cut_off_is_the_unbroken_run", seconds=7.7)
@pytest.mark.parametrize("is_gone", [False, True])
def test_a_damaged_checkpoint_is_passed_over_alike_however_the_run_is_cut_off(
    world: World, tmp_path: Path, is_gone: bool
) -> None:
    """The rewards of steps 4 and 6 have no variance, and the checkpoint of step 2 is damaged or missing. So
    each of the two roll backs leads to step 0, and the checkpoint of step 0 is kept until the second one."""
    changes = {
        **flat_steps(tmp_path, {4, 6}, patience=1, action="roll_back"),
        "checkpoint": {"every": 2, "keep_last": 5},
        "evaluation": None,
    }
    config, begun = world.config("grpo", tmp_path, {**changes, "stop.max_steps": 8}), tmp_path / "begun"
    fewer = ("--checkpoint.keep_last", "1")  # from here on nothing but the roll back needs an old one

    def go_on(run_dir: Path, before: Callable[[], None] = lambda: None) -> int:
        before()
        return oat("train", config, "--run_dir", run_dir, *fewer)

    assert (
        forked(lambda: oat("train", config, "--run_dir", begun, "--stop.max_steps", "4"), tmp_path / "log")
        == 0
    )
    damaged = begun / "checkpoints" / "step_00000002"
    if is_gone:
        shutil.rmtree(damaged)
    else:
        (damaged / "tensors.safetensors").write_bytes((damaged / "tensors.safetensors").read_bytes()[:-1])
    shutil.copytree(begun, tmp_path / "unbroken")
    with pytest.warns(
        UserWarning, match=r"step_00000002: .*; trying|none of step 2; trying the checkpoint before it"
    ):
        assert go_on(tmp_path / "unbroken") == 0
    rows = [json.loads(line) for line in (tmp_path / "unbroken" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows[1:] if row["alarms/rolled_back"]] == [5, 7]
    assert [row["optim/steps"] for row in rows[1:]] == [1, 2, 3, 4, 5, 1, 2, 1]
    expected = digest_run(tmp_path / "unbroken")
    for place, call in (
        ("oat.loop:load_states", 2),
        ("oat.tracking.files:Tracking.row", 1),
        ("old checkpoints are removed", 1),
        ("oat.loop:react_to_alarms", 4),
    ):
        run_dir = tmp_path / f"killed at {place}"
        kill = functools.partial(kill_at, *named(place), call)
        log = tmp_path / "log"
        shutil.copytree(begun, run_dir)
        assert forked(functools.partial(go_on, run_dir, kill), log) == -signal.SIGKILL, log.read_text()
        assert forked(functools.partial(go_on, run_dir), log) == 0, log.read_text()
        assert digest_run(run_dir) == expected


@pytest.mark.sample("before the next checkpoint is published", seconds=11.6)
@pytest.mark.parametrize("moment", MOMENTS.values(), ids=MOMENTS)
def test_a_rolled_back_run_that_is_cut_off_is_the_unbroken_run(
    world: World, tmp_path: Path, unbroken: Any, moment: Moment
) -> None:
    code = train(
        world,
        tmp_path,
        moment,
        lambda: kill_at(*named(moment.place), moment.call, after=moment.after, signals=moment.signals),
    )
    assert code == (75 if moment.signals == TERM else -signal.SIGKILL), (tmp_path / "log").read_text()
    assert train(world, tmp_path, moment) == 0, (tmp_path / "log").read_text()
    assert digest_run(tmp_path / "run") == unbroken(moment)
