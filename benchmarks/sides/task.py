"""What both sides of a benchmark work on: the model, the prompts, and the lines in which a side is asked and answers.

Imported by every side in its own environment, so it needs numpy and torch, and transformers only to make the model.
"""

import json
import math
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

END = 2
"""Id of the end-of-text."""
SIZES = {"5M": (4096, 256, 4), "50M": (16384, 512, 10), "tiny": (256, 32, 2)}
"""Vocabulary, width and layers. Phi's architecture: its head has a bias, and all sides have it."""


def make_model(size: str, directory: Path, vocabulary: int | None = None) -> None:
    """Random weights, and an end-of-text whose probability is 1 / 32 at every step but for a few thousandths: its row of the head is zero, its bias
    makes up for the mean logsumexp of the others."""
    import torch
    from transformers import PhiConfig, PhiForCausalLM

    rows, width, layers = SIZES[size]
    torch.manual_seed(0)
    config = PhiConfig(
        vocab_size=vocabulary or rows,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=max(1, width // 64),
        max_position_embeddings=2048,
        hidden_act="gelu",
        bos_token_id=1,
        eos_token_id=END,
        tie_word_embeddings=False,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attention_dropout=0.0,
    )
    model = PhiForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight[END] = 0
        model.lm_head.bias.zero_()
        logits = model(torch.randint(3, vocabulary or rows, (16, 48))).logits
        logits[..., END] = -math.inf
        model.lm_head.bias[END] = logits.logsumexp(-1).mean() - math.log(31)
    model.save_pretrained(directory)


def prompts(count: int, vocabulary: int, seed: int = 0) -> list[np.ndarray]:
    """Prompts of 16 to 64 random tokens."""
    generator = np.random.default_rng(seed)
    return [generator.integers(3, vocabulary, generator.integers(16, 65)) for _ in range(count)]


def ragged(rows: int, vocabulary: int, *, mean: int = 128, cap: int = 1024, seed: int = 0) -> list[np.ndarray]:
    """Responses of geometric lengths."""
    generator = np.random.default_rng(seed)
    return [generator.integers(3, vocabulary, min(int(generator.geometric(1 / mean)), cap)) for _ in range(rows)]


def peak_gb() -> float:
    """Most memory this process has ever held, 10^9 bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def serve(verbs: dict[str, Callable[..., Any]]) -> None:
    """Answer each line {"verb": ..., ...} of the standard input with a line of JSON, until it ends."""
    answers = sys.stdout
    sys.stdout = sys.stderr
    for line in sys.stdin:
        command = json.loads(line)
        answers.write(json.dumps(verbs[command.pop("verb")](**command)) + "\n")
        answers.flush()
