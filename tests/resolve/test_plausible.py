"""Values that a setting may have and that are hardly meant: a new run says so, and goes on."""

from pathlib import Path
from typing import Any

import pytest
from configurations import MINIMAL
from fixtures import World, oat

from oat.config.load import load_config
from oat.errors import OatWarning
from oat.resolve.cross_checks.plausible import HIGHEST, values
from oat.resolve.resolve import resolve


def noted(file: Path, **changed: Any) -> list[str]:
    """Return the settings of a configuration that get a note."""
    flags = [word for name, value in changed.items() for word in (f"--{name}", str(value))]
    return [check.field for check in values(resolve(*load_config(file, flags))) if check.is_wrong]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "run.yaml"
    file.write_text(MINIMAL, encoding="utf-8")
    return file


def test_a_value_above_the_highest_gets_a_note(file: Path) -> None:
    for field, (highest, _) in HIGHEST.items():
        algorithm = {"algorithm.name": "ppo"} if "critic" in field else {}
        for value, is_noted in ((highest, False), (highest * 1.01, True)):
            assert noted(file, **algorithm, **{field: value}) == [field] * is_noted


@pytest.mark.parametrize("algorithm", ["dpo", "ppo", "sft", "reward_model"])
def test_defaults_get_none(file: Path, algorithm: str) -> None:
    offline = {"oracle.name": "recorded"} if algorithm in ("sft", "reward_model") else {}
    flags = {"algorithm": f"{{name: {algorithm}, prompts: 2}}", **offline}
    assert noted(file, **flags) == []


def test_the_check_tells_a_new_run(world: World, tmp_path: Path) -> None:
    config = world.config("grpo", tmp_path, {"learner.learning_rate": 1e5})
    with pytest.warns(OatWarning, match=r"grpo.yaml:\d+: learner.learning_rate is 100000.0: .*1e-05"):
        assert oat("check", config) == 0
