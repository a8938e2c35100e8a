"""The recipe of docs/over_optimisation.md, and the page's claims."""

import json
import re
from pathlib import Path

import pytest
import yaml
from fixtures import oat
from tiny_models import build_config, save_model

from oat.plugins.loading import load_symbol

ROOT = Path(__file__).parents[2]
RECIPE, GOLD = (ROOT / "configs" / "over_optimisation" / name for name in ("policy.yaml", "gold.py"))
PAGE = (ROOT / "docs" / "over_optimisation.md").read_text(encoding="utf-8")


def test_the_recipe_runs_and_is_plotted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The recipe runs with a random model and small sizes."""
    model = save_model(tmp_path / "model", build_config("llama", layers=1, context=256))
    monkeypatch.chdir(ROOT)
    small = {
        "model.path": model,
        "run_dir": tmp_path / "run",
        "algorithm.prompts": 4,
        "sampling.max_new_tokens": 6,
        "stop.max_steps": 2,
    }
    small |= {"evaluation.max_prompts": 2, "prompts.max_prompts": 8}
    assert (
        oat("train", RECIPE, *(word for name, value in small.items() for word in (f"--{name}", value))) == 0
    )
    rows = [
        json.loads(line)
        for line in (tmp_path / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    assert {"eval/kl", "eval/sampled", "eval/gold_sampled"} <= rows[0].keys() & rows[2].keys()
    assert oat("plot", tmp_path / "run", "--against", "sqrt_kl", "--out", tmp_path / "a.png") == 0
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert oat("export", tmp_path / "run", tmp_path / "best", "--step", "best") == 0


def test_the_gold_wants_what_the_proxy_wants_said_once() -> None:
    gold = load_symbol(f"{GOLD}:gold")
    cheerful, again, sad = gold(
        ["p"] * 3, ["They were happy and glad.", "happy happy happy happy happy", "They were sad."]
    )
    assert cheerful > again > 0 > sad
    assert again == pytest.approx(gold(["p"], ["happy happy"])[0] * (1 / 5) ** 2 / (1 / 2) ** 2, rel=0.2)
    assert gold(["p"], [""]) == [0.0]


def test_the_page_shows_the_settings_of_the_recipe() -> None:
    shown = yaml.safe_load(re.findall(r"```yaml\n(.*?)```", PAGE, flags=re.DOTALL)[0])
    given = yaml.safe_load(RECIPE.read_text(encoding="utf-8"))
    assert shown["alarms"]["gold"] == given["alarms"]["gold"]
    assert shown["checkpoint"] == given["checkpoint"]
    assert shown["evaluation"]["samples"] == given["evaluation"]["samples"]
