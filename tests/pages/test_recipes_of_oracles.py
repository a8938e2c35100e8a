"""The recipes of configs/oracles: two steps of each, with a tiny model."""

import json
import re
import string
from pathlib import Path

import pytest
from fixtures import make_model, oat

from oat.oracles.builtin import BUILTIN
from oat.plugins.registry import ORACLES

ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted((ROOT / "configs" / "oracles").glob("*.yaml"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model with one token per character and a context that holds questions with examples."""
    folder = tmp_path_factory.mktemp("model")
    make_model(
        folder,
        tokens=[*string.printable, "<think>", "</think>", "<answer>", "</answer>", "happy", r"\boxed{"],
    )
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(
        json.dumps({**config, "max_position_embeddings": 4096}), encoding="utf-8"
    )
    return folder


def test_every_oracle_by_name_has_a_recipe() -> None:
    recipes = [path.read_text(encoding="utf-8") for path in (ROOT / "configs").rglob("*.yaml")]
    for name in (*ORACLES, *BUILTIN):
        assert any(re.search(rf"name: {name}\b(?!:)", text) for text in recipes), name


@pytest.mark.sample("isolated", "environment", seconds=5.4)
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_two_steps(recipe: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert (
        oat(
            "train",
            recipe,
            "--model",
            model,
            "--run_dir",
            tmp_path / "run",
            "--sampling.max_new_tokens",
            16,
            "--stop.max_steps",
            2,
        )
        == 0
    )
    rows = [
        json.loads(line)
        for line in (tmp_path / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert rows[-1]["answers/failed_frac"] == rows[-1]["answers/abstained_frac"] == 0
    assert (rows[-1]["oracle/queries"] > 0) == (recipe.stem not in ("environment", "calculator")), (
        "which ask nobody"
    )
