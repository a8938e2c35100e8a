"""What the algorithms' pages tell people to write is a valid configuration."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from oat.build import ALGORITHMS, resolve
from oat.config import load_config

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
