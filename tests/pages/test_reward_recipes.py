"""The recipes of configs/reward_models run two steps on a tiny model, one after the other. PairRM's recipe is
tested in tests/oracles/test_oracle_pairrm.py."""

from pathlib import Path

import pytest
from fixtures import oat
from tiny_models import build_config, save_model

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "configs" / "reward_models"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Save a model with one token per character and a context that holds an opening and a story. Return its
    path."""
    return save_model(
        tmp_path_factory.mktemp("recipes") / "model", build_config("llama", layers=1, context=256)
    )


def flags(model: str, run_dir: Path) -> list[str]:
    return [
        "--model",
        model,
        "--run_dir",
        str(run_dir),
        "--algorithm.prompts",
        "3",
        "--prompts.max_prompts",
        "12",
        "--stop.max_steps",
        "2",
    ]


def test_all_but_that_of_pairrm_are_here() -> None:
    assert {path.stem for path in FOLDER.glob("*.yaml")} == {"train", "online", "dpo", "grpo", "dpo_pairrm"}


def test_a_reward_model_is_trained_exported_and_asked(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    assert oat("train", FOLDER / "train.yaml", *flags(model, tmp_path / "train")) == 0
    assert oat("export", tmp_path / "train", tmp_path / "judge") == 0
    asking = [
        "--oracle.path",
        tmp_path / "judge",
        "--sampling.max_new_tokens",
        "6",
        "--evaluation.max_prompts",
        "2",
    ]
    for recipe in ("dpo", "grpo"):
        assert oat("train", FOLDER / f"{recipe}.yaml", *flags(model, tmp_path / recipe), *asking) == 0
        assert (tmp_path / recipe / "checkpoints" / "latest").exists()


def test_a_reward_model_learns_from_what_is_sampled(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    assert (
        oat(
            "train",
            FOLDER / "online.yaml",
            *flags(model, tmp_path / "online"),
            "--sampling.max_new_tokens",
            "6",
        )
        == 0
    )
    assert (tmp_path / "online" / "checkpoints" / "latest").exists()
