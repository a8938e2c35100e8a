"""The recipes of `configs/cpu`, which run on any machine: one per algorithm, online and from recorded data.
The recipes of reward models are in another folder and have their own tests."""

import json
import math
from pathlib import Path

import pytest
import yaml
from fixtures import oat
from tiny_models import build_config, save_model

from oat.plugins.registry import ALGORITHMS

ROOT = Path(__file__).parents[2]
VARIANTS = {"rest_online", "rft_online", "sft_chat_offline"}
"""Further ways to use `sft`."""
OFFLINE_TOO = {"grpo_offline", "ppo_offline"}
"""Offline recipes of algorithms that divide by the sampling probability."""
FURTHER = {"dpo_buffer", "dpo_iterative", "vine_online"}
"""Recipes of features other than an algorithm."""
RECIPES = sorted((ROOT / "configs" / "cpu").glob("*.yaml"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Save a model with one token per character and a context that holds an opening and a story. Return its
    path."""
    return save_model(
        tmp_path_factory.mktemp("recipes") / "model", build_config("llama", layers=1, context=256)
    )


def test_every_algorithm_has_its_recipes() -> None:
    """Every algorithm has an online recipe. It also has an offline recipe, unless it divides by the sampling
    probability. Of those that do, GRPO has one. The recipes of `xpo` and `frozen` are among those of
    exploration (tests/pages/test_exploration_recipes.py)."""
    elsewhere = ("reward_model", "xpo", "frozen")
    here = {name: algorithm for name, algorithm in ALGORITHMS.items() if name not in elsewhere}
    offline = {
        name
        for name, algorithm in here.items()
        if not getattr(algorithm(algorithm.Config(**needed(name))).requires, "ratio_based", False)
    }
    stems = {f"{name}_online" for name in here} | {f"{name}_offline" for name in offline}
    assert {path.stem for path in RECIPES} == stems | OFFLINE_TOO | VARIANTS | FURTHER
    for path in (path for path in RECIPES if path.stem not in FURTHER):
        given = yaml.safe_load(path.read_text(encoding="utf-8"))
        name = "sft" if path.stem in VARIANTS else path.stem.rpartition("_")[0]
        kind = "offline" if given["oracle"]["name"] == "recorded" else "online"
        assert (given["algorithm"]["name"], path.stem.rpartition("_")[2]) == (name, kind)


def needed(name: str) -> dict[str, int]:
    """Return settings that have no default and must be given."""
    return {"max_length": 8} if name == "dr_grpo" else {}


@pytest.mark.sample(
    "dpo_buffer",
    "dpo_online",
    "grpo_offline",
    "grpo_online",
    "kto_offline",
    "ppo_offline",
    "ppo_online",
    "sft_chat_offline",
    "vine_online",
    seconds=13.4,
)
@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_learns_for_two_steps(
    path: Path, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each recipe learns for two steps with a random model and small sizes. The lowest threshold accepts
    every story of this model."""
    monkeypatch.chdir(ROOT)
    given = yaml.safe_load(path.read_text(encoding="utf-8"))["algorithm"]
    small = {
        "model.path": model,
        "run_dir": tmp_path / "run",
        "algorithm.prompts": 4,
        "sampling.max_new_tokens": 6,
        "stop.max_steps": 2,
    }
    small |= {"evaluation.max_prompts": 2, "evaluation.every": 2, "prompts.max_prompts": 8}
    small |= {"algorithm.threshold": -9} if "threshold" in given else {}
    assert oat("train", path, *(word for name, value in small.items() for word in (f"--{name}", value))) == 0
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert all(
        row["rows/trained"] > 0 and row["optim/grad_norm"] > 0 and math.isfinite(row["loss/total"])
        for row in rows[1:]
    )
    assert {"eval/sampled"} <= rows[0].keys() & rows[2].keys()
