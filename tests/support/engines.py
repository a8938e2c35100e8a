"""Helpers for tests of engines: an engine of tiny models, requests, and logits of a plain forward pass."""

import math

import numpy as np
import torch
from tiny_models import (
    NUM_TOKENS,
    build_tokenizer,
)

from oat import seeds
from oat.engines.torch import TorchEngine
from oat.types import Completion, Group, Message, Prompt, Request, Sampling, Segment, Trajectory

SAMPLINGS = {
    "none": Sampling(6),
    "temperature": Sampling(6, temperature=1.7),
    "top_k": Sampling(6, top_k=5, keep_sets=True),
    "top_p": Sampling(6, top_p=0.8137, keep_sets=True),
    "min_p": Sampling(6, min_p=0.1137, keep_sets=True),
    "all": Sampling(6, temperature=1.3, top_k=12, top_p=0.9137, min_p=0.0537, keep_sets=True),
    "greedy": Sampling(6, temperature=0.0),
}


KEYS = seeds.Seeds(11)


_TOKENIZER = build_tokenizer()


def DECODE(ids, after=()):
    """Decode ids with a tokenizer whose text does not depend on the ids before."""
    return _TOKENIZER.decode(ids)


def build_engine(lm, **options):
    return TorchEngine(
        {"sampler": lm}, **{"num_tokens": NUM_TOKENS, "stop_ids": [0], "decode": DECODE, **options}
    )


def model_of(engine):
    """Return the model that an engine computes with."""
    return engine._slots["sampler"]


def page_bytes(engine) -> int:
    """Return the bytes of a page of an engine's cache."""
    return engine._page_bytes[id(model_of(engine))]


def build_requests(*samplings: Sampling, each: int = 3, seed: int = 0) -> list[Request]:
    """Return `each` requests for each sampling, with prompts of 1 to 14 tokens."""
    generator = np.random.default_rng(seed)
    return [
        Request(
            generator.integers(1, NUM_TOKENS, generator.integers(1, 15)).astype(np.int32),
            sampling,
            KEYS.key("test", seed, number, sample),
        )
        for number, sampling in enumerate(samplings)
        for sample in range(each)
    ]


def run(engine, requests, slot="sampler"):
    completions = sorted(engine.generate(requests, slot), key=lambda completion: completion.index)
    assert [completion.index for completion in completions] == list(range(len(requests)))
    return completions


def groups_of(requests: list[Request], completions: list[Completion], samples: int) -> list[Group]:
    """Return the completions as groups, of so many requests with the same prompt each."""
    rows = []
    for request, completion in zip(requests, completions, strict=True):
        response = Segment("model", completion.ids, mask=np.ones(len(completion.ids), dtype=bool))
        segments = (Segment("context", request.ids), response)
        rows.append(Trajectory("sampler", segments, "stop", "", features=completion.features))
    return [
        Group(Prompt(1, begin // samples, (Message("user", "p"),)), tuple(rows[begin : begin + samples]))
        for begin in range(0, len(rows), samples)
    ]


@torch.no_grad()
def plain_logits(module, ids: np.ndarray) -> list[list[float]]:
    """Return the logits of a sequence as float64 lists, computed without a cache."""
    return module(input_ids=torch.from_numpy(ids.astype(np.int64))[None]).logits[0].double().tolist()


def log_normaliser(logits: list[float]) -> float:
    highest = max(logits)
    return highest + math.log(sum(math.exp(value - highest) for value in logits))


def bits(completion) -> tuple:
    kept = completion.kept
    return (
        completion.ids.tobytes(),
        completion.raw_logps.tobytes(),
        completion.sampled_logps.tobytes(),
        completion.finish_reason,
        kept and (kept.ids.tobytes(), kept.offsets.tobytes()),
    )


ONE = np.array([1], np.int32)
