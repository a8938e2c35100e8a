"""Settings of parts: they are made once in a run, and a new one needs its own file only."""

import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from fixtures import World, oat

import oat as package
from oat.plugins.registry import ALGORITHMS, ENGINES, EXPLORERS
from oat.tracking.tensorboard import TensorBoard
from oat.trainer import Trainer

ROOT = Path(package.__file__).parent
CLASSES = {
    part.Config
    for registry in (ALGORITHMS, ENGINES, EXPLORERS)
    for part in registry.values()
    if is_dataclass(getattr(part, "Config", None))
} | {TensorBoard.Config}


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count how often settings of each class are made."""
    found = Counter[str]()

    def counting(cls: type) -> Any:
        make = cls.__init__  # type: ignore[misc]

        def count(self: Any, *arguments: Any, **fields: Any) -> None:
            found[type(self).__name__] += 1
            make(self, *arguments, **fields)

        return count

    for cls in CLASSES:
        monkeypatch.setattr(cls, "__init__", counting(cls))
    return found


def taken(made: Counter[str]) -> dict[str, int]:
    """Return what was counted, and begin anew."""
    found = dict(made)
    made.clear()
    return found


ONCE = {"DPOConfig": 1, "TorchEngineConfig": 1}


def test_settings_are_made_once_in_a_run(world: World, tmp_path: Path, made: Counter[str]) -> None:
    """Also in a run that is continued, and in a fork with another setting beside them. In a fork with another
    setting of the algorithm, its settings and those of the other run differ."""
    config = world.config("dpo", tmp_path, {"checkpoint.every": 1})
    assert oat("train", config, "--stop.max_steps", 1) == 0
    assert taken(made) == ONCE
    assert oat("train", config, "--stop.max_steps", 2) == 0
    assert taken(made) == ONCE
    fork = ("--from", f"{tmp_path / 'dpo'}@1", "--stop.max_steps", 2)
    assert oat("train", config, "--run_dir", tmp_path / "a", *fork, "--learner.learning_rate", 1e-5) == 0
    assert taken(made) == ONCE
    assert oat("train", config, "--run_dir", tmp_path / "b", *fork, "--algorithm.beta", 0.3) == 0
    assert taken(made) == {**ONCE, "DPOConfig": 2}


def test_settings_are_made_once_from_python(world: World, tmp_path: Path, made: Counter[str]) -> None:
    tree = yaml.safe_load(world.config("dpo", tmp_path, {"checkpoint.every": 1}).read_text())
    tree = {**tree, "run_dir": tmp_path / "run", "stop": {"max_steps": 1}, "quiet": True}
    trainer = Trainer(**tree)
    trainer.train()
    trainer.train()
    assert taken(made) == ONCE
    trainer.fork(tmp_path / "fork", step=1, stop={"max_steps": 2}, learner={"learning_rate": 1e-5}).train()
    assert taken(made) == ONCE


_FIELD = '''\
    new_weight: float = 0.0
    """Weight of something new; 0 is off."""
    label_smoothing: float'''
_READ = """
import sys, yaml
from pathlib import Path

sys.path.insert(0, sys.argv[2])
import settings_page
from oat.config.fields import said_at
from oat.errors import ConfigError
from oat.resolve.targets import resolve_file

config = resolve_file("run.yaml", ["--algorithm.new_weight", "0.5"]).config
assert config.algorithm.settings.new_weight == 0.5
assert said_at(config, ["algorithm", "new_weight"]).may_change == "fork"
stored = yaml.safe_load(resolve_file("run.yaml").as_yaml())
assert stored["algorithm"]["new_weight"] == 0.0
row = "| `new_weight` | number | `0.0` | in a fork | Weight of something new; 0 is off. |"
assert row in settings_page.page()
for flags, said in (
    (["--algorithm.new_weigth", "1"], "`new_weight`"),
    (["--algorithm.new_weight", "abc"], "'abc'"),
    (["--algorithm.name", "sft", "--algorithm.new_weight", "1"], "read by dpo"),
):
    try:
        resolve_file("run.yaml", flags)
        raise AssertionError(flags)
    except ConfigError as error:
        assert said in str(error), error
