"""Supervised fine-tuning: the mean negative log-probability of given responses.

The rows are the step's samples, whoever wrote them. Recorded demonstrations make it plain supervised learning, one turn or a conversation:
the tokens that are trained are those that the trajectory marks. Samples of the policy with a `threshold` make it rejection-sampling
fine-tuning (ReST, arXiv:2308.08998; RFT, arXiv:2308.01825): only responses whose score reaches it are learned.

Departures:
1. An exact duplicate (the same prompt and response among what a step learns from, token for token) is learned once; the others are dropped and
   counted.
2. The threshold is any score, not "correct".
3. Each step learns from the samples of that step only, with the newest weights as the sampler, unless there is a `learner.buffer`.

Not handled: packing; a limit on the responses of one prompt (`reduction: prompt` gives every prompt the same weight).
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from oat.algorithms.base import OF_RESPONSES, Forward, Objective, Outputs, View, answer_metrics, response_metrics, reward_metrics
from oat.algorithms.group import scored_rows
from oat.errors import ConfigError
from oat.types import Batch, Feedback, Loss, Plan, Requires, Trajectory


@dataclass(frozen=True)
class SFTConfig:
    prompts: int = 64
    """Prompts a step."""
    samples: int = 1
    """Responses a prompt."""
    threshold: float | None = None
    """Least score of a response that is learned; without one every response is, no score is read, and only oracles that cost
    nothing (`recorded`, `environment`) are asked."""
    reduction: Literal["sequence", "token", "prompt"] = "sequence"
    """Mean over the tokens of each response first, over all tokens of the step, or over those of each prompt first."""
    epochs: int = 1
    """Passes over a step's responses."""
    minibatches: int = 1
    """Optimiser steps a pass."""

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise ConfigError(f"algorithm.samples is {self.samples}; it must be at least 1")
        if self.threshold is not None and not math.isfinite(self.threshold):
            raise ConfigError(f"algorithm.threshold is {self.threshold}; give the least score of a response that is learned, or leave it out")


class SFT(Objective):
    name = "sft"
    Config = SFTConfig
    requires = Requires(feedback="score")
    wants: Mapping[str, set[str]] = {"policy": {"raw"}}
    watched = OF_RESPONSES
    reuses = True

    def __init__(self, config: SFTConfig):
        self.config = config
        self.reads_answers = config.threshold is not None

    def plan(self, step: int) -> Plan:
        return Plan(self.config.prompts, {"sampler": self.config.samples}, self.config.prompts)

    def prepare(self, feedback: Feedback, forward: Forward, generator: np.random.Generator) -> Batch:
        rows, group_of_N, rewards_N, valid_N = scored_rows(feedback)
        threshold = self.config.threshold
        accepted_N = torch.ones_like(valid_N) if threshold is None else rewards_N >= threshold  # a missing score is NaN and reaches nothing
        accepted = accepted_N.nonzero().flatten().tolist()
        kept = first_of_equals(rows, accepted)
        is_new_N = group_of_N >= len(feedback.older)
        new_N = accepted_N & is_new_N
        metrics = {
            **answer_metrics(feedback),
            **response_metrics(feedback),
            **reward_metrics(rewards_N[is_new_N], group_of_N[is_new_N], valid_N[is_new_N]),
            "sft/accepted_frac": int(new_N.sum()) / max(1, int(is_new_N.sum())),
            "sft/solved_frac": len(group_of_N[new_N].unique()) / max(1, len(feedback.items)),
            "sft/duplicates": float(len(accepted) - len(kept)),
            "rows/trained": float(len(kept)),
        }
        units = np.arange(len(kept))
        chosen = tuple(rows[number] for number in kept)
        groups = group_of_N[kept].unique(return_inverse=True)[1].numpy()
        return Batch(chosen, units, groups, epochs=self.config.epochs, minibatches=self.config.minibatches, metrics=metrics)

    def losses(self, outputs: Outputs, view: View) -> dict[str, Loss]:
        return {"loss/sft": Loss(-outputs["policy"]["raw"], per=self.config.reduction)}


def first_of_equals(rows: Sequence[Trajectory], numbers: Iterable[int]) -> list[int]:
    """The numbers of rows with a trained token, without those whose ids and trained tokens are a row's before them."""
    first = {(rows[number].ids.tobytes(), rows[number].trained.tobytes()): number for number in reversed(list(numbers)) if rows[number].trained.any()}
    return sorted(first.values())
