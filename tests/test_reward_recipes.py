"""The recipes of configs/reward_models run two steps on tiny models; that of PairRM in tests/test_oracle_pairrm.py."""

from pathlib import Path

import pytest
import yaml
from fixtures import make_model, oat, write_jsonl
from tiny_models import save_reward_model
from transformers import AutoTokenizer, LlamaConfig

FOLDER = Path(__file__).parent.parent / "configs" / "reward_models"
RECIPES = [path for path in sorted(FOLDER.glob("*.yaml")) if path.stem != "dpo_pairrm"]
PAIRS = [{"prompt": f"{a}+{b}=", "chosen": "a" * a, "rejected": "b"} for a in range(1, 5) for b in range(3)]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_runs(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_model(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained("model")
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 64}
    save_reward_model(Path("judge"), LlamaConfig(vocab_size=len(tokenizer), **shape), tokenizer)
    for name in ("prompts", "heldout", "pairs"):
        write_jsonl(Path(f"{name}.jsonl"), PAIRS)
    Path("reward.py").write_text("def reward(prompts, completions, **columns):\n    return [float(len(set(text))) for text in completions]\n")
    given = yaml.safe_load(recipe.read_text(encoding="utf-8"))
    flags = ["--model.path", "model", "--render.template", "null", "--algorithm.prompts", "3", "--stop.max_steps", "2"]
    flags += ["--sampling.max_new_tokens", "6"] if "sampling" in given else []
    assert oat("train", recipe, *flags) == 0
    assert (tmp_path / "runs" / recipe.stem / "checkpoints" / "latest").exists()
