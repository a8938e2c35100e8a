"""The blocks of docs/exploration.md work unchanged."""

import re
import shlex
import sys
from pathlib import Path

import pytest
import yaml

from oat.cli import main
from oat.config.load import load_config
from oat.resolve.resolve import resolve
from oat.testing import tiny_run

PAGE = (Path(__file__).parents[2] / "docs" / "exploration.md").read_text(encoding="utf-8")
FILES = dict(re.findall(r"<!-- file: (\S+) -->\n```python\n(.*?)```", PAGE, flags=re.DOTALL))
CONFIGS = re.findall(r"<!-- config -->\n```yaml\n(.*?)```", PAGE, flags=re.DOTALL)
YAML = re.findall(r"^```yaml\n(.*?)^```", PAGE, flags=re.DOTALL | re.MULTILINE)
BASE = {
    "model": {"path": "org/name"},
    "prompts": {"path": "prompts.jsonl"},
    "oracle": {"name": "reward.py:reward"},
    "stop": {"max_steps": 10},
}
REWARD = """def reward(prompts, completions, **columns):
    return [float(text.count("a")) for text in completions]
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in {**FILES, "reward.py": REWARD}.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("block", YAML)
def test_every_block_is_valid(folder: Path, block: str) -> None:
    given = yaml.safe_load(block)
    whole = {**BASE, **given}
    (folder / "config.yaml").write_text(yaml.safe_dump(whole), encoding="utf-8")
    assert resolve(*load_config(folder / "config.yaml")).config.algorithm.name == whole["algorithm"]["name"]


def test_the_rule_runs(folder: Path) -> None:
    (config,) = CONFIGS
    others = "sampling: {max_new_tokens: 4}\nlearner: {learning_rate: 5e-3}\nstop: {max_steps: 2}\n"
    rows = tiny_run(config + others, ["a=", "b=", "aa=", "bb="], folder=folder)
    assert len(rows) == 3
    assert rows[-1]["explorer/clash_frac"] == 0
    assert "explorer/agreement" in rows[-1]
    for module in FILES:
        sys.modules.pop(module.removesuffix(".py"), None)


def test_the_rule_is_compared(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (line,) = [line for line in PAGE.splitlines() if line.startswith("oat bench explore --rules hopeful")]
    assert main(shlex.split(line.replace("--seeds 4", "--seeds 1"))[1:]) == 0
    assert "| hopeful.py:hopeful |" in capsys.readouterr().out
    for module in FILES:
        sys.modules.pop(module.removesuffix(".py"), None)


def test_every_rule_world_and_metric_is_named() -> None:
    from oat.explore.rules import RULES
    from oat.laboratory.worlds import WORLDS
    from oat.metrics import NAMES

    rows = set(re.findall(r"^\| `(\w+)`", PAGE, flags=re.MULTILINE))
    assert RULES.keys() | WORLDS.keys() <= rows
    metrics = PAGE.partition("## Metrics")[2]
    named = set(re.findall(r"`((?:explorer|ensemble|eval|loss|oracle|time)/\w+)`", metrics))
    assert named <= NAMES.keys()
