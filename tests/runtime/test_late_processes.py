"""A process that starts late finds the inputs of the run as they are then. It is used only if they are what
the run began with. Whatever is wrong with it, the run is saved, and the same command continues it."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from fixtures import World, oat
from planned_kills import Kill, StruckMachine

from oat.commands.digest import digest_run
from oat.runtime.calls import call_of
from oat.runtime.pool import ActorPool
from oat.runtime.worker import surroundings
from oat.runtime.worker_group import WorkerGroup

ENVIRONMENT = """
from helper import BONUS
from oat.environments.base import Turn


class Echo:
    def reset(self, prompt, generator):
        return {}

    def step(self, state, response):
        return Turn({}, None, len(response) % 7 / 7 + BONUS)
"""
OBJECTIVE = """
from dataclasses import replace

from oat.algorithms.group import GRPO


class Own(GRPO):
    def losses(self, outputs, view):
        found = super().losses(outputs, view)
        return {name: replace(loss, terms=FACTOR * loss.terms) for name, loss in found.items()}
"""
REWARD = """
from helper import BONUS


def rule(prompts, completions, **columns):
    return [len(text) % 7 / 7 + BONUS for text in completions]
"""
APART: dict[str, Any] = {"compute.runtime": "processes", "compute.actors": 2, "engine.deterministic": True}
CHANGES: dict[str, Any] = {"engine.threads": 1, "stop.max_steps": 6, "evaluation": None}
EDITED: dict[str, tuple[str, str, str, dict[str, Any], str]] = {
    "an environment's helper": (
        "helper.py",
        "BONUS = 0.0",
        "BONUS = 0.25",  # of another size: Python looks at size and seconds
        {"sampling.environment": "environment.py:Echo", "oracle": {"name": "environment"}},
        "sample",
    ),
    "a loss": (
        "objective.py",
        "FACTOR = 1",
        "FACTOR = 7",
        {
            "algorithm": {"name": "objective.py:Own", "prompts": 4, "samples": 3},
            "compute.learner": "actor",
            "compute.actors": 1,
        },
        "update",
    ),
    "a reward's helper": (
        "helper.py",
        "BONUS = 0.0",
        "BONUS = 0.25",  # of another size: Python looks at size and seconds
        {"oracle": {"name": "reward.py:rule"}, "compute.oracle_clients": 1},
        "submit",
    ),
}
"""By name: a file, its text, an edited text, settings that need the file, and the call that meets a kill."""


def train(world: World, folder: Path, name: str, **changes: Any) -> int:
    return oat("train", world.config("grpo", folder, {**CHANGES, **changes, "run_dir": str(folder / name)}))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with files of the user."""
    for name, text in (("environment", ENVIRONMENT), ("reward", REWARD)):
        (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "helper", raising=False)
    return tmp_path


