"""User code that is given by name."""

import json
import os
import re
import sys

import pytest
import torch
from fixtures import World, oat

from oat.errors import ConfigError
from oat.plugins import registry
from oat.plugins.loading import load_symbol
from oat.plugins.registry import Registry


def write(folder, text, name="mine.py"):
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_a_file_is_run_once(tmp_path):
    path = write(tmp_path, "class Mine: pass\ndef make(): return Mine()\n")
    mine, make = load_symbol(f"{path}:Mine"), load_symbol(f"{path}:make")
    assert isinstance(make(), mine)
    assert sys.modules[mine.__module__].Mine is mine


def test_two_files_of_one_name_do_not_meet(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    first, second = write(tmp_path / "a", "value = 1\n"), write(tmp_path / "b", "value = 2\n")
    assert (load_symbol(f"{first}:value"), load_symbol(f"{second}:value")) == (1, 2)


def test_a_changed_file_is_read_again(tmp_path):
    path = write(tmp_path, "value = 1\n")
    assert load_symbol(f"{path}:value") == 1
    write(tmp_path, "value = 1000\n")
    assert load_symbol(f"{path}:value") == 1000


def test_a_file_changed_within_its_second_is_read_again(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    path = write(tmp_path, "value = 1\n")
    times = (path.stat().st_atime, path.stat().st_mtime)
    assert load_symbol(f"{path}:value") == 1
    write(tmp_path, "value = 2\n")
    os.utime(path, times)
    assert load_symbol(f"{path}:value") == 2


def test_a_module_by_name():
    assert load_symbol("oat.errors:ConfigError") is ConfigError


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        ("def reward(): pass\n", "rewards", "has no rewards; did you mean `reward`"),
        ("value = (\n", "value", "fails when imported: SyntaxError"),
        ("a = 1\n\nb = a / 0\n", "b", r"ZeroDivisionError: division by zero \(line 3 of mine\.py\)"),
        ("import no_such_module_here\n", "x", "No module named 'no_such_module_here'"),
        ("raise SystemExit(3)\n", "x", "SystemExit: 3"),
    ],
)
def test_a_file_that_does_not_give_the_name(tmp_path, text, name, message):
    path = write(tmp_path, text)
    before = set(sys.modules)
    with pytest.raises(ConfigError, match=message) as seen:
        load_symbol(f"{path}:{name}")
    assert str(path) in str(seen.value)
    assert name == "rewards" or not [
        module for module in set(sys.modules) - before if module.startswith("oat_plugin")
    ]


@pytest.mark.parametrize("error", ["ImportError('math_verify is not there')", "SystemExit(0)"])
def test_a_module_that_imports_what_it_has_only_when_it_is_asked_for_it(tmp_path, monkeypatch, error):
    path = write(tmp_path, f"def __getattr__(name):\n    raise {error}\n", "imports_late.py")
    monkeypatch.syspath_prepend(tmp_path)
    for place in (path, "imports_late"):
        with pytest.raises(
            ConfigError,
            match=r"fails when it is asked for reward: (ImportError: math_verify is not there|SystemExit: 0)",
        ):
            load_symbol(f"{place}:reward")
    sys.modules.pop("imports_late")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("nothing", "names no code"),
        ("a.py:", "names no code"),
        (":Name", "names no code"),
        ("a.py:not a name", "names no code"),
        ("absent/mine.py:Name", "cannot read absent/mine.py"),
        ("no_such_package.module:Name", "put its folder on PYTHONPATH"),
        ("oat.errors:ConfigErrors", "did you mean `ConfigError`"),
    ],
)
def test_a_name_that_leads_nowhere(spec, message):
    with pytest.raises(ConfigError, match=message):
        load_symbol(spec)


ALGORITHM = """
import torch
from oat.algorithms.group import GRPO

class Mine(GRPO):
    def {method}(self, *given):
        {body}
"""


