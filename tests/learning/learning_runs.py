"""The runs of the learning tests: their model, their data, and what they reach."""

import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from cases import Case
from fixtures import write_jsonl
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from oat.cli import main
from oat.plugins.loading import load_symbol

HERE = Path(__file__).parent
CONFIG = """
run_dir: {root}/run
model: {{path: {root}/model}}
prompts: {{path: {root}/{prompts}}}
render: {{special_tokens: drop}}  # the random model often writes its padding token
sampling: {{max_new_tokens: 4}}
engine: {{name: torch, max_rows: 256}}
oracle: {{name: {oracle}}}
algorithm: {{name: {name}, prompts: 32, {options}}}
learner: {{learning_rate: 4e-3, micro_batch_size: 256}}
evaluation:
  {{path: {root}/heldout.jsonl, oracle: "{here}/reward.py:even_share",
    every: 100, samples: 16, greedy: false}}
checkpoint: {{every: 100}}
compute: {{threads: 1}}
stop: {{max_steps: 14}}
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("learning")
    characters = ["<pad>", "<eos>", *"0123456789abcdef"]
    tokenizer = Tokenizer(models.WordLevel({c: i for i, c in enumerate(characters)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>").save_pretrained(
        root / "model"
    )
    torch.manual_seed(0)
    shape = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": 32,
        "eos_token_id": 1,
    }
    LlamaForCausalLM(LlamaConfig(vocab_size=len(characters), **shape)).save_pretrained(root / "model")
    prompts = [{"prompt": f"{a}{b}"} for a in "abcdef" for b in "abcdef"]
    for name, part in {"train": prompts[:30], "heldout": prompts[30:]}.items():
        write_jsonl(root / f"{name}.jsonl", part)
    write_jsonl(root / "pairs.jsonl", pairs := list(recorded(prompts[:30])))
    singles = [
        {"prompt": pair["prompt"], "completion": pair[name], "label": name == "chosen"}
        for pair in pairs
        for name in ("chosen", "rejected")
    ]
    write_jsonl(root / "labels.jsonl", singles)
    return root


def recorded(prompts: list[dict[str, str]]) -> Iterator[dict[str, str]]:
    """Yield sixteen pairs per prompt: the best and the worst of 64 random strings."""
    even_share, generator = load_symbol(f"{HERE}/reward.py:even_share"), random.Random(0)
    for prompt in prompts * 16:
        texts = ["".join(generator.choices("0123456789abcdef", k=4)) for _ in range(64)]
        shares = even_share([], texts)
        yield {
            **prompt,
            "chosen": texts[shares.index(max(shares))],
            "rejected": texts[shares.index(min(shares))],
        }


def run(
    root: Path, directory: Path, case: Case, name: str, *flags: str, is_offline: bool = False
) -> tuple[float, float]:
    """Train, online or from recorded data, and return the held-out sampled score before and after."""
    prompts, oracle = (
        ("train.jsonl", f'"{HERE}/reward.py:even_share"') if not is_offline else (case.records, "recorded")
    )
    options = ", ".join(filter(None, (case.options, case.offline if is_offline else case.online)))
    config = directory / "config.yaml"
    config.write_text(
        CONFIG.format(root=root, here=HERE, name=name, options=options, prompts=prompts, oracle=oracle)
    )
    recorded = ("--prompts.responses", case.responses) if is_offline and case.responses else ()
    command = ["train", str(config), "--run_dir", str(directory / "run"), *case.flags, *recorded, *flags]
    assert main(command) == 0
    rows = [json.loads(line) for line in (directory / "run" / "metrics.jsonl").read_text().splitlines()]
    return rows[0]["eval/sampled"], rows[-1]["eval/sampled"]
