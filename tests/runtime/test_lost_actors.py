"""Actors in processes of their own: they are replaced when they are lost, and the run is the local one."""

import os
import signal
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fixtures import World, oat
from planned_kills import Kill, StruckMachine

from oat.algorithms.group import GRPO
from oat.assemble.actor_side import ActorWorker
from oat.commands.digest import digest_run
from oat.errors import ConfigError
from oat.runtime.pool import ActorPool
from oat.runtime.transfer import Inbox
from oat.runtime.worker import versions
from oat.runtime.worker_group import Restarts, WorkerGroup
from oat.trainer import Trainer
from oat.types import Receipt, Trajectory

CHANGES: dict[str, Any] = {"engine.deterministic": True, "engine.threads": 1, "stop.max_steps": 6}
APART: dict[str, Any] = {"compute.runtime": "processes", "compute.actors": 2}
ENSEMBLE = {"explorer": {"name": "ensemble", "samples": 4, "ensemble": {"members": 2, "hidden": 4}}}
Code = int


def train(
    world: World,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    machine: StruckMachine | None,
    algorithm: str = "grpo",
    **changes: Any,
) -> Code:
    """Train in `folder`; with a machine, on two actors."""
    folder.mkdir(exist_ok=True)
    if machine is not None:
        monkeypatch.setattr("oat.assemble.apart.Machine", machine)
        changes = {**APART, **{name.replace("__", "."): value for name, value in changes.items()}}
    shared = ENSEMBLE if algorithm == "dpo" else {}
    return oat(
        "train",
        world.config(algorithm, folder, {**CHANGES, **shared, **changes, "run_dir": str(folder / "run")}),
    )


