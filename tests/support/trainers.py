"""Trainers of the Python API, and configurations of the same runs."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fixtures import World
from transformers import AutoModelForCausalLM, AutoTokenizer


def letters(prompts: Sequence[str], completions: Sequence[str], **columns: Any) -> list[float]:
    return [text.count("a") + 0.1 * text.count("b") for text in completions]


def lines(world: World, run_dir: Path, **changes: Any) -> dict[str, Any]:
    """Return the values of the tests' configuration, for a run of four steps."""
    tree = world.tree("grpo", run_dir) | {"oracle": letters, "engine": {"threads": 1}}
    return tree | changes


def objects(world: World) -> dict[str, Any]:
    records = [json.loads(line) for line in (world.folder / "train.jsonl").read_text().splitlines()]
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(world.folder / "model"),
        AutoTokenizer.from_pretrained(world.folder / "model"),
    )
    return {"model": model, "tokenizer": tokenizer, "prompts": {"path": records, "reference_key": "answer"}}
