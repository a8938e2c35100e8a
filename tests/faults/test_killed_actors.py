"""R15: actors are killed at random moments, and at every bucket of new weights. No rollout is lost or learned
twice, and the run ends bitwise equal to the local one."""

import signal
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from apart_runs import RUNS, Pair, pair
from fixtures import Finished, forked, kill_at
from planned_kills import Kill, StruckMachine, drawn_kills

from oat.runtime.pool import PoolInbox
from oat.runtime.transfer import buckets

KILLS = 3
"""Kills of a case, each in a run of its own."""
PARTS = 6

pytestmark = pytest.mark.fault("R15")


def calls_of(name: str, finished: Finished, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Return how many calls of each name a run makes whose actors nobody kills."""
    monkeypatch.setattr("oat.assemble.apart.Machine", machine := StruckMachine())
    whole = pair(finished, name, folder, {})
    assert whole.train() == 0
    assert whole.is_equal
    return machine.calls


@pytest.mark.slow(instead="tests/runtime/test_lost_actors.py::test_a_killed_actor_is_replaced", seconds=10.8)
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("name", RUNS)
def test_an_actor_killed_at_any_moment(
    name: str,
    part: int,
    finished: Finished,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    figure: Callable[[str], None],
) -> None:
    calls = calls_of(name, finished, tmp_path / "whole", monkeypatch)
    assert {*calls} >= {"prepare", "make", "begin", "put", "commit", "sample", "work"}
    kills = drawn_kills(name, calls, PARTS * KILLS)[part * KILLS : (part + 1) * KILLS]
    for number, kill in enumerate(kills):
        monkeypatch.setattr("oat.assemble.apart.Machine", machine := StruckMachine([kill]))
        run = pair(finished, name, tmp_path / f"{number}", {})
        assert run.train() == 0, kill
        assert machine.killed == [kill]
        figure(f"{machine.hits} of 1 planned kills met an actor that was there")
        figure(
            f"{int(run.is_equal)} of 1 runs equal the local one bitwise, an actor killed at a random moment"
        )
        assert run.is_equal, kill
        run.note_books(tmp_path / f"{number}", figure)


@pytest.fixture
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each bucket has one or two tensors of a tiny model."""
    monkeypatch.setattr(buckets, "__defaults__", (1500,))


@pytest.mark.slow(instead="its other kills of actors", seconds=30)
@pytest.mark.usefixtures("small_buckets")
def test_an_actor_killed_at_each_bucket(
    finished: Finished,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    figure: Callable[[str], None],
) -> None:
    calls = calls_of("grpo", finished, tmp_path / "whole", monkeypatch)
    count = calls["put"] // calls["commit"]
    assert count > 5
    for bucket in range(count):
        kill = Kill("put", 2 * (2 * count + bucket) + bucket % 2)
        monkeypatch.setattr("oat.assemble.apart.Machine", machine := StruckMachine([kill]))
        run = pair(finished, "grpo", tmp_path / f"{bucket}", {})
        assert run.train() == 0, kill
        assert machine.killed == [kill]
        figure(f"{int(run.is_equal)} of 1 runs equal the local one bitwise, an actor killed at a bucket")
        assert run.is_equal, kill


def torn(run: Pair, put: int) -> int:
    """Begin a run that is killed before the bucket with this number, from 1."""
    kill_at(PoolInbox, "put", put)
    return run.train()


@pytest.mark.slow(instead="its other kills of actors", seconds=30)
@pytest.mark.usefixtures("small_buckets")
def test_a_run_killed_at_each_bucket(
    finished: Finished,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    figure: Callable[[str], None],
) -> None:
    """The run's own process is killed between two buckets, then the same command."""
    calls = calls_of("a lagging sampler", finished, tmp_path / "whole", monkeypatch)
    count = calls["put"] // calls["commit"]
    monkeypatch.setattr("oat.assemble.apart.Machine", StruckMachine())
    for bucket in range(count):
        run = pair(finished, "a lagging sampler", tmp_path / f"{bucket}", {})
        assert forked(partial(torn, run, count + bucket + 1), tmp_path / "log") == -signal.SIGKILL, (
            tmp_path / "log"
        ).read_text()
        assert run.train() == 0
        figure(f"{int(run.is_equal)} of 1 runs killed between two buckets equal the local one bitwise")
        assert run.is_equal
        run.note_books(tmp_path / f"{bucket}", figure)
