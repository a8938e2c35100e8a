"""Helpers for tests of the engine and of model loading: tiny random models on disk, and a slow sampling
distribution in plain Python."""

import math
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GPTNeoXConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
)

from oat.types import Sampling

NUM_TOKENS = 40
VOCAB_ROWS = 44
CONTEXT = 48
CHARACTERS = ["<eos>", *"abcdefghijklmnopqrstuvwxyz .,!?01234567"][:NUM_TOKENS]
FAMILIES = ("gpt_neox", "llama", "qwen3")


def build_config(family: str, vocab_rows: int = VOCAB_ROWS, layers: int = 2, context: int = CONTEXT):
    common = {
        "vocab_size": vocab_rows,
        "hidden_size": 32,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "intermediate_size": 45,
    }
    common |= {"max_position_embeddings": context, "bos_token_id": 0, "eos_token_id": 0}
    if family == "gpt_neox":
        return GPTNeoXConfig(**common, attention_dropout=0.3, hidden_dropout=0.3)
    if family == "llama":
        return LlamaConfig(**common, num_key_value_heads=2, attention_dropout=0.3)
    return Qwen3Config(**common, num_key_value_heads=2, head_dim=8, tie_word_embeddings=True)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per character; decoding joins the characters."""
    tokenizer = Tokenizer(
        models.WordLevel({character: index for index, character in enumerate(CHARACTERS)}, unk_token="?")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", unk_token="?")


def save_model(directory: Path, config, scale: float = 5.0) -> str:
    """Save a random model with its tokenizer, and return its path. Matrices are scaled up, so that no
    distribution is flat."""
    with torch.random.fork_rng():
        torch.manual_seed(7)
        module = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim > 1:
                parameter.mul_(scale)
    module.save_pretrained(directory)
    build_tokenizer().save_pretrained(directory)
    return str(directory)


def save_reward_model(
    directory: Path,
    config,
    tokenizer: PreTrainedTokenizerFast | None = None,
    *,
    labels: int = 1,
    scale: float = 3.0,
) -> str:
    """Save a random sequence-classification model with its tokenizer, and return its path. Matrices are
    scaled up, so that scores differ."""
    config.num_labels = labels
    with torch.random.fork_rng():
        torch.manual_seed(11)
        module = AutoModelForSequenceClassification.from_config(config)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim > 1:
                parameter.mul_(scale)
    module.save_pretrained(directory)
    (tokenizer or build_tokenizer()).save_pretrained(directory)
    return str(directory)


def slow_distribution(logits: list[float], sampling: Sampling) -> dict[int, float]:
    """Return the log-probabilities of the ids that can be drawn, in ascending order of ids. They are computed
    by sorting lists."""
    ranked = sorted(
        (token for token in range(len(logits)) if logits[token] > -math.inf),
        key=lambda token: (-logits[token], token),
    )
    if sampling.temperature == 0:
        return {ranked[0]: 0.0}
    highest = logits[ranked[0]]
    mass = {token: math.exp((logits[token] - highest) / sampling.temperature) for token in ranked}
    if sampling.top_k:
        ranked = ranked[: sampling.top_k]
    if sampling.top_p < 1:
        total = sum(mass[token] for token in ranked)
        reached = 0.0
        nucleus = []
        for token in ranked:
            nucleus.append(token)
            reached += mass[token] / total
            if reached >= sampling.top_p:
                break
        ranked = nucleus
    kept = sorted(token for token in ranked if mass[token] >= sampling.min_p * mass[ranked[0]])
    total = sum(mass[token] for token in kept)
    return {token: math.log(mass[token] / total) if mass[token] else -math.inf for token in kept}


def save_llama(path: Path, *, vocab_size: int, hidden: int, inner: int, spread: float) -> Path:
    """Save a Llama of two layers with the same weights at every call.

    Args:
        spread: standard deviation of the weights. 0.1 is typical of real models, so rounding is not
            amplified.
    """
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=vocab_size,
        initializer_range=spread,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    return path
