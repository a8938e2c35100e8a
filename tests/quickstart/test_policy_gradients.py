"""Policy gradients learn the quickstart's task: two-digit sums, from the quickstart's start model. In one
measurement the share of right samples rose from 0.26 to 0.75 with RLOO and with REINFORCE++, and to 0.89 with
PPO."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from oat.cli import main
from oat.quickstart import configurations, make_start

GAIN = 0.3
"""Least rise of the share of right samples of held-out sums."""
SETTINGS: dict[str, dict[str, Any]] = {
    "rloo": {"algorithm": {"name": "rloo", "prompts": 64, "samples": 8}},
    "reinforce_pp": {"algorithm": {"name": "reinforce_pp", "prompts": 64, "samples": 8}},
    "ppo": {
        "algorithm": {"name": "ppo", "prompts": 64, "samples": 8},
        "learner": {"critic_learning_rate": 1e-3},
    },
}


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("start")
    make_start(folder, 0)
    return folder


@pytest.mark.slow(
    instead="tests/learning/test_reaches.py, on a smaller task; make quickstart itself", seconds=150.0
)
@pytest.mark.parametrize("name", SETTINGS)
def test_gains_on_the_quickstarts_task(start: Path, tmp_path: Path, name: str) -> None:
    tree = configurations(start)["grpo"]
    given = SETTINGS[name]
    tree |= {"run_dir": str(tmp_path / "run"), "algorithm": given["algorithm"]}
    tree["learner"] = {**tree["learner"], **given.get("learner", {})}
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(tree), encoding="utf-8")
    assert main(["train", str(file)]) == 0
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    scores = [row["eval/sampled"] for row in rows if "eval/sampled" in row]
    assert scores[-1] >= scores[0] + GAIN