assert Path(sys.modules["oat"].__file__).is_relative_to(sys.argv[1])
"""


def test_a_new_setting_needs_its_part_s_file_only(world: World, tmp_path: Path) -> None:
    """A copy of `oat` gets a field in one file. The setting is then resolved, stored, documented, proposed
    and refused like any other, and a run that lacks it has its default."""
    shutil.copytree(ROOT, tmp_path / "src" / "oat", ignore=shutil.ignore_patterns("__pycache__"))
    file = tmp_path / "src" / "oat" / "algorithms" / "direct.py"
    text = file.read_text(encoding="utf-8")
    assert text.count("    label_smoothing: float") == 2, "DPO's and SimPO's"
    file.write_text(text.replace("    label_smoothing: float", _FIELD, 1), encoding="utf-8")
    config = world.config("dpo", tmp_path)
    config.rename(tmp_path / "run.yaml")
    ended = subprocess.run(
        [sys.executable, "-c", _READ, str(tmp_path), str(Path(__file__).parents[1])],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path / "src"), "PATH": ""},
    )
    assert ended.returncode == 0, ended.stderr


_PART = """
from dataclasses import dataclass, field

from oat.algorithms.direct import DPO
from oat.config.fields import Follows, ReadIf, setting
from oat.config.conditions import HAS_CRITIC


@dataclass(frozen=True)
class Inner:
    deep: int = {inner}


class Mine(DPO):
    @dataclass(frozen=True)
    class Config(DPO.Config):
        own: int = {own}
        inner: Inner = Inner()
"""


def part_of_ones_own(folder: Path, own: str = "0", inner: str = "0") -> dict[str, Any]:
    (folder / "mine.py").write_text(_PART.format(own=own, inner=inner), encoding="utf-8")
    return {"algorithm.name": f"{folder / 'mine.py'}:Mine", "checkpoint.every": 1}


@pytest.mark.parametrize(
    ("where", "field", "words"),
    [
        ("own", "setting(0, may_change='Fork')", "did you mean `fork`"),
        ("own", "setting(0, read_if='the algorithm has a critic')", "give a ReadIf"),
        ("own", "setting(0, read_if=ReadIf('x', True))", "give a ReadIf"),
        ("own", "setting(0, read_if=ReadIf('x', lambda: True))", "give a ReadIf"),
        ("own", "field(default=0, init=False)", "has init=False"),
        ("own", "0; name: int = 0", "`name` of"),
        ("inner", "0; options: int = 0", "`inner.options` of"),
        ("own", "0; kinds: frozenset[str] = frozenset('a')", "a value of the type frozenset"),
        ("own", "setting(0, open=0)", "`own` of"),
        ("own", "setting(0, earlier=1)", "says `earlier`"),
        ("inner", "setting(0, open=0)", "`inner.deep` of"),
        ("inner", "setting(0, follows=Follows(str, bool, 'last'))", "says `follows`"),
    ],
)
def test_what_a_setting_of_a_user_s_part_cannot_say(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str], where: str, field: str, words: str
) -> None:
    config = world.config("dpo", tmp_path, part_of_ones_own(tmp_path, **{where: field}))
    assert oat("check", config) == 2
    said = capsys.readouterr().err
    assert words in said
    assert f"{config}:" in said


def test_a_setting_of_a_user_s_part_says_when_it_changes(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """So do those in a section of the part."""
    two = "two: tuple[int, ...] = setting(default_factory=lambda: (1, 2), read_if=HAS_CRITIC)"
    words = {"own": f"setting(0, read_if=HAS_CRITIC); {two}", "inner": "setting(0, may_change='always')"}
    config = world.config("dpo", tmp_path, part_of_ones_own(tmp_path, **words))
    assert oat("check", config, "--algorithm.two", "[1, 2]") == 0, "the default"
    assert oat("train", config, "--algorithm.own", 1) == 2
    assert "read only if the algorithm has a critic" in capsys.readouterr().err
    assert oat("train", config, "--stop.max_steps", 1) == 0
    assert oat("train", config, "--stop.max_steps", 2, "--algorithm.inner.deep", 3) == 0
    assert (
        oat("train", config, "--stop.max_steps", 2, "--algorithm.inner.deep", 3, "--algorithm.beta", 0.5) == 2
    )
