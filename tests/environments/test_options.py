"""An environment is named with its options: in a file, by flags, and from Python."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from fixtures import World, oat

import oat as package
from oat.config.load import load_config
from oat.config.settings import Component
from oat.environments.base import Turn
from oat.errors import ConfigError
from oat.resolve.environment import environment_part
from oat.resolve.resolve import resolve
from oat.rundir.rows import read_metrics

GAME = '''
from oat.environments.base import Turn
from oat.types import Message


class Steps:
    """The reward of a response is `pay`; an episode has `turns` responses."""

    def __init__(self, turns=1, *, pay=0.0):
        self.turns, self.pay = turns, pay

    def reset(self, prompt, generator):
        return {"left": self.turns - 1}

    def step(self, state, response):
        message = Message("user", "+") if state["left"] else None
        return Turn({"left": state["left"] - 1}, message, self.pay + response.count("1"))


class Late(Steps):
    async def step(self, state, response):
        return super().step(state, response)


class Anything(Steps):
    def __init__(self, **options):
        super().__init__(**options)
'''


@pytest.fixture
def config(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Return a function that writes the configuration of a run with an environment of `game.py`, and returns
    its path. The run's directory is `run`."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "game.py").write_text(GAME)

    def write(environment: Any, **sampling: Any) -> Path:
        changes = {
            "run_dir": "run",
            "oracle": {"name": "environment"},
            "sampling.environment": environment,
            **{f"sampling.{key}": value for key, value in sampling.items()},
            "evaluation": None,
            "render.template": None,
            "stop.max_steps": 1,
        }
        return world.config("grpo", tmp_path, changes)

    return write


def resolved(path: Path, *flags: str) -> Any:
    return resolve(*load_config(path, flags)).config


def test_a_name_and_a_section_are_the_same(config: Callable[..., Path]) -> None:
    name = "game.py:Steps"
    for given in (name, {"name": name}, {"name": name, "turns": 3}):
        found = resolved(config(given))
        assert environment_part(found) == Component(name, {"turns": 3} if "turns" in given else {})
        assert found.sampling.environment == (name if "turns" not in given else Component(name, {"turns": 3}))
    path = config({"name": name})
    part = environment_part(resolved(path, "--sampling.environment.pay", "0.5"))
    assert part == Component(name, {"pay": 0.5})
    assert environment_part(resolved(config({"name": "game.py:Anything", "x": 1}))).options == {"x": 1}
    assert environment_part(replace(found, sampling=replace(found.sampling, environment=None))) is None


def test_options_reach_the_environment(config: Callable[..., Path]) -> None:
    assert oat("train", config({"name": "game.py:Steps", "turns": 3, "pay": 0.25})) == 0
    assert read_metrics(Path("run/metrics.jsonl"))[1]["reward/mean"] >= 3 * 0.25
    kept = package.load_run("run").config.sampling.environment
    assert kept == Component("game.py:Steps", {"turns": 3, "pay": 0.25})


def test_a_check_counts_episodes(config: Callable[..., Path], capsys: Any) -> None:
    assert oat("check", config("game.py:Steps"), "--json") == 0
    units = {row["name"]: row["unit"] for row in json.loads(capsys.readouterr().out)["rows"]}
    assert (units["responses a step"], units["longest response"]) == ("episodes", "tokens a turn")


def test_the_same_run_goes_on_with_either_form(config: Callable[..., Path], capsys: Any) -> None:
    assert oat("train", config("game.py:Late")) == 0
    again = ("--stop.max_steps", "2")
    assert oat("train", config({"name": "game.py:Late"}), *again) == 0
    assert oat("check", config({"name": "game.py:Late"}, environment_deadline_s=5.0), *again) == 0
    assert oat("check", config({"name": "game.py:Late", "turns": 2})) == 2
    assert "sampling.environment" in capsys.readouterr().err
    stored = yaml.safe_load(Path("run/config.yaml").read_text())
    assert stored["sampling"]["environment"] == "game.py:Late"


def test_a_deadline_needs_something_async(config: Callable[..., Path]) -> None:
    assert resolved(config("game.py:Late", environment_deadline_s=3.0)).sampling.environment_deadline_s == 3
    with pytest.raises(ConfigError, match=r"nothing reads sampling.environment_deadline_s"):
        resolved(config("game.py:Steps", environment_deadline_s=3.0))


def test_a_fork_keeps_its_options(config: Callable[..., Path], capsys: Any) -> None:
    assert oat("train", config({"name": "game.py:Steps", "pay": 0.5})) == 0
    path = config({"name": "game.py:Steps", "pay": 0.75})
    assert oat("train", path, "--from", "run", "--run_dir", "fork") == 2
    assert "sampling.environment.pay: 0.5 -> 0.75" in capsys.readouterr().err


class Paying:
    """An environment that is given as a Python object."""

    def __init__(self, pay: float = 1.0):
        self.pay = pay

    def reset(self, prompt: Any, generator: Any) -> dict[str, Any]:
        return {}

    def step(self, state: Any, response: str) -> Turn:
        return Turn(state, None, self.pay)


def test_from_python_it_is_an_object_with_or_without_options(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    common: dict[str, Any] = {
        "model": str(world.folder / "model"),
        "oracle": "environment",
        "prompts": [{"prompt": "1+1="}] * 4,
        "algorithm": {"name": "grpo", "prompts": 2, "samples": 2},
        "compute": {"threads": 1},
        "stop": {"max_steps": 1},
        "quiet": True,
    }
    for given, pay in ((Paying, 1.0), ({"name": Paying, "pay": 2.0}, 2.0)):
        trainer = package.Trainer(
            **common, run_dir=f"run{pay:g}", sampling={"max_new_tokens": 2, "environment": given}
        )
        assert trainer.train().metrics["reward/mean"] == pay
        part = environment_part(trainer.config)
        assert part is not None
        assert part.name == "python:Paying"
    with pytest.raises(ConfigError, match=r"sampling.environment.pays. of python:Paying; did you mean `pay`"):
        package.Trainer(**common, sampling={"environment": {"name": Paying, "pays": 2.0}})
