"""Helpers for tests of PPO: one scored response to each prompt, and a learner with a critic."""

import copy
from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np
import torch
from objectives import row

from oat.learner.learner import Learner
from oat.learner.optimiser import OptimiserSettings
from oat.seeds import Seeds
from oat.testing.made_up import tiny_model
from oat.types import Answer, Feedback, Group, Item, Key, Message, Prompt, Question


def feedback_of(
    sizes: Sequence[int], *, cut: Collection[int] = (), logps: Sequence[np.ndarray] | None = None
) -> Feedback:
    """Return one scored response to each prompt.

    Args:
        sizes: number of tokens of each response.
        cut: the responses that the length limit cut.
        logps: recorded log-probabilities of each response; None: made-up ones of an older version.
    """
    generator = np.random.default_rng(0)
    items = []
    for number, size in enumerate(sizes):
        made = row(generator, 2 + number % 3, size)
        if logps is not None:
            recorded = {"raw_logps": logps[number], "sampled_logps": logps[number]}
            versions = np.ones(size, np.int32)
            response = replace(made.segments[1], versions=versions, **recorded)
            made = replace(made, segments=(made.segments[0], response))
        if number in cut:
            made = replace(made, finish_reason="length")
        group = Group(Prompt(number + 1, number, (Message("user", "p"),)), (made,))
        key, score = Key("train", 1, 0, number), float(generator.normal())
        question = Question.about(group, key, "score", (0,))
        items.append(Item(group, question, Answer(key, (score,), ("ok",), 1), None))
    return Feedback(1, tuple(items), len(items))


def learner_of(
    micro: int | None = 64, rate: float = 1e-2, *, double: bool = False, tokens: int | None = None
) -> Learner:
    """Return a learner with a policy, another model as the reference, and a critic with a larger head.

    Args:
        micro, tokens: limits of a forward pass.
        double: True: the models compute in float64.
    """
    models = {name: copy.deepcopy(tiny_model(name)) for name in ("policy", "reference", "critic")}
    with torch.no_grad():
        models["critic"].score.weight.mul_(8)  # type: ignore[attr-defined]
    for model in models.values() if double else ():
        model.lm.module.double()  # type: ignore[attr-defined]
        model.module.double()
    settings = OptimiserSettings(rate, max_grad_norm=1e9)
    optimisers = {"policy": settings, "critic": settings}
    return Learner(models, optimisers, micro_batch_size=micro, micro_batch_tokens=tokens, seeds=Seeds(0))