def editing(monkeypatch: pytest.MonkeyPatch, file: Path, text: str) -> None:
    """Let a file be edited before the third call for samples."""
    calls, sample = 0, ActorPool.sample

    def edited(pool: ActorPool, *arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            file.write_text(text, encoding="utf-8")
        return sample(pool, *arguments)

    monkeypatch.setattr(ActorPool, "sample", edited)


def content(name: str, text: str) -> str:
    return text + (OBJECTIVE if name == "objective.py" else "\n")


@pytest.mark.sample("an environment's helper", seconds=5)
@pytest.mark.parametrize("name", EDITED)
def test_code_that_was_edited_while_the_run_works(
    name: str, world: World, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file, before, after, changes, call = EDITED[name]
    (folder / file).write_text(content(file, before), encoding="utf-8")
    local = {key: value for key, value in changes.items() if not key.startswith("compute")}
    assert train(world, folder, "local", **{**local, "engine.deterministic": True}) == 0
    with monkeypatch.context() as patched:
        patched.setattr(
            "oat.assemble.apart.Machine", StruckMachine([Kill(call, 6 if call == "sample" else 4)])
        )
        editing(patched, folder / file, content(file, after))
        assert train(world, folder, "apart", **{**APART, **changes}) == (2 if name == "a loss" else 1)
    said = capsys.readouterr().err.splitlines()
    assert "has imported code that was edited while the run works" in said[-1]
    assert f"machines: {file}; put back" in said[-1]
    (folder / file).write_text(content(file, before), encoding="utf-8")
    monkeypatch.setattr("oat.assemble.apart.Machine", StruckMachine())
    assert train(world, folder, "apart", **{**APART, **changes}) == 0
    assert digest_run(folder / "apart") == digest_run(folder / "local")


def test_a_tokenizer_that_was_edited_while_the_run_works(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "model"
    for file in (world.folder / "model").iterdir():
        model.mkdir(exist_ok=True)
        (model / file.name).write_bytes(file.read_bytes())
    tokenizer = json.loads((model / "tokenizer.json").read_text(encoding="utf-8"))
    one, other, *_ = (name for name, number in tokenizer["model"]["vocab"].items() if number > 10)
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]
    monkeypatch.setattr("oat.assemble.apart.Machine", StruckMachine([Kill("sample", 8)]))
    editing(monkeypatch, model / "tokenizer.json", json.dumps(tokenizer))
    assert train(world, tmp_path, "apart", **{**APART, "model.path": str(model)}) == 1
    said = capsys.readouterr().err
    assert "what is read of it is not what this run began with" in said
    assert "tokenizer.json" in said
    assert sorted((tmp_path / "apart" / "checkpoints").glob("step_*"))


@pytest.mark.sample("a replacement", seconds=0.5)
@pytest.mark.parametrize("by", ["a replacement", "an added actor"])
def test_a_process_that_is_not_fit(
    by: str, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another machine may have other versions. Without a lost actor, the run goes on without the new one."""
    hire = WorkerGroup.start_worker

    def unfit(crew: WorkerGroup) -> Any:
        if crew._hired == 2:
            what, _, take = crew._orders[0]
            crew._orders[0] = what, call_of(what, {"torch": "9.9"}, [], *surroundings()), take
        return hire(crew)

    monkeypatch.setattr(WorkerGroup, "start_worker", unfit)
    kills = [Kill("sample", 6)] if by == "a replacement" else []
    monkeypatch.setattr("oat.assemble.apart.Machine", machine := StruckMachine(kills))
    if by == "a replacement":
        assert train(world, tmp_path, "apart", **APART) == 1
        assert "instead of 9.9" in capsys.readouterr().err
        assert sorted((tmp_path / "apart" / "checkpoints").glob("step_*"))
        return
    sample = ActorPool.sample

    def asked(pool: ActorPool, *arguments: Any) -> Any:
        assert oat("actors", tmp_path / "apart", 3) == 0
        for coming in pool._coming.values():
            coming.exception(30)
        return sample(pool, *arguments)

    monkeypatch.setattr(ActorPool, "sample", asked)
    with pytest.warns(UserWarning, match="instead of 9.9.*; the run goes on with 2 of 3 actors"):
        assert train(world, tmp_path, "apart", **APART) == 0
    assert not machine.left()


def test_no_room_for_a_replacement(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("oat.runtime.worker_group._ROOM_S", 0.5)
    monkeypatch.setattr("oat.assemble.apart.Machine", machine := StruckMachine([Kill("sample", 6)]))
    machine.most = 1
    assert train(world, tmp_path, "apart", **APART) == 1
    assert "there is no room for another process in its place" in capsys.readouterr().err
    assert sorted((tmp_path / "apart" / "checkpoints").glob("step_*"))
    monkeypatch.setattr("oat.assemble.apart.Machine", StruckMachine())
    assert train(world, tmp_path, "apart", **APART) == 0


def test_all_replacements_are_counted_together(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those of actors, and the times that the run begins again because its learner is lost."""
    kills = [Kill("update", 1), Kill("update", 3), Kill("sample", 11)]
    monkeypatch.setattr("oat.assemble.apart.Machine", machine := StruckMachine(kills))
    changes = {**APART, "compute.learner": "actor", "compute.max_restarts": 2}
    assert train(world, tmp_path, "apart", **changes) == 1
    assert len(machine.killed) == 3
    assert "compute.max_restarts (2) allows no further replacement" in capsys.readouterr().err
