"""PPO with a critic as a user would add it (arXiv:1707.06347). The KL to the reference is in the rewards and
also a term of the loss.

Each term has the normaliser of the paper that it comes from:

- policy: the mean over tokens;
- critic: the mean over sequences of their means;
- KL: the mean over sequences of their sums;
- entropy: a sum divided by a constant length.
"""

from dataclasses import dataclass

import numpy as np
import torch

from oat.algorithms.base import Objective, answer_metrics, response_metrics, row_index
from oat.algorithms.rows import old_logps, recorded_logps, scored_rows
from oat.functional.kl import kl_k1, kl_k3
from oat.functional.policy import clipped_policy_loss
from oat.types import Batch, Loss, Plan, Requires


@dataclass(frozen=True)
class PPOConfig:
    prompts: int
    """Prompts per step."""
    samples: int = 1
    """Responses per prompt."""
    gamma: float = 1.0
    """Discount per token."""
    lam: float = 0.95
    """Lambda of the advantage estimator."""
    clip: float = 0.2
    """The largest distance of the ratio from 1."""
    value_clip: float = 0.2
    """The largest distance of a value from its old value."""
    value_coef: float = 0.5
    """Coefficient of the critic's loss."""
    kl_penalty: float = 0.05
    """Coefficient of the k1 KL in the token rewards."""
    kl_coef: float = 0.02
    """Coefficient of the k3 KL in the loss."""
    entropy_coef: float = 0.01
    """Coefficient of the entropy bonus."""
    length: int = 5
    """Tokens by which the sum of the entropies is divided."""
    epochs: int = 2
    """Passes over the samples of a step."""
    minibatches: int = 2
    """Optimiser steps per pass."""


class PPO(Objective):
    name = "ppo"
    Config = PPOConfig
    requires = Requires(
        feedback="score", models=frozenset({"policy", "critic", "reference"}), ratio_based=True
    )
    wants = {"policy": {"sampled", "raw", "entropy"}, "critic": {"value"}}  # noqa: RUF012

    def __init__(self, config):
        self.config = config

    def plan(self, step):
        return Plan(self.config.prompts, {"sampler": self.config.samples}, self.config.prompts)

    def prepare(self, feedback, forward, generator):
        scored = scored_rows(feedback)
        rows, group_of_N, scores_N, valid_N = scored.rows, scored.group_of_N, scored.rewards_N, scored.valid_N
        metrics = {**answer_metrics(feedback), **response_metrics(feedback)}
        columns = self._columns(rows, scores_N, valid_N, feedback.step, forward) if valid_N.any() else {}
        kept = len(rows) if columns else 0
        groups = group_of_N.numpy()[:kept]
        return Batch(
            rows[:kept],
            np.arange(kept),
            groups,
            columns,
            self.config.epochs,
            self.config.minibatches,
            metrics,
        )

    def _columns(self, rows, scores_N, valid_N, step, forward):
        c, row_of_K = self.config, row_index(rows)
        recorded_K = recorded_logps(rows)
        raw_K = torch.from_numpy(np.concatenate([row.recorded("raw_logps") for row in rows]))
        reference_K, values_K = (
            forward("reference", rows, {"raw"})["raw"],
            forward("critic", rows, {"value"})["value"],
        )
        rewards_K = -c.kl_penalty * kl_k1(raw_K, reference_K)
        last_N = row_of_K.bincount(minlength=len(rows)).cumsum(0) - 1
        rewards_K[last_N] += scores_N.nan_to_num()
        advantages_K = self._gae(rewards_K, values_K, last_N)
        mask_K = valid_N[row_of_K].float()
        return {
            "mask_K": mask_K,
            "old_logps_K": old_logps(rows, recorded_K, step, forward, is_same_precision=self.recorded_is_old),
            "reference_logps_K": reference_K,
            "old_values_K": values_K,
            "returns_K": advantages_K + values_K,
            "advantages_K": _whitened(advantages_K, mask_K),
        }

    def _gae(self, rewards_K, values_K, last_N):
        """Return the advantage of each token, computed backwards. The value after the last token of a row is
        0."""
        last = set(last_N.tolist())
        advantages_K = torch.zeros_like(rewards_K)
        for k in range(len(rewards_K) - 1, -1, -1):
            next_value, next_advantage = (0.0, 0.0) if k in last else (values_K[k + 1], advantages_K[k + 1])
            advantages_K[k] = (
                rewards_K[k]
                + self.config.gamma * (next_value + self.config.lam * next_advantage)
                - values_K[k]
            )
        return advantages_K

    def losses(self, outputs, view):
        c = self.config
        policy = outputs["policy"]
        values_K = outputs["critic"]["value"]
        policy_K, _ = clipped_policy_loss(
            policy["sampled"], view["old_logps_K"], view["advantages_K"], clip_low=c.clip, clip_high=c.clip
        )
        near_K = view["old_values_K"] + (values_K - view["old_values_K"]).clamp(-c.value_clip, c.value_clip)
        value_K = 0.5 * torch.maximum(
            (values_K - view["returns_K"]).square(), (near_K - view["returns_K"]).square()
        )
        return {
            "loss/policy": Loss(policy_K, per="token"),
            "user/value": Loss(value_K, per="sequence", coef=c.value_coef),
            "loss/kl": Loss(
                kl_k3(policy["raw"], view["reference_logps_K"]), per="sequence_sum", coef=c.kl_coef
            ),
            "user/entropy": Loss(policy["entropy"], per="constant", coef=-c.entropy_coef, constant=c.length),
        }

    def metrics(self, outputs, view):
        clipped_K = clipped_policy_loss(
            outputs["policy"]["sampled"],
            view["old_logps_K"],
            view["advantages_K"],
            clip_low=self.config.clip,
            clip_high=self.config.clip,
        )[1]
        return {
            "policy/clipped_frac": (clipped_K, "K"),
            "policy/entropy": (outputs["policy"]["entropy"], "K"),
        }


def _whitened(values_K, mask_K):
    """Return the values, shifted and scaled to mean 0 and variance 1 over the masked tokens. The variance is
    unbiased, with 1e-8 inside the root."""
    kept = values_K[mask_K > 0]
    return (values_K - kept.mean()) / (kept.var() + 1e-8).sqrt()
