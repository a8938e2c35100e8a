"""The code of docs/environments.md works unchanged."""

import re
import sys
from pathlib import Path

import pytest

from oat.plugins.loading import load_symbol
from oat.testing import tiny_run

PAGE = (Path(__file__).parents[2] / "docs" / "environments.md").read_text(encoding="utf-8")
FILES = dict(re.findall(r"<!-- file: (\S+) -->\n```python\n(.*?)```", PAGE, flags=re.DOTALL))
CONFIGS = re.findall(r"<!-- config -->\n```yaml\n(.*?)```", PAGE, flags=re.DOTALL)
OTHERS = "learner: {learning_rate: 5e-3}\nstop: {max_steps: 2}\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_every_block_is_run() -> None:
    assert PAGE.count("```") == 2 * (len(FILES) + len(CONFIGS))
    assert [re.findall(r"\w+\.py", config)[0] for config in CONFIGS] == ["game.py", "waiting.py"]
    assert {*FILES} == {"game.py", "waiting.py", "sums.py", "test_game.py"}


@pytest.mark.parametrize("config", CONFIGS, ids=["game", "waiting"])
def test_every_configuration_runs(folder: Path, config: str) -> None:
    rows = tiny_run(config + OTHERS, ["a=", "b="], characters="0123?+-", folder=folder)
    assert len(rows) == 3
    assert rows[-1]["answers/failed_frac"] == 0


def test_the_test_passes(folder: Path) -> None:
    load_symbol("test_game.py:test_environments")()
    for module in ("game", "waiting", "sums"):
        del sys.modules[module]  # which other tests may have under the same names