@pytest.fixture(scope="module")
def local(world: World, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    """The digests of the local runs, by algorithm."""
    found = {}
    for algorithm in ("grpo", "dpo"):
        folder = tmp_path_factory.mktemp(algorithm)
        assert train(world, folder, pytest.MonkeyPatch(), None, algorithm) == 0
        found[algorithm] = digest_run(folder / "run")
    return found


KILLS = [
    ("grpo", Kill("prepare", 1)),
    ("grpo", Kill("make", 0)),
    ("grpo", Kill("begin", 3)),
    ("grpo", Kill("put", 8)),
    ("grpo", Kill("commit", 5)),
    ("grpo", Kill("sample", 0)),
    ("grpo", Kill("sample", 9, 0.005)),
    ("grpo", Kill("work", 4)),
    ("dpo", Kill("score", 3)),
    ("dpo", Kill("commit", 2, 0.001)),
]


@pytest.mark.inventory(124)
@pytest.mark.sample("dpo-kill8", seconds=9.8)
@pytest.mark.parametrize(("algorithm", "kill"), KILLS)
def test_a_killed_actor_is_replaced(
    algorithm: str, kill: Kill, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, local: Any
) -> None:
    machine = StruckMachine([kill])
    with pytest.warns(UserWarning, match="it is replaced"):
        assert train(world, tmp_path, monkeypatch, machine, algorithm) == 0
    assert machine.killed == [kill]
    assert digest_run(tmp_path / "run") == local[algorithm]


def test_a_standby_takes_the_place(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, local: Any
) -> None:
    """It is there before the kill, and another standby is started for it."""
    machine = StruckMachine([Kill("sample", 7)])
    assert train(world, tmp_path, monkeypatch, machine, compute__standby=1) == 0
    assert [remote.name for remote in machine.remotes] == ["actor 0", "actor 1", "actor 2", "actor 3"]
    assert digest_run(tmp_path / "run") == local["grpo"]


def test_the_work_of_a_lost_actor_stays_counted(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, work = [], ActorPool.work
    monkeypatch.setattr(ActorPool, "work", lambda pool: found.append(work(pool)) or found[-1])
    assert train(world, tmp_path, monkeypatch, StruckMachine([Kill("sample", 9)]), compute__actors=1) == 0
    keys = [each.keys for each in found]
    assert keys == sorted(keys)
    assert keys[0] < keys[-1]


def test_a_run_ends_when_no_process_may_be_replaced_any_more(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, local: Any
) -> None:
    """It has saved its state, and says who is lost. The same command continues it."""
    machine = StruckMachine([Kill("sample", 7), Kill("sample", 9)])
    assert train(world, tmp_path, monkeypatch, machine, compute__max_restarts=1) == 1
    said = capsys.readouterr().err.strip().splitlines()
    assert (
        "has ended in the call `sample` (it was ended by SIGKILL); compute.max_restarts (1) allows no further"
        in said[-1]
    )
    assert not machine.left()
    saved = sorted((tmp_path / "run" / "checkpoints").glob("step_*"))
    assert train(world, tmp_path, monkeypatch, StruckMachine()) == 0
    assert saved
    assert digest_run(tmp_path / "run") == local["grpo"]


@pytest.mark.sample("sample", seconds=5)
@pytest.mark.parametrize("what", ["prepare", "make", "put", "commit", "sample", "work"])
def test_an_actor_that_hangs_is_named_and_replaced(
    what: str, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, local: Any
) -> None:
    machine = StruckMachine([Kill(what, 1, signal=signal.SIGSTOP)], deadline_s=10.0)
    waits = "begin|put|commit" if what in ("put", "commit") else what  # earlier ones may not be answered yet
    with pytest.warns(UserWarning, match=f"actor . has not answered the call `({waits})`"):
        assert train(world, tmp_path, monkeypatch, machine) == 0
    assert digest_run(tmp_path / "run") == local["grpo"]


class StaleActor(ActorWorker):
    """An actor that once says that it took new weights, and computes with its old ones."""

    def call(self, name: str, arguments: Any) -> Any:
        if name != "commit":
            return super().call(name, arguments)
        self.commits = getattr(self, "commits", 0) + 1
        if self.commits != 3:
            self.receipt = super().call(name, arguments)
            return self.receipt
        inbox = self._side.inboxes[arguments[0]]
        assert isinstance(inbox, Inbox)
        return Receipt(arguments[0], inbox._current().version, dict(inbox._sums))


@pytest.mark.fault("R15")
def test_a_stale_actor_is_found_at_its_first_completion(
    world: World,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    figure: Callable[[str], None],
) -> None:
    monkeypatch.setattr("oat.assemble.apart._ACTOR", f"{__file__}:StaleActor")
    machine = StruckMachine()
    assert train(world, tmp_path, monkeypatch, machine) == 1
    said = capsys.readouterr().err
    assert "an actor answered with version" in said
    assert "nothing is learned from it" in said
    evaluation, first, second = 2 * 2, 2, 2  # calls of two actors; the evaluation has two modes
    assert machine.calls["sample"] == evaluation + first + second
    figure("1 of 1 actors with stale weights found at the first completion")


class OtherLoads(ActorWorker):
    """An actor whose engine, in processes from the third on, loads other weights than arrive."""

    def __init__(self, plan: bytes):
        super().__init__(plan)
        number = Path("/proc/self/fd/1").resolve().stem
        if number >= "actor-2":
            self._load(self._side.inboxes["sampler"].holder)

    def _load(self, holder: Any) -> None:
        load = holder.load

        def other(slot: str, version: int, tensors: Any) -> None:
            load(slot, version, {name: tensor + 0.5 for name, tensor in tensors.items()})

        holder.load = other


@pytest.mark.sample("24", seconds=0.7)
@pytest.mark.parametrize("number", [12, 24])
def test_an_actor_that_comes_late_proves_its_weights(
    number: int,
    world: World,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    local: Any,
) -> None:
    """It takes the place of one that was lost while it sampled to learn (12), or in an evaluation (24). It
    has other weights; so nothing is learned from it, and the same command continues the run."""
    with monkeypatch.context() as patched:
        patched.setattr("oat.assemble.apart._ACTOR", f"{__file__}:OtherLoads")
        machine = StruckMachine([Kill("sample", number)])
        assert train(world, tmp_path, patched, machine) == 1
    assert len(machine.remotes) == 3
    assert ": actor 2 has other weights than another actor" in capsys.readouterr().err
    assert train(world, tmp_path, monkeypatch, StruckMachine()) == 0
    assert digest_run(tmp_path / "run") == local["grpo"]


class OtherReceipt(ActorWorker):
    """Actor 1 computes with other weights than actor 0, and says so."""

    def call(self, name: str, arguments: Any) -> Any:
        found = super().call(name, arguments)
        if name == "commit" and Path("/proc/self/fd/1").resolve().stem == "actor-1":
            return Receipt(found.slot, found.version, {**found.checksums, "other": 1})
        return found


def test_two_actors_with_different_weights(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("oat.assemble.apart._ACTOR", f"{__file__}:OtherReceipt")
    machine = StruckMachine()
    assert train(world, tmp_path, monkeypatch, machine) == 1
    assert "actor 1 has other weights than another actor" in capsys.readouterr().err
    assert machine.calls["sample"] == 0


class Damaged(ActorWorker):
    """An actor that gets one bucket damaged."""

    def call(self, name: str, arguments: Any) -> Any:
        self.puts = getattr(self, "puts", 0) + (name == "put")
        if name != "put" or self.puts != 9:
            return super().call(name, arguments)
        slot, bucket = arguments
        first = next(iter(bucket.tensors))
        damaged = {**bucket.tensors, first: bucket.tensors[first] + 1}
        return super().call(name, (slot, replace(bucket, tensors=damaged)))


def test_a_bucket_that_is_damaged_on_its_way_ends_the_run(
    world: World,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    local: Any,
) -> None:
    """The same command continues it, and it ends as the local run."""
    with monkeypatch.context() as patched:
        patched.setattr("oat.assemble.apart._ACTOR", f"{__file__}:Damaged")
        assert train(world, tmp_path, patched, StruckMachine()) == 1
    assert "1 tensors changed on the way" in capsys.readouterr().err
    assert (tmp_path / "run" / "metrics.jsonl").read_text()
    assert train(world, tmp_path, monkeypatch, StruckMachine()) == 0
    assert digest_run(tmp_path / "run") == local["grpo"]


class Unversioned(ActorWorker):
    """An actor whose responses do not say with which weights they were sampled."""

    def call(self, name: str, arguments: Any) -> Any:
        found = super().call(name, arguments)
        if name != "sample":
            return found
        return [
            replace(group, trajectories=tuple(map(_without_versions, group.trajectories))) for group in found
        ]


def _without_versions(trajectory: Trajectory) -> Trajectory:
    segments = tuple(replace(segment, versions=None) for segment in trajectory.segments)
    return replace(trajectory, segments=segments)


def test_a_response_without_its_version_is_refused(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("oat.assemble.apart._ACTOR", f"{__file__}:Unversioned")
    assert train(world, tmp_path, monkeypatch, StruckMachine()) == 1
    assert "an actor answered with no version of the weights" in capsys.readouterr().err


def test_the_actor_with_the_smallest_load_gets_the_next_prompt(tmp_path: Path) -> None:
    """Loads that calls have left behind count, and go when their calls are answered."""
    machine = StruckMachine().machine(tmp_path)
    pool = ActorPool(WorkerGroup(machine.launcher(1.0), Restarts(0), "actor", 2))
    try:
        first, second = pool.crew.members
        assert dict(pool._shares(3, 4)) == {first: [0, 2], second: [1]}
        assert dict(pool._shares(2, 1)) == {second: [0, 1]}
    finally:
        pool.close()
        machine.close()


def test_no_prompt_is_missing_or_twice_and_the_least_loaded_get_the_next(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts are shared out by load, also while an actor is busy with others."""
    seen: list[Counter[str]] = []
    shares = ActorPool._shares

    def noted(pool: ActorPool, count: int, weight: int) -> Any:
        found = shares(pool, count, weight)
        seen.append(Counter({member.name: len(indices) for member, indices in found}))
        assert sorted(index for _, indices in found for index in indices) == list(range(count))
        return found

    monkeypatch.setattr(ActorPool, "_shares", noted)
    assert train(world, tmp_path, monkeypatch, StruckMachine()) == 0
    assert seen
    assert all(max(each.values()) - min(each.values()) <= 1 for each in seen if len(each) == 2)


PART = """
from oat.algorithms.group import GRPO


class Own(GRPO):
    pass
"""


@pytest.mark.parametrize("by", ["file", "module"])
def test_a_part_of_the_user_is_found_as_in_the_runs_own_process(
    by: str, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Relative paths and modules beside a program are those of the run's own process."""
    (tmp_path / "own_part.py").write_text(PART, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    name = {"file": "own_part.py:Own", "module": "own_part:Own"}[by]
    changes = {"algorithm.name": name, "stop.max_steps": 1, "evaluation": None}
    assert train(world, tmp_path, monkeypatch, StruckMachine(), **changes) == 0


def test_a_part_that_is_missing_elsewhere_is_refused_before_models_are_loaded(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    only_here = f"import os\n\nif os.getpid() != {os.getpid()}:\n    import missing_here\n"
    (tmp_path / "own_part.py").write_text(only_here + PART, encoding="utf-8")
    machine = StruckMachine()
    changes = {"algorithm.name": f"{tmp_path / 'own_part.py'}:Own"}
    assert train(world, tmp_path, monkeypatch, machine, **changes) == 2
    error = capsys.readouterr().err
    assert "actor 0: on the machine " in error
    assert "missing_here" in error
    assert machine.calls["make"] == 0
    assert not machine.left()


def test_other_versions_elsewhere_are_refused_before_models_are_loaded(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = versions()
    others = {**found, "torch": "9.9", "oat": "1 (sources 0)"}
    monkeypatch.setattr("oat.runtime.worker_group.versions", lambda: others)
    machine = StruckMachine()
    assert train(world, tmp_path, monkeypatch, machine) == 2
    error = capsys.readouterr().err
    assert f"oat {found['oat']} instead of 1 (sources 0), torch {found['torch']} instead of 9.9" in error
    assert "install the same versions on every machine" in error
    assert machine.calls["make"] == 0


def test_an_object_of_the_main_program_does_not_travel(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An algorithm that is no attribute of a module is refused by name; one of a module travels."""

    class Local(GRPO):
        pass

    monkeypatch.setattr("oat.assemble.apart.Machine", machine := StruckMachine())
    tree = world.tree("grpo", tmp_path / "run", {**APART, "stop.max_steps": 1, "evaluation": None})
    sections = {name: value for name, value in tree.items() if name not in ("run_dir", "algorithm")}
    with pytest.raises(ConfigError, match="Local was given from Python, and other processes"):
        Trainer(**sections, algorithm={"name": Local, "prompts": 2}, run_dir=tmp_path / "a").train()
    assert not machine.remotes
    Trainer(**sections, algorithm={"name": GRPO, "prompts": 2}, run_dir=tmp_path / "b", quiet=True).train()
    assert machine.calls["sample"]
