"""The tasks of the comparison: a start model, prompts, and a hidden reward model that the oracle asks.

* Sums, by default: the start is the quickstart's, whose sums mostly lack the carry. The hidden reward model
  has learned pairs in which the right answer was chosen, or in a third of the pairs the nearer of two. Its
  backbone is a smaller model that had learned right sums.
* Stories, with `MODEL=`: the start is a story model, and the prompts are the openings of stories. The hidden
  reward model has learned pairs of the start's stories in which the more cheerful one was chosen. Its
  backbone is a small Llama with random weights.

Our own trainer trains the reward models. The features of the ensemble are those that `oat features` finds
best for the task.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from provenance import ROOT
from transformers import LlamaConfig, LlamaForCausalLM

from oat import Trainer
from oat.answering.speaker import GenerationOptions, load_speaker
from oat.commands.export import export_run
from oat.commands.generate import generate
from oat.models.causal_lm import CausalLM
from oat.models.loading import load_tokenizer, save_lm
from oat.oracles.rules.sentiment import cheerful
from oat.quickstart import make_start
from oat.quickstart.task import MAX_NEW_TOKENS, build_model, build_task, build_tokenizer, supervise

SEED, JUDGE_SEED = 7, 77
JUDGE_PAIRS = 6_000
JUDGE_STEPS = 700
JUDGE_WIDTH = 64
STORIES = ROOT / "configs" / "stories"
STORIES_A_PROMPT = 32
"""Number of sampled stories from which pairs for the hidden reward model are made."""
STORY_TOKENS = 48
HELD_OUT = 128
OFFSETS = (-20, -11, -10, -9, -2, -1, 1, 2, 9, 10, 11, 20)
"""Differences of wrong answers from right ones, in the pairs of the hidden reward model."""

Pairs = Sequence[dict[str, str]]


def prepare(folder: Path, model: str | None) -> dict[str, Any]:
    """Write what is missing of the task into a folder, and return its sections of a configuration. The
    section `explorer` has the features only.

    Args:
        model: a story model; None: sums.
    """
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    task = _sums(folder) if model is None else _stories(folder, model)
    return {
        **task,
        "engine": {"max_rows": 256},
        "oracle": {"name": "reward_model", "path": str(folder / "judge"), "labels": "bernoulli"},
        "tracking": {"samples": 0},
    }


def _sums(folder: Path) -> dict[str, Any]:
    if not (folder / "start").exists():
        make_start(folder, SEED)
    if not (folder / "judge").exists():
        _train_judge(folder, _teach_sums(folder), _pairs_of_sums())
    return {
        "model": {"path": str(folder / "start")},
        "prompts": {"path": str(folder / "train.jsonl"), "reference_key": "answer"},
        "sampling": {"max_new_tokens": MAX_NEW_TOKENS, "temperature": 1.3},
        "explorer": {"features": {"backbone": "policy", "layer": "all", "pooling": "last"}},
        "evaluation": {"path": str(folder / "heldout.jsonl"), "max_prompts": HELD_OUT, "samples": 4},
    }


def _stories(folder: Path, model: str) -> dict[str, Any]:
    if not (folder / "judge").exists():
        _train_judge(folder, _random_model(folder, model), _pairs_of_stories(model))
    held_out = STORIES / "heldout_said.jsonl"
    return {
        "model": {"path": model},
        "prompts": {"path": str(STORIES / "train_said.jsonl")},
        "sampling": {"max_new_tokens": STORY_TOKENS},
        "explorer": {"features": {"backbone": "policy", "layer": "all", "pooling": "mean"}},
        "evaluation": {"path": str(held_out), "max_prompts": HELD_OUT, "samples": 4},
    }


def _train_judge(folder: Path, backbone: Path, pairs: Pairs) -> None:
    """Train the hidden reward model, and export it."""
    text = "".join(json.dumps(pair) + "\n" for pair in pairs)
    (folder / "judge_pairs.jsonl").write_text(text, encoding="utf-8")
    batch = 64
    trainer = Trainer(
        run_dir=str(folder / "judge_run"),
        seed=JUDGE_SEED,
        model={"path": str(backbone)},
        prompts={"path": str(folder / "judge_pairs.jsonl"), "epochs": 2 + JUDGE_STEPS * batch // len(pairs)},
        oracle={"name": "recorded"},
        algorithm={"name": "reward_model", "prompts": batch, "held_out": 0.1},
        learner={
            "learning_rate": 3e-4,
            "schedule": "cosine",
            "schedule_steps": JUDGE_STEPS,
            "warmup_steps": 10,
            "micro_batch_size": 128,
        },
        checkpoint={"every": 100_000},
        compute={"threads": 1},
        stop={"max_steps": JUDGE_STEPS},
        quiet=True,
    )
    trainer.train()
    export_run(folder / "judge_run", folder / "judge")


def _teach_sums(folder: Path) -> Path:
    """Make a smaller model than the start, with other random weights, and teach it right sums."""
    place = folder / "judge_backbone"
    if not place.exists():
        tokenizer = build_tokenizer()
        lm = build_model(tokenizer, JUDGE_SEED, hidden=JUDGE_WIDTH, layers=3)
        task = build_task(SEED)
        supervise(lm, tokenizer, [(s, s.right) for s, _ in task.demonstrations])
        save_lm(lm, tokenizer, str(place))
    return place


def _random_model(folder: Path, start: str) -> Path:
    """Make a small Llama with random weights that reads the tokens of the start."""
    import torch

    place = folder / "judge_backbone"
    if not place.exists():
        tokenizer = load_tokenizer(start)
        config = LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=JUDGE_WIDTH,
            intermediate_size=2 * JUDGE_WIDTH,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=512,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
        with torch.random.fork_rng():
            torch.manual_seed(JUDGE_SEED)
            save_lm(CausalLM(LlamaForCausalLM(config)), tokenizer, str(place))
    return place


def _pairs_of_sums() -> Pairs:
    """Return pairs of answers to sums. The chosen one is right, or in a third of the pairs nearer to it."""
    generator = np.random.default_rng(JUDGE_SEED)
    train = build_task(SEED, demonstrations=0).train
    found = []
    for number in range(JUDGE_PAIRS):
        s = train[number % len(train)]
        right = s.first + s.second
        near, far = sorted(generator.choice(OFFSETS, 2, replace=False), key=abs)
        near = near if number % 3 == 0 else 0
        if abs(near) < abs(far):
            answers = {"chosen": str(right + near), "rejected": str(right + far)}
            found.append({"prompt": s.prompt, **answers})
    return found


def _pairs_of_stories(start: str) -> Pairs:
    """Return pairs of sampled stories. The chosen one is more cheerful."""
    speaker = load_speaker(start, GenerationOptions(seed=JUDGE_SEED, max_new_tokens=STORY_TOKENS))
    found = []
    for line in generate(speaker, str(STORIES / "train_said.jsonl"), STORIES_A_PROMPT):
        record = json.loads(line)
        texts = record["responses"]
        values = cheerful([record["prompt"]] * len(texts), texts)
        for first in range(0, len(texts) - 1, 2):
            order = sorted((first, first + 1), key=lambda place: -values[place])
            if values[order[0]] > values[order[1]]:
                chosen, rejected = (texts[place] for place in order)
                found.append({"prompt": record["prompt"], "chosen": chosen, "rejected": rejected})
    return found