@pytest.mark.parametrize(
    ("method", "body", "message"),
    [
        ("losses", 'raise ValueError("x\\x1b" * 10**6)', "line 7 of mine.py raised ValueError: x\\u001bx"),
        ("metrics", "raise GeneratorExit", "line 7 of mine.py raised GeneratorExit; mend it"),
        ("prepare", "raise SystemExit(0)", "line 7 of mine.py raised SystemExit: 0; mend it"),
        ("prepare", "return None", "`prepare` of grpo returned None; return an oat.types.Batch"),
        (
            "losses",
            "torch.set_grad_enabled(False); return super().losses(*given)",
            "the losses of grpo carry no gradient",
        ),
    ],
)
def test_what_a_users_algorithm_raises_is_one_message(world: World, tmp_path, capsys, method, body, message):
    path = write(tmp_path, ALGORITHM.format(method=method, body=body))
    code = oat(
        "train",
        world.config(
            "grpo", tmp_path, {"algorithm.name": f"{path}:Mine", "evaluation": None, "stop.max_steps": 1}
        ),
    )
    said = capsys.readouterr().err.splitlines()[-1]
    assert code != 0
    assert said.startswith(f"oat train: {message}")
    assert len(said) < 3000
    assert torch.is_grad_enabled()


def test_all_of_a_traceback_is_shown_on_demand(world: World, tmp_path, monkeypatch):
    path = write(tmp_path, ALGORITHM.format(method="losses", body="raise ValueError"))
    monkeypatch.setenv("OAT_TRACEBACK", "1")
    with pytest.raises(ValueError, match=r"^$"):
        oat(
            "train",
            world.config(
                "grpo", tmp_path, {"algorithm.name": f"{path}:Mine", "evaluation": None, "stop.max_steps": 1}
            ),
        )


USERS = {
    "estimator": (
        "def mine(given):\n    raise AttributeError('no advantages')\n",
        "algorithm.advantage",
        r"algorithm\.advantage: \S+mine raised AttributeError: no advantages \(line 2 of mine\.py\); repair",
    ),
    "environment": (
        "class mine:\n    def reset(self, prompt, generator):\n        return {}\n\n"
        "    def step(self, state, response):\n        return state['sum']\n",
        "sampling.environment",
        r"the environment mine raised KeyError: 'sum' \(line 6 of mine\.py\), in an episode from record 1;",
    ),
}


@pytest.mark.parametrize("part", USERS)
def test_an_error_of_users_code_names_its_line_and_shows_its_traceback_on_demand(
    world: World, tmp_path, monkeypatch, capsys, part
):
    source, field, message = USERS[part]
    path = write(tmp_path, source)
    one_step = {"evaluation": None, "stop.max_steps": 1, "prompts.shuffle": False}
    config = world.config("grpo", tmp_path, {**one_step, field: f"{path}:mine"})
    assert oat("train", config) == 1
    said = capsys.readouterr().err
    assert re.match(f"oat train: {message}", said.splitlines()[-1]), said
    assert "Traceback" not in said
    monkeypatch.setenv("OAT_TRACEBACK", "1")
    assert oat("train", config) == 1
    said = capsys.readouterr().err
    assert re.match(f"oat train: {message}", said.splitlines()[-1]), said
    assert re.search(rf'Traceback .*\n(.*\n)*  File "{path}", line \d, in (mine|step)\n', said), said


def test_a_registry_says_names_and_loads_a_part_only_when_it_is_named(tmp_path):
    place = write(tmp_path, "class Mine: pass\n")
    colours = Registry(
        "no colour is called {name!r}; {nearest}", {"red": "gone.module:Red", "json": "json:loads"}
    )
    assert [*colours] == ["red", "json"], "nothing is imported for that"
    assert colours["json"] is json.loads
    assert colours.load(f"{place}:Mine").__name__ == "Mine"
    with pytest.raises(ConfigError, match="no colour is called 'rde'; did you mean `red`"):
        colours.load("rde")


@pytest.mark.parametrize("kind", ["ALGORITHMS", "ANSWERS", "ENGINES", "EXPLORERS", "ORACLES", "SINKS"])
def test_every_line_of_the_registries_names_a_part(kind):
    parts = getattr(registry, kind)
    assert all(callable(part) for part in parts.values())
    if kind == "ALGORITHMS":
        assert [part.name for part in parts.values()] == [*parts]
