"""What the algorithms' pages tell people to write is a valid configuration, and the page of settings is that of the code."""

import dataclasses
import re
import typing
from pathlib import Path
from typing import Any

import pytest
import settings_page
import yaml

from oat.build import ALGORITHMS, resolve
from oat.check import TorchEngineConfig
from oat.config import load_config
from oat.settings import Component, Config

PAGES = sorted((Path(__file__).parent.parent / "docs" / "algorithms").glob("*.md"))
BASE = """
model: {path: org/name}
prompts: {path: prompts.jsonl}
oracle: {name: "reward.py:reward"}
sampling: {max_new_tokens: 256}
learner: {learning_rate: 1e-6}
stop: {max_steps: 10}
"""
BLOCKS = [
    pytest.param(block, id=f"{page.stem}-{number}")
    for page in PAGES
    for number, block in enumerate(re.findall(r"^```yaml\n(.*?)^```", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE), 1)
]


def algorithm_of(block: str) -> Any:
    return yaml.safe_load(block)["algorithm"]["name"]


@pytest.mark.parametrize("block", BLOCKS)
def test_every_block_is_valid(block: str, tmp_path: Path) -> None:
    is_part = set(yaml.safe_load(block)) == {"algorithm"}
    path = tmp_path / "config.yaml"
    path.write_text(BASE + block if is_part else block, encoding="utf-8")
    assert resolve(*load_config(path)).algorithm.name == algorithm_of(block)


def test_every_algorithm_has_a_recipe() -> None:
    assert {algorithm_of(block) for param in BLOCKS for block in param.values} == set(ALGORITHMS)


def test_the_page_of_settings_is_made_from_the_code() -> None:
    assert settings_page.PAGE.read_text(encoding="utf-8") == settings_page.page(), "run: python tests/settings_page.py"


def test_every_setting_says_what_it_means() -> None:
    classes = {cls for _, cls in settings_page.sections(Config)} | {algorithm.Config for algorithm in ALGORITHMS.values()} | {TorchEngineConfig}
    for cls in classes:
        texts, shapes = settings_page.documented(cls), typing.get_type_hints(cls)
        sections = {name for name, kind in shapes.items() if any(map(dataclasses.is_dataclass, (kind, *typing.get_args(kind))))}
        missing = {f.name for f in dataclasses.fields(cls)} - texts.keys() - sections - {"options"}
        assert missing <= ({"name"} if issubclass(cls, Component) else set()), f"{cls.__name__} says nothing about {missing}"
