"""The recipes of exploration run for two rounds, are killed and continued, with a tiny model."""

import json
import signal
from pathlib import Path

import pytest
import torch
from fixtures import forked, kill_at, oat
from safetensors.torch import load_file
from tiny_models import build_config, save_model

from oat.commands.digest import digest_run

CONFIGS = Path(__file__).parents[2] / "configs"
LENGTH = """
def length(prompts, completions, **columns):
    return [float(sum(map(ord, text)) % 97) for text in completions]
"""
NAMES = ("sea_dpo", "sea_simpo", "ee4llm", "apl", "xpo")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(
        tmp_path_factory.mktemp("recipes") / "model", build_config("llama", layers=1, context=256)
    )


def words(name: str, model: str, run_dir: Path) -> list[str]:
    """Return the arguments of two steps of a recipe, with few samples, and a burn-in of one step."""
    flags = {
        "model": model,
        "run_dir": run_dir,
        "stop.max_steps": 2,
        "sampling.max_new_tokens": 6,
        "algorithm.prompts": 6,
        "evaluation.max_prompts": 4,
        "checkpoint.every": 1,
        "tracking.keep_trajectories": "true",
        **({} if name == "xpo" else {"explorer.samples": 4}),
        **({"explorer.model_labels.burn_in": 1} if name == "sea_dpo" else {}),
        **({"evaluation.best_of": 3} if name == "ee4llm" else {}),
    }
    given = [str(word) for flag, value in flags.items() for word in (f"--{flag}", value)]
    return ["train", str(CONFIGS / f"{name}.yaml"), *given]


def rows(run_dir: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.sample("sea_dpo", seconds=5.1)
@pytest.mark.filterwarnings("ignore::oat.errors.OatWarning")
@pytest.mark.parametrize("name", NAMES)
def test_two_rounds(name: str, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A recipe runs two rounds from the project's folder. Killed in the second round, while its questions are
    recorded, and continued, it is the same run."""
    monkeypatch.chdir(CONFIGS.parent)
    run_dir = tmp_path / "run"
    assert oat(*words(name, model, run_dir)) == 0
    last = rows(run_dir)[-1]
    assert last["step"] == 2
    expected = {
        "sea_dpo": "explorer/model_frac",
        "sea_simpo": "explorer/pair_variance",
        "ee4llm": "eval/best",
        "apl": "explorer/margin",
        "xpo": "loss/optimism",
    }
    assert expected[name] in last

    def die() -> int:
        from oat.ledger.outstanding import Outstanding

        kill_at(Outstanding, "submit", 4)
        return oat(*words(name, model, tmp_path / "other"))

    assert forked(die, tmp_path / "log") == -signal.SIGKILL, (tmp_path / "log").read_text()
    assert oat(*words(name, model, tmp_path / "other")) == 0
    assert digest_run(tmp_path / "other") == digest_run(run_dir)


@pytest.mark.inventory(76)
@pytest.mark.filterwarnings("ignore::oat.errors.OatWarning")
def test_the_policy_of_ee4llm_stays_and_its_ensemble_learns(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(CONFIGS.parent)
    (tmp_path / "reward.py").write_text(LENGTH, encoding="utf-8")
    given = [*words("ee4llm", model, tmp_path / "run"), "--oracle.name", f"{tmp_path}/reward.py:length"]
    assert oat(*given) == 0
    assert oat("export", tmp_path / "run", tmp_path / "out") == 0
    start, end = (load_file(Path(folder) / "model.safetensors") for folder in (model, tmp_path / "out"))
    assert start.keys() == end.keys()
    assert all(torch.equal(start[name].float(), end[name].float()) for name in start)
    assert rows(tmp_path / "run")[-1]["ensemble/pairs"] > 0
