"""`oat actors`: actors are added and taken away while a run works, and it learns the same."""

import signal
import time
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import pytest
from apart_runs import ON_RAY, pair
from fixtures import Finished, World, oat
from planned_kills import Kill, StruckMachine
from ray_runs import RayStrikes, gone

from oat.assemble.apart import Processes
from oat.commands.digest import digest_run
from oat.errors import ConfigError
from oat.runtime.pool import ActorPool
from oat.runtime.wanted import Wanted, want

CHANGES: dict[str, Any] = {
    "engine.deterministic": True,
    "engine.threads": 1,
    "stop.max_steps": 24,
    "evaluation.every": 12,
    "checkpoint.every": 12,
}
APART: dict[str, Any] = {"compute.runtime": "processes", "compute.actors": 2}


class Asking:
    """Runs `oat actors` at some calls for samples, and notes how many actors then sample.

    Args:
        start_s: longest wait before a call for the added actors; 0: they come when they are ready.
    """

    def __init__(
        self,
        run_dir: Path,
        plan: dict[int, int | None],
        monkeypatch: pytest.MonkeyPatch,
        start_s: float = 0.0,
    ):
        self.counts: list[int] = []
        sample = ActorPool.sample

        def noted(pool: ActorPool, *arguments: Any) -> Any:
            if len(self.counts) in plan:
                number = plan[len(self.counts)]
                assert oat("actors", run_dir, *([] if number is None else [number])) == 0
            wait(pool._coming.values(), start_s) if start_s else time.sleep(0.1)
            found = sample(pool, *arguments)
            self.counts.append(len(pool.crew.members))
            return found

        monkeypatch.setattr(ActorPool, "sample", noted)


def train(world: World, folder: Path, name: str, **changes: Any) -> int:
    own = {**CHANGES, **changes, "run_dir": str(folder / name)}
    return oat("train", world.config("grpo", folder, own))


def test_actors_come_and_go(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(world, tmp_path, "local") == 0
    monkeypatch.setattr("oat.assemble.apart.Machine", machine := StruckMachine([Kill("sample", 20)]))
    asking = Asking(tmp_path / "apart", {2: None, 4: 4, 16: 1, 20: None, 22: 2}, monkeypatch)
    assert train(world, tmp_path, "apart", **APART) == 0
    assert asking.counts[0] == 2
    assert max(asking.counts) == 4
    assert asking.counts[17] == 1
    assert asking.counts[-1] == 2
    assert machine.killed
    assert digest_run(tmp_path / "apart") == digest_run(tmp_path / "local")
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("the run shall")]
    assert [line.split()[5] for line in said] == ["2", "4", "1", "1", "2"]
    assert said[0] == (
        "the run shall sample with 2 actors; when the run is continued, it begins with compute.actors (2)"
    )


@pytest.mark.slow
@pytest.mark.parametrize("first", [1, 2])
def test_actors_come_and_go_on_ray(
    first: int, finished: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strikes: RayStrikes
) -> None:
    """On a real cluster, a run gets one more actor while it works, and then only one stays."""
    run = pair(finished, "grpo", tmp_path, {}, {**ON_RAY, "compute.actors": first})
    asking = Asking(run.run_dir, {2: first + 1, 6: 1}, monkeypatch, start_s=300.0)
    further, close = run.run_dir / "logs" / f"actor-{first}.log", Processes.close
    has_log, stay = [], list[str]()

    def ending(processes: Processes) -> None:
        names = [f"actor {number}" for number in range(first + 1)]
        gone(lambda: any(map(strikes.worker, names[1:])), 10.0)
        stay.extend(filter(strikes.worker, names))
        close(processes)

    monkeypatch.setattr(Processes, "close", ending)
    strikes.doing["sample", 0] = lambda: has_log.append(further.exists())
    assert run.train() == 0
    assert asking.counts[:7] == [first, first, first, *[first + 1] * 3, 1]
    assert {*asking.counts[6:]} == {1}
    assert (has_log, stay) == ([False], ["actor 0"])
    assert " process " in further.read_text().splitlines()[0]
    assert run.is_equal
    assert (strikes.left(), strikes.files_left()) == ([], [])


def test_an_actor_that_cannot_be_started_is_not_used(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("oat.assemble.apart.Machine", StruckMachine([Kill("make", 2)]))
    asking = Asking(tmp_path / "apart", {4: 3}, monkeypatch)
    with pytest.warns(
        UserWarning, match="ended in the call `(prepare|make)` .*; the run goes on with 2 of 3 actors"
    ):
        assert train(world, tmp_path, "apart", **APART) == 0
    assert {*asking.counts} == {2}


def test_more_actors_than_there_is_room_for(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many are started as there is room for. The run says so once, goes on, and ends."""
    monkeypatch.setattr("oat.assemble.apart.Machine", machine := StruckMachine(most=3))
    asking = Asking(tmp_path / "apart", {4: 9, 14: 1}, monkeypatch)
    with pytest.warns(UserWarning, match="no room for more actors; the run goes on with 3 of 9") as said:
        assert train(world, tmp_path, "apart", **APART) == 0
    assert len([each for each in said if "no room" in str(each.message)]) == 1
    assert max(asking.counts) == 3
    assert asking.counts[-1] == 1
    assert not machine.left()


def test_actors_that_are_not_ready_are_no_longer_wanted(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An added actor that hangs while it starts holds neither the run nor its end."""
    hangs = Kill("make", 2, signal=signal.SIGSTOP)
    monkeypatch.setattr("oat.assemble.apart.Machine", machine := StruckMachine([hangs], deadline_s=300.0))
    asking = Asking(tmp_path / "apart", {4: 3, 8: 2}, monkeypatch)
    assert train(world, tmp_path, "apart", **APART) == 0
    assert {*asking.counts} == {2}
    assert not machine.left()


@pytest.mark.parametrize("text", ["0", "-5", "", "many"])
def test_a_number_that_is_none(text: str, tmp_path: Path) -> None:
    wanted = Wanted(tmp_path, 2)
    (tmp_path / "actors").write_text(text)
    assert wanted() == (1 if text in ("0", "-5") else 2)


def test_a_run_in_which_no_process_works(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("oat.assemble.apart.Machine", StruckMachine())
    assert train(world, tmp_path, "apart", **APART, **{"stop.max_steps": 1}) == 0
    assert oat("actors", tmp_path / "apart", 2) == 2
    assert "no process works in this run" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("run", "number", "said"),
    [
        ("nothing", 2, "holds no run"),
        ("local", 2, "this run samples in its own process"),
    ],
)
def test_a_run_whose_actors_cannot_change(
    run: str, number: int, said: str, world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(world, tmp_path, "local", **{"stop.max_steps": 1}) == 0
    assert oat("actors", tmp_path / run, number) == 2
    assert said in capsys.readouterr().err


def test_no_actor_at_all(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="at least one actor"):
        want(tmp_path, 0)
