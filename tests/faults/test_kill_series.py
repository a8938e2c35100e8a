"""R1: runs of 60 steps, each killed once with SIGKILL and continued by the same command. Each must be bitwise
the unbroken run.

There are three series of a hundred kills:

- synchronous;
- with a sampler that holds a copy of the weights and lags behind the policy;
- with late answers, whose times are random in each process; DPO asks its questions ahead.

Half of the kills are at named points, at different calls of each point. The other half are at times that are
spread evenly over the run. One kill in ten is of a process from a cold shell. The number of a kill decides
where and when it happens.
"""

import importlib
import json
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from fixtures import World, counting, forked, kill_at, named, oat
from kills import books, cold, killed_in_time

from oat.commands.digest import digest_run

STEPS, KILLS = 60, 100
CHANGES = {
    "stop.max_steps": STEPS,
    "checkpoint.every": 6,
    "evaluation.every": 10,
    "engine": {"name": "torch", "threads": 1},
}
SERIES = ["synchronous", "copied sampler", "late answers"]


@dataclass(frozen=True)
class Point:
    """A point of a kill: before or after a call of `place`, which is written "module:owner.name"."""

    place: str
    after: bool = False


POINTS = {
    "intents on disk, nothing sent": Point("oat.ledger.outstanding:Outstanding.submit"),
    "inside an answer batch": Point("oat.ledger.store:Store.add_answers", after=True),
    "inside a save": Point("safetensors.torch:save_file", after=True),
    "saved, before the pointer": Point("the newest checkpoint is named"),
    "in a weight sync": Point("oat.engines.torch:TorchEngine.load", after=True),
    "in an evaluation": Point("an evaluation samples"),
}
AT_EACH = -(-KILLS // 2 // len(POINTS))
"""The largest number of kills of a series at one point."""


@dataclass(frozen=True)
class Kill:
    """One kill of a series.

    Attributes:
        point: the name of the point; None: the kill is at a time.
        share: the fraction of the point's calls, or of the run's time, before the kill.
    """

    series: str
    algorithm: str
    point: str | None
    share: float
    is_cold: bool

    @classmethod
    def of(cls, series: str, number: int) -> "Kill":
        drawn, half = random.Random(f"{series} {number}").random(), number // 2
        if number % 2:
            return cls(series, ("dpo", "grpo")[half % 2], None, drawn, is_cold=number % 10 == 9)
        round, place = divmod(half, len(POINTS))
        point = list(POINTS)[(place + 3 * SERIES.index(series)) % len(POINTS)]
        return cls(series, ("dpo", "grpo")[round % 2], point, (round + drawn) / AT_EACH, is_cold=False)


@dataclass(frozen=True)
class Whole:
    """The unbroken run.

    Attributes:
        calls: calls of each point.
        seconds: duration of the run in a forked child.
    """

    digest: dict[str, str]
    accounts: list[list[str]]
    calls: dict[str, int]
    seconds: float


def config_of(world: World, folder: Path, series: str, algorithm: str) -> Path:
    late = {"oracle.name": world.late, "oracle.max_outstanding": 9 if algorithm == "dpo" else 0}
    own = {"synchronous": {}, "copied sampler": {"learner.sync_every": 2}, "late answers": late}[series]
    return world.config(algorithm, folder, {**CHANGES, **own})


@pytest.fixture(scope="module")
def wholes(world: World, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Whole]:
    """Return a function that gives the unbroken run of a series and an algorithm. Each run is made once."""
    importlib.import_module("oat.assemble.run")  # so that children start warm
    found: dict[tuple[str, str], Whole] = {}

    def make(series: str, algorithm: str) -> Whole:
        if (series, algorithm) not in found:
            folder = tmp_path_factory.mktemp("whole")
            config = config_of(world, folder, series, algorithm)

            def counted() -> int:
                counts = {name: counting(*named(point.place)) for name, point in POINTS.items()}
                code = oat("train", config, "--run_dir", folder / "run")
                (folder / "calls").write_text(json.dumps({name: count() for name, count in counts.items()}))
                return code

            began = time.monotonic()
            assert forked(counted, folder / "log") == 0, (folder / "log").read_text()
            seconds, calls = time.monotonic() - began, json.loads((folder / "calls").read_text())
            found[series, algorithm] = Whole(
                digest_run(folder / "run"),
                books(folder / "run", folder / "copy", STEPS).accounts,
                calls,
                seconds,
            )
        return found[series, algorithm]

    return make


def die(kill: Kill, config: Path, run_dir: Path, whole: Whole) -> None:
    """Train until the kill."""
    log = run_dir.parent / "log"
    if kill.is_cold:
        killed_in_time(lambda seconds: cold(config, run_dir, seconds), run_dir, kill.share * whole.seconds)
    elif kill.point is None:
        killed_in_time(
            lambda seconds: forked(
                lambda: oat("train", config, "--run_dir", run_dir), log, kill_after_s=seconds
            ),
            run_dir,
            kill.share * whole.seconds,
        )
    else:
        point, call = POINTS[kill.point], 1 + int(kill.share * whole.calls[kill.point])

        def armed() -> int:
            kill_at(*named(point.place), call, after=point.after)
            return oat("train", config, "--run_dir", run_dir)

        assert forked(armed, log) == -signal.SIGKILL, log.read_text()


@pytest.mark.large
@pytest.mark.fault("R1")
@pytest.mark.parametrize("number", range(KILLS))
@pytest.mark.parametrize("series", SERIES)
def test_a_run_of_60_steps_killed_once(
    world: World,
    tmp_path: Path,
    wholes: Callable[[str, str], Whole],
    figure: Callable[[str], None],
    series: str,
    number: int,
) -> None:
    kill = Kill.of(series, number)
    run_dir = tmp_path / "run"
    log = tmp_path / "log"
    whole, config = wholes(series, kill.algorithm), config_of(world, tmp_path, series, kill.algorithm)
    die(kill, config, run_dir, whole)
    before = books(run_dir, tmp_path / "before", STEPS)
    code = (
        cold(config, run_dir)
        if kill.is_cold
        else forked(lambda: oat("train", config, "--run_dir", run_dir), log)
    )
    assert code == 0, log.read_text()
    after = books(run_dir, tmp_path / "after", STEPS)

    is_equal = digest_run(run_dir) == whole.digest and after.accounts == whole.accounts
    lost = sum(after.answers.get(key) != answer for key, answer in before.answers.items())
    twice = len(after.trained) - len(set(after.trained))
    figure(f"{int(is_equal)} of 1 killed runs equal the unbroken one bitwise, {series}")
    figure(f"{lost:,} of {len(before.answers):,} answers lost")
    figure(f"{after.again:,} of {len(before.in_flight):,} questions in flight asked once more, and no other")
    figure(f"{twice:,} of {len(after.trained):,} questions trained twice")
    assert is_equal
    assert (lost, twice, after.in_flight) == (0, 0, set())
    assert after.again == len(before.in_flight)


def test_the_kills_are_spread() -> None:
    """Each point has at least five kills, at calls far apart. The times cover the run. One kill in ten is of
    a cold process."""
    for series in SERIES:
        kills = [Kill.of(series, number) for number in range(KILLS)]
        for point in POINTS:
            shares = sorted(kill.share for kill in kills if kill.point == point)
            assert len(shares) >= 5
            assert len({int(share * AT_EACH) for share in shares}) == len(shares)
            assert {kill.algorithm for kill in kills if kill.point == point} == {"dpo", "grpo"}
        moments = sorted(kill.share for kill in kills if kill.point is None)
        assert len(moments) == KILLS // 2
        assert moments[0] < 0.1
        assert moments[-1] > 0.9
        assert sum(kill.is_cold for kill in kills) == KILLS // 10
