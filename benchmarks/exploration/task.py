"""The task of the comparison: a start model, prompts, and a hidden reward model that the oracle asks.

By default the start is the quickstart's, whose sums mostly lack the carry. With `MODEL=` it is a story model,
and the prompts are the openings of stories. The hidden reward model is trained by our own trainer, from
another backbone than the policy's, on recorded pairs: of sums, the right answer was chosen, or in a third of
the pairs the nearer of two; of stories, the more cheerful one.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
from provenance import ROOT

from oat import Trainer
from oat.build.speaker import GenerationOptions, load_speaker
from oat.commands.export import export_run
from oat.commands.generate import generate
from oat.models.loading import save_lm
from oat.oracles.rules.sentiment import cheerful
from oat.quickstart import make_start
from oat.quickstart.task import MAX_NEW_TOKENS, build_model, build_task, build_tokenizer, supervise

SEED, JUDGE_SEED = 7, 77
JUDGE_PAIRS, JUDGE_EPOCHS, JUDGE_STEPS = 6_000, 8, 700
HELD_OUT = 128
OFFSETS = (-20, -11, -10, -9, -2, -1, 1, 2, 9, 10, 11, 20)
"""Differences of wrong answers from right ones, in the pairs of the hidden reward model."""


def prepare(folder: Path, model: str | None) -> dict[str, Any]:
    """Write what is missing of the task into a folder, and return its sections of a configuration.

    Args:
        model: a story model; None: the quickstart's start.
    """
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if model is None:
        if not (folder / "start").exists():
            make_start(folder, SEED)
        start, prompts, held_out = folder / "start", folder / "train.jsonl", folder / "heldout.jsonl"
        sampling = {"max_new_tokens": MAX_NEW_TOKENS, "temperature": 1.3}
        prompts_of = {"path": str(prompts), "reference_key": "answer"}
    else:
        start = Path(model)
        prompts, held_out = (
            ROOT / "configs" / "stories" / name for name in ("train_said.jsonl", "heldout_said.jsonl")
        )
        sampling = {"max_new_tokens": 48}
        prompts_of = {"path": str(prompts)}
    if not (folder / "judge").exists():
        _train_judge(folder, str(start), model)
    oracle = {"name": "reward_model", "path": str(folder / "judge"), "labels": "bernoulli"}
    return {
        "model": {"path": str(start)},
        "prompts": prompts_of,
        "sampling": sampling,
        "engine": {"max_rows": 256},
        "oracle": oracle,
        "evaluation": {"path": str(held_out), "max_prompts": HELD_OUT, "samples": 4},
        "tracking": {"samples": 0},
    }


def _train_judge(folder: Path, start: str, model: str | None) -> None:
    """Train the hidden reward model, and export it."""
    if model is None:
        backbone, pairs = _backbone(folder), _pairs_of_sums()
    else:
        backbone, pairs = start, _pairs_of_stories(start)
    text = "".join(json.dumps(pair) + "\n" for pair in pairs)
    (folder / "judge_pairs.jsonl").write_text(text, encoding="utf-8")
    trainer = Trainer(
        run_dir=str(folder / "judge_run"),
        seed=JUDGE_SEED,
        model={"path": backbone},
        prompts={"path": str(folder / "judge_pairs.jsonl"), "epochs": JUDGE_EPOCHS},
        oracle={"name": "recorded"},
        algorithm={"name": "reward_model", "prompts": 64, "held_out": 0.1},
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


def _backbone(folder: Path) -> str:
    """Make a smaller model than the start, with other random weights, and teach it right sums."""
    place = folder / "judge_backbone"
    if not place.exists():
        tokenizer = build_tokenizer()
        lm = build_model(tokenizer, JUDGE_SEED, hidden=64, layers=3)
        task = build_task(SEED)
        supervise(lm, tokenizer, [(s, s.right) for s, _ in task.demonstrations])
        save_lm(lm, tokenizer, str(place))
    return str(place)


def _pairs_of_sums() -> list[dict[str, str]]:
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


def _pairs_of_stories(start: str) -> list[dict[str, str]]:
    """Return pairs of sampled stories. The chosen one is more cheerful."""
    speaker = load_speaker(start, GenerationOptions(seed=JUDGE_SEED, max_new_tokens=48))
    found = []
    for line in generate(speaker, str(ROOT / "configs" / "stories" / "train_said.jsonl"), 8):
        record = json.loads(line)
        texts = record["responses"]
        values = cheerful([record["prompt"]] * len(texts), texts)
        for first in range(0, len(texts) - 1, 2):
            order = sorted((first, first + 1), key=lambda place: -values[place])
            if values[order[0]] > values[order[1]]:
                chosen, rejected = (texts[place] for place in order)
                found.append({"prompt": record["prompt"], "chosen": chosen, "rejected": rejected})
    return found
