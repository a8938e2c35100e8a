"""Training of a reward model: a language model with a scalar head learns from comparisons, in which an oracle
says which of two responses is better.

The loss is Bradley and Terry's (arXiv:2009.01325, Section 3.4; `functional/rewards.py`). The score of a
response is the head's output at the last token of prompt and response. The head starts from random numbers,
and the backbone from the policy's initial weights. The responses are recorded, or sampled by the policy; the
policy does not learn.

Departures from the paper:
1. A pair without a winner (a tie, an abstention, a failure) is left out and counted. So is a pair in which a
   response has no trained token.
2. The loss is the mean over all learned pairs of the optimiser step.
3. `held_out` is the share of prompts whose pairs are never learned. A hash of the prompt chooses these
   prompts. So the same pairs are held out in every pass over the data, after a restart, and in a fork with
   the same `held_out`. A step measures its held-out pairs before its update.

The learner holds two models, `reward` and the policy. With an adapter, they share the frozen weights.
Without an adapter, the backbone is in memory twice.

Not handled: more than one pair per group; scores of every token.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from oat.algorithms.base import Forward, Objective, Outputs, View
from oat.algorithms.pairs import pair_batch, teaches
from oat.errors import ConfigError
from oat.lazy import lazily
from oat.types import Batch, Feedback, Item, Loss, Plan, Requires
from oat.types.part import Check, RunFacts

if TYPE_CHECKING:
    import torch

    from oat import functional as F
else:
    torch, F = lazily("torch"), lazily("oat.functional")


@dataclass(frozen=True)
class RewardModelConfig:
    prompts: int = 64
    """Pairs per step."""
    samples: int = 2
    """Responses per prompt, if none are recorded. More than two need an explorer."""
    centring: float = 0.0
    """Weight of the penalty that keeps scores near 0: the mean over pairs of the squared sum of a pair's two
    scores (TRL's center_rewards_coefficient). 0 is off."""
    margin_key: str | None = None
    """Column of the margin: by how much the better response is better, in units of the score. None: no
    margin."""
    held_out: float = 0.0
    """Share of prompts, at least 0 and below 1. Their pairs are measured (`pairs/held_out_accuracy`) and
    never learned."""
    epochs: int = 1
    """Passes over a step's pairs."""
    minibatches: int = 1
    """Optimiser steps per pass."""

    def __post_init__(self) -> None:
        for name, holds, why in (
            ("samples", self.samples >= 2, "a pair needs at least 2"),
            ("centring", 0 <= self.centring < math.inf, "it must be at least 0"),
            ("held_out", 0 <= self.held_out < 1, "it is a share, below 1"),
        ):
            if not holds:
                raise ConfigError(f"algorithm.{name} is {getattr(self, name)}; {why}")


class RewardModelling(Objective):
    name = "reward_model"
    Config = RewardModelConfig
    requires = Requires(feedback="compare", models=frozenset({"policy", "reward"}))
    wants: Mapping[str, set[str]] = {"reward": {"score"}}
    watched = frozenset({"answers/tied_frac"})
    reuses = True
    setting_for: Mapping[str, str] = {"held_out": "held_out"}

    def __init__(self, config: RewardModelConfig):
        self.config = config
        self.numbers = {} if config.margin_key is None else {config.margin_key: "algorithm.margin_key"}

    @staticmethod
    def checks(config: RewardModelConfig, run: RunFacts) -> Iterator[Check]:
        yield Check(
            "evaluation.pairs",
            run.measures_pairs and config.held_out,
            "algorithm.held_out would leave a share of them out; remove one",
        )

    def is_usable(self, item: Item) -> bool:
        """Return True if the pair can be learned. Held-out pairs, which are measured, count too."""
        return teaches(item)

    def plan(self, step: int) -> Plan:
        return Plan(self.config.prompts, {"sampler": self.config.samples}, self.config.prompts)

    def prepare(self, feedback: Feedback, forward: Forward, generator: np.random.Generator) -> Batch:
        c = self.config
        measured = tuple(item for item in feedback.items if _place(item) < c.held_out)
        items, older = (
            tuple(item for item in each if _place(item) >= c.held_out)
            for each in (feedback.items, feedback.older)
        )
        learned = replace(feedback, items=items, older=older)
        batch = pair_batch(learned, forward, epochs=c.epochs, minibatches=c.minibatches, reference=False)
        metrics = batch.metrics
        if c.held_out:
            metrics = batch.metrics | _measured(replace(feedback, items=measured, older=()), forward)
        margins = (
            {}
            if c.margin_key is None
            else {"margins_U": torch.tensor(_margins(batch, learned.learned, c.margin_key))}
        )
        return replace(batch, columns={**batch.columns, **margins}, metrics=metrics)

    def losses(self, outputs: Outputs, view: View) -> dict[str, Loss]:
        chosen_U, rejected_U = _halves(outputs)
        losses = {
            "loss/reward": Loss(
                F.rewards.reward_loss(chosen_U, rejected_U, view.columns.get("margins_U")),
                per="pair",
            )
        }
        if self.config.centring:
            losses["loss/centring"] = Loss(
                F.rewards.centring(chosen_U, rejected_U), per="pair", coef=self.config.centring
            )
        return losses

    def metrics(self, outputs: Outputs, view: View) -> dict[str, tuple[torch.Tensor, str]]:
        chosen_U, rejected_U = _halves(outputs)
        return {
            "pairs/accuracy": ((chosen_U > rejected_U).float(), "U"),
            "pairs/margin": (chosen_U - rejected_U, "U"),
            "pairs/reward_chosen": (chosen_U, "U"),
            "pairs/reward_rejected": (rejected_U, "U"),
            "pairs/brier": (F.rewards.brier_score(chosen_U, rejected_U), "U"),
            "pairs/confidence": (F.rewards.confidence(chosen_U, rejected_U), "U"),
        }


def _place(item: Item) -> float:
    """Return a number in [0, 1): a hash of the prompt's texts or, if the prompt has no messages, of the
    responses' texts. A pair whose number is below `held_out` is held out."""
    texts: Sequence[str] = [message.content for message in item.group.prompt.messages] or sorted(
        item.question.candidates
    )
    return zlib.crc32("\0".join(texts).encode()) / 2**32


def _measured(feedback: Feedback, forward: Forward) -> dict[str, float]:
    """Return the metrics of held-out pairs before this step's update."""
    rows = pair_batch(feedback, forward, reference=False).rows
    found = {"pairs/held_out": len(rows) / 2}
    if rows:
        chosen_U, rejected_U = _halves({"reward": forward("reward", rows, {"score"})})
        found["pairs/held_out_accuracy"] = float((chosen_U > rejected_U).float().mean())
        found["pairs/held_out_ece"] = calibration_error(
            F.rewards.confidence(chosen_U, rejected_U), (1 + (chosen_U - rejected_U).sign()) / 2
        )
        found["pairs/held_out_brier"] = float(F.rewards.brier_score(chosen_U, rejected_U).mean())
    return found


def calibration_error(confidence_U: torch.Tensor, right_U: torch.Tensor) -> float:
    """Return the expected calibration error (Guo et al. 2017, arXiv:1706.04599, Eq. 3), over ten bins of
    equal width from 1/2 to 1.

    Args:
        confidence_U: (U,) the reward model's probability that the response with the higher score wins.
        right_U: (U,) 1 if the chosen response has the higher score, 0 if the rejected one has, 1/2 if the
            scores are equal.
    """
    bins_U = ((confidence_U - 0.5) * 20).long().clamp(0, 9)
    gaps = torch.zeros(10, dtype=torch.float64).index_add_(
        0, bins_U.cpu(), (right_U - confidence_U).double().cpu()
    )
    return float(gaps.abs().sum() / len(confidence_U))


def _margins(batch: Batch, items: Sequence[Item], key: str) -> list[float]:
    """Return the margin of each unit, from the record of its prompt."""
    found = {id(row): item.group.prompt for item in items for row in item.group.trajectories}
    return [found[id(row)].columns[key] for row in batch.rows[0::2]]


def _halves(outputs: Outputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scores of the chosen and of the rejected responses, (U,) each."""
    scores_N = outputs["reward"]["score"]
    return scores_N[0::2], scores_N[1::2]
