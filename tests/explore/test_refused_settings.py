"""Settings of the explorer `ensemble` that `oat check` refuses before anything is sampled."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from oat.build.resolve import resolve
from oat.config.load import load_config
from oat.errors import ConfigError


def check(folder: Path, algorithm: str, **explorer: Any) -> None:
    whole = {
        "model": {"path": "org/name"},
        "prompts": {"path": "prompts.jsonl"},
        "oracle": {"name": "reward.py:reward"},
        "algorithm": {"name": algorithm},
        "explorer": {"name": "ensemble", **explorer},
        "stop": {"max_steps": 10},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(whole), encoding="utf-8")
    resolve(*load_config(folder / "config.yaml"))


SOFT = {"model_labels": {"labels": "soft"}}


@pytest.mark.parametrize("algorithm", ["dpo", "simpo", "exo", "nca"])
def test_losses_that_weigh_both_winners_take_soft_labels(tmp_path: Path, algorithm: str) -> None:
    check(tmp_path, algorithm, **SOFT)


@pytest.mark.parametrize("algorithm", ["aot", "reward_model"])
def test_losses_that_take_one_winner_refuse_soft_labels(tmp_path: Path, algorithm: str) -> None:
    with pytest.raises(ConfigError, match="takes one winner of a pair; give hard or sampled"):
        check(tmp_path, algorithm, **SOFT)


@pytest.mark.parametrize("tries", [0, -1, 1.5])
def test_a_number_of_tries_is_a_whole_number_above_zero(tmp_path: Path, tries: float) -> None:
    with pytest.raises(ConfigError, match=r"tries of the rule eets is .* give a whole number above 0"):
        check(tmp_path, "dpo", rule={"name": "eets", "tries": tries})


def test_one_try_is_enough(tmp_path: Path) -> None:
    check(tmp_path, "dpo", rule={"name": "eets", "tries": 1})
