"""Each algorithm learns: an online run from YAML raises a held-out sampled score by a stated amount; with the sign of its loss flipped the
same run ends below its start."""

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from oat.cli import main

HERE = Path(__file__).parent
RISE = 0.2
STEPS = {"dpo": 25, "grpo": 20}
CONFIG = """
run_dir: {root}/run
model: {{path: {root}/model}}
prompts: {{path: {root}/train.jsonl}}
sampling: {{max_new_tokens: 4}}
engine: {{name: torch, max_rows: 256}}
oracle: {{name: "{here}/reward.py:even_share"}}
algorithm: {{name: {algorithm}, prompts: 32, samples: {samples}}}
learner: {{learning_rate: 4e-3, micro_batch_size: 256}}
evaluation: {{path: {root}/heldout.jsonl, every: 100, samples: 16, greedy: false}}
checkpoint: {{every: 100}}
compute: {{threads: 1}}
stop: {{max_steps: {steps}}}
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("learning")
    characters = ["<pad>", "<eos>", *"0123456789abcdef"]
    tokenizer = Tokenizer(models.WordLevel({c: i for i, c in enumerate(characters)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>").save_pretrained(root / "model")
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 32}
    LlamaForCausalLM(LlamaConfig(vocab_size=len(characters), **shape)).save_pretrained(root / "model")
    prompts = [{"prompt": f"{a}{b}"} for a in "abcdef" for b in "abcdef"]
    for name, part in {"train": prompts[:30], "heldout": prompts[30:]}.items():
        (root / f"{name}.jsonl").write_text("\n".join(json.dumps(prompt) for prompt in part) + "\n")
    return root


def run(root: Path, directory: Path, algorithm: str, name: str, *flags: str) -> tuple[float, float]:
    """The held-out sampled score before and after a run."""
    config = directory / "config.yaml"
    samples = 2 if algorithm == "dpo" else 8
    config.write_text(CONFIG.format(root=root, here=HERE, algorithm=name, samples=samples, steps=STEPS[algorithm]))
    assert main(["train", str(config), "--run_dir", str(directory / "run"), *flags]) == 0
    rows = [json.loads(line) for line in (directory / "run" / "metrics.jsonl").read_text().splitlines()]
    return rows[0]["eval/sampled"], rows[-1]["eval/sampled"]


@pytest.mark.parametrize("algorithm", ["dpo", "grpo"])
def test_learns(root: Path, tmp_path: Path, algorithm: str) -> None:
    start, end = run(root, tmp_path, algorithm, algorithm)
    assert end >= start + RISE


@pytest.mark.parametrize(("algorithm", "flipped"), [("dpo", "FlippedDPO"), ("grpo", "FlippedGRPO")])
def test_a_flipped_sign_is_noticed(root: Path, tmp_path: Path, algorithm: str, flipped: str) -> None:
    start, end = run(root, tmp_path, algorithm, f'"{HERE}/flipped.py:{flipped}"')
    assert end < start + RISE
    assert end < start


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("algorithm", ["dpo", "grpo"])
def test_learns_with_other_seeds(root: Path, tmp_path: Path, algorithm: str, seed: int) -> None:
    start, end = run(root, tmp_path, algorithm, algorithm, "--seed", str(seed))
    assert end >= start + RISE
