"""The metrics to which docs/metrics.md maps TRL's `objective/*`, by hand: with and without penalties, and
with the KL in the rewards, in the loss, or nowhere."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from scored_groups import feedback

from oat.algorithms.ppo import PPO
from oat.algorithms.ppo_config import PPOConfig
from oat.algorithms.shaping import RewardsConfig
from oat.metrics.counterparts import TRL
from oat.types import Feedback, Trajectory

OFFSET = 0.5
"""How far the reference's log-probabilities are below the policy's, nats a token: k1 of the KL."""
LENGTHS = (1, 4, 2)
SCORES = (1.0, 4.0, 1.0)
KL = OFFSET * sum(LENGTHS) / 3
"""The mean over responses of the KL, summed over tokens, nats."""


def forward(model: str, rows: Sequence[Trajectory], wants: set[str]) -> Mapping[str, torch.Tensor]:
    raw_K = torch.from_numpy(np.concatenate([row.recorded("raw_logps") for row in rows]))
    values = {"reference": raw_K - OFFSET, "policy": raw_K, "critic": torch.zeros_like(raw_K)}
    return {name: values[model] for name in wants}


def cut() -> Feedback:
    """Return feedback with three responses of 1, 4 and 2 tokens, of which the second was cut."""
    given = feedback(SCORES)
    (item,) = given.items
    first, second, third = item.group.trajectories
    rows = (first, replace(second, finish_reason="length"), third)
    return replace(given, items=(replace(item, group=replace(item.group, trajectories=rows)),))


def objectives(config: PPOConfig) -> dict[str, float | None]:
    """Return the metrics of TRL's `objective/*` names; None for one that the step does not report."""
    objective: Any = PPO(config)
    metrics = objective.prepare(cut(), forward, np.random.default_rng(0)).metrics
    metrics |= {"reward/mean": sum(SCORES) / 3}
    names = ("kl", "scores", "non_score_reward", "rlhf_reward")
    return {name: metrics.get(TRL[f"objective/{name}"].ours) for name in names}


@pytest.mark.inventory(41)
@pytest.mark.parametrize("penalty", [0.0, 0.75])
@pytest.mark.parametrize(
    ("coefs", "kl"),
    [
        ({"kl_reward_coef": 0.1}, KL),
        ({"kl_reward_coef": 0.0, "kl_coef": 0.2}, KL),
        ({"kl_reward_coef": 0.0, "kl_coef": 0.2, "old_from": "sampler"}, KL),
        ({"kl_reward_coef": 0.0}, None),
    ],
    ids=["in the rewards", "in the loss", "in the loss, sampler", "nowhere"],
)
def test_the_objectives_metrics_by_hand(coefs: dict[str, Any], kl: float | None, penalty: float) -> None:
    """The score is the one after the penalty, and the reward is the sum of it and of what the KL adds to the
    rewards. If no coefficient is above 0, there is no reference, and so no KL."""
    config = PPOConfig(prompts=3, rewards=RewardsConfig(missing_end_penalty=penalty), **coefs)
    assert ("reference" in PPO(config).requires.models) == (kl is not None)
    found = objectives(config)
    scores = (1.0 + (4.0 - penalty) + 1.0) / 3
    non_score = -coefs["kl_reward_coef"] * KL
    assert found["kl"] == (None if kl is None else pytest.approx(kl, rel=1e-5))
    assert found["scores"] == pytest.approx(scores, rel=1e-6)
    assert found["non_score_reward"] == pytest.approx(non_score, rel=1e-5, abs=0)
    assert found["rlhf_reward"] == pytest.approx(scores + non_score, rel=1e-5)


def test_the_score_is_the_reward_that_is_learned_from() -> None:
    """After scale and bounds: 0.5, 1.5 and 0.5 of 1, 4 and 1."""
    rewards = RewardsConfig(scale=0.5, clip=(0.0, 1.5))
    found = objectives(PPOConfig(prompts=3, kl_reward_coef=0.1, rewards=rewards))
    assert found["scores"] == pytest.approx(2.5 / 3)
    assert found["rlhf_reward"] == pytest.approx(2.5 / 3 - 0.1 * KL, rel=1e-5)
