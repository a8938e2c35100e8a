"""PPO against straight padded implementations of its two conventions, written from their tables: `oat-llm`
(score at the last token) and TRL (a state after the last token)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from ppo_steps import feedback_of, learner_of
from torch import Tensor

from oat.algorithms.ppo import PPO
from oat.algorithms.ppo_config import PPOConfig
from oat.algorithms.shaping import RewardsConfig
from oat.functional.advantages import whiten
from oat.learner.learner import Learner
from oat.types import Batch, Feedback, Trajectory

LENGTH = 5
"""G: the largest number of tokens of a response."""
SIZES = (3, 5, 1, 4, 5, 2, 3, 3)
"""Lengths of the responses; two have the largest length, and so no final state in TRL."""


@dataclass(frozen=True)
class Padded:
    """Values of the responses, (N, G), right padded with 0.

    Attributes:
        q: (N,) index of each response's last token.
        after: (N, G): the critic's value of the state after token t.
    """

    q: Tensor
    logp: Tensor
    reference: Tensor
    value: Tensor
    after: Tensor
    score: Tensor


def scattered(values_K: Tensor) -> Tensor:
    padded = torch.zeros(len(SIZES), LENGTH, dtype=values_K.dtype)
    start = 0
    for n, size in enumerate(SIZES):
        padded[n, :size] = values_K[start : start + size]
        start += size
    return padded


def padded(learner: Learner, feedback: Feedback) -> Padded:
    """Return what the models give for the rows now."""
    rows: list[Trajectory] = [item.group.trajectories[0] for item in feedback.items]
    critic = learner.forward("critic", rows, {"value", "value_after"})
    return Padded(
        torch.tensor(SIZES) - 1,
        scattered(learner.forward("policy", rows, {"raw"})["raw"]),
        scattered(learner.forward("reference", rows, {"raw"})["raw"]),
        scattered(critic["value"]),
        scattered(critic["value_after"]),
        torch.tensor([item.answer.values[0] for item in feedback.items], dtype=torch.float32),
    )


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    return (values * mask).sum() / mask.sum()


def masked_whiten(values: Tensor, mask: Tensor, shift_mean: bool) -> Tensor:
    mean = masked_mean(values, mask)
    variance = masked_mean((values - mean) ** 2, mask) * mask.sum() / (mask.sum() - 1)
    whitened = (values - mean) * torch.rsqrt(variance + 1e-8)
    return whitened if shift_mean else whitened + mean


def backwards_gae(rewards: Tensor, values: Tensor, gamma: float, lam: float) -> Tensor:
    """Return advantages over all G places. The value after the last place is 0."""
    advantages, last = torch.zeros_like(rewards), torch.zeros(len(rewards))
    for t in reversed(range(rewards.shape[1])):
        following = values[:, t + 1] if t + 1 < rewards.shape[1] else torch.zeros(len(rewards))
        last = rewards[:, t] + gamma * following - values[:, t] + gamma * lam * last
        advantages[:, t] = last
    return advantages


@dataclass(frozen=True)
class Straight:
    """The results of a straight implementation, (N, G).

    Attributes:
        p: 1 for the places of tokens.
        p1: 1 for the places that the critic learns.
    """

    p: Tensor
    p1: Tensor
    values: Tensor
    rewards: Tensor
    advantages: Tensor
    returns: Tensor


def of_trl(x: Padded, c: PPOConfig) -> Straight:
    """Section "masks, rewards, advantages" of TRL's trainer."""
    places = torch.arange(LENGTH).expand(len(SIZES), -1)
    padding_mask = places > x.q[:, None]
    padding_mask_p1 = places > x.q[:, None] + 1
    logp, reference = (v.masked_fill(padding_mask, 1.0) for v in (x.logp, x.reference))
    # the value of place t is that of the state before token t: place q + 1 is the state after the last token
    values = x.value.clone()
    for n, q in enumerate(x.q.tolist()):
        if q + 1 < LENGTH:
            values[n, q + 1] = x.after[n, q]
    values = values.masked_fill(padding_mask_p1, 0.0)
    logr = reference - logp
    kl = -logr if c.kl_reward_estimator == "k1" else logr.exp() - 1 - logr
    rewards = -c.kl_reward_coef * kl
    at = torch.where(x.q + 1 < LENGTH, x.q + 1, x.q)
    rewards[torch.arange(len(SIZES)), at] += x.score
    if c.rewards.whiten:
        rewards = masked_whiten(rewards, (~padding_mask_p1).float(), shift_mean=False)
        rewards = rewards.masked_fill(padding_mask_p1, 0.0)
    advantages = backwards_gae(rewards, values, c.gamma, c.lam)
    returns = advantages + values
    advantages = masked_whiten(advantages, (~padding_mask).float(), shift_mean=True)
    advantages = advantages.masked_fill(padding_mask, 0.0)
    return Straight((~padding_mask).float(), (~padding_mask_p1).float(), values, rewards, advantages, returns)


def of_oat_llm(x: Padded, c: PPOConfig) -> Straight:
    """Sections "tensors of the learning step" and "advantages" of oat-llm. GAE stops at the last token."""
    mask = (torch.arange(LENGTH) <= x.q[:, None]).float()
    rewards = -c.kl_reward_coef * (x.logp - x.reference) * mask
    rewards[torch.arange(len(SIZES)), x.q] += x.score
    if c.rewards.whiten:
        rewards = masked_whiten(rewards, mask, shift_mean=False) * mask
    values = x.value * mask
    advantages = backwards_gae(rewards, values, c.gamma, c.lam) * mask
    returns = (advantages + values) * mask
    return Straight(mask, mask, values, rewards, masked_whiten(advantages, mask, True) * mask, returns)


def straight_losses(old: Padded, new: Padded, s: Straight, c: PPOConfig) -> dict[str, float]:
    """Return losses and metrics of an update's pass over all rows."""
    ratio = torch.exp(new.logp - old.logp)
    plain, bounded = -s.advantages * ratio, -s.advantages * ratio.clamp(1 - c.clip_high, 1 + c.clip_high)
    values = new.value.clone()
    for n, q in enumerate(new.q.tolist()):
        if c.end == "final_state" and q + 1 < LENGTH:
            values[n, q + 1] = new.after[n, q]
    assert c.value_clip is not None
    near = torch.minimum(torch.maximum(values, s.values - c.value_clip), s.values + c.value_clip)
    squares, near_squares = (values - s.returns) ** 2, (near - s.returns) ** 2
    value_terms = 0.5 * torch.maximum(squares, near_squares)
    if c.reduction == "token":
        policy, value = masked_mean(torch.maximum(plain, bounded), s.p), masked_mean(value_terms, s.p1)
    else:
        policy = ((torch.maximum(plain, bounded) * s.p).sum(1) / s.p.sum(1)).mean()
        value = ((value_terms * s.p1).sum(1) / s.p1.sum(1)).mean()
    kept = ratio[s.p > 0]
    return {
        "loss/policy": float(policy),
        "loss/value": float(value),
        "loss/total": float(policy + c.value_coef * value),
        "policy/clipped_frac": float(masked_mean((bounded > plain).float(), s.p)),
        "value/clipped_frac": float(masked_mean((near_squares > squares).float(), s.p1)),
        "policy/ratio_mean": float(kept.mean()),
        "policy/ratio_max": float(kept.max()),
        "policy/ratio_min": float(kept.min()),
        "kl/old_k2": float(masked_mean(0.5 * (new.logp - old.logp) ** 2, s.p)),
    }


CONVENTIONS: dict[str, dict[str, Any]] = {
    "oat-llm": {"end": "last_token", "reduction": "sequence"},
    "trl": {"end": "final_state", "response_length": LENGTH, "reduction": "token"},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "all": {
        "rewards": RewardsConfig(whiten=True),
        "gamma": 0.9,
        "lam": 0.7,
        "kl_reward_coef": 0.3,
        "value_coef": 0.4,
    },
    "k3": {"kl_reward_estimator": "k3", "lam": 1.0, "value_clip": 0.02, "clip_high": 0.02, "clip_low": 0.02},
}


@pytest.mark.inventory(22, 27, 32, 37, 40)
@pytest.mark.parametrize(
    ("convention", "options"),
    [("oat-llm", "defaults"), ("oat-llm", "all"), ("trl", "defaults"), ("trl", "all"), ("trl", "k3")],
)
def test_columns_and_losses_are_those_of_the_tables(convention: str, options: str) -> None:
    """The batch of a step equals the table's, and so do the losses and metrics of three optimiser steps, each
    of several forward passes."""
    config = PPOConfig(prompts=len(SIZES), epochs=1, **CONVENTIONS[convention], **OPTIONS[options])
    objective, learner, feedback = PPO(config), learner_of(micro=3), feedback_of(SIZES)
    old = padded(learner, feedback)
    straight = (of_trl if convention == "trl" else of_oat_llm)(old, config)
    batch = objective.prepare(feedback, learner.forward, np.random.default_rng(0))
    assert_columns(batch, straight)
    assert_metrics(batch.metrics, old, straight, config)
    for _ in range(3):
        new = padded(learner, feedback)
        report = learner.update(objective, batch)
        for name, value in straight_losses(old, new, straight, config).items():
            assert report[name] == pytest.approx(value, rel=2e-4, abs=2e-5), name
    if options == "k3":
        assert report["policy/clipped_frac"] > 0
        assert report["value/clipped_frac"] > 0


def assert_columns(batch: Batch, straight: Straight) -> None:
    columns, tokens, ends = batch.columns, straight.p > 0, straight.p1 - straight.p > 0
    advantages, targets = (scattered(columns[name]) for name in ("advantages_K", "value_targets_K"))
    torch.testing.assert_close(advantages, straight.advantages, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(targets[tokens], straight.returns[tokens], rtol=1e-4, atol=1e-5)
    assert ("has_end_N" in columns) == bool(ends.any())
    if ends.any():
        has_end_N = columns["has_end_N"]
        assert has_end_N.tolist() == ends.any(1).tolist() == [size < LENGTH for size in SIZES]
        found = columns["end_targets_N"][has_end_N]
        torch.testing.assert_close(found, straight.returns[ends], rtol=1e-4, atol=1e-5)


def assert_metrics(metrics: Mapping[str, float], old: Padded, s: Straight, c: PPOConfig) -> None:
    """Check the metrics of TRL's table that `prepare` reports."""
    logr = old.reference - old.logp
    kl = (-logr if c.kl_reward_estimator == "k1" else logr.exp() - 1 - logr) * s.p
    per_response = float(kl.sum(1).mean())
    expected = {
        "kl/response": per_response,
        "reward/kl": -c.kl_reward_coef * per_response,
        "reward/total": float(old.score.mean()) - c.kl_reward_coef * per_response,
        "policy/response_entropy": -float((old.logp * s.p).sum(1).mean()),
        "response/ended": float(len(SIZES)),
    }
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(value, rel=1e-4), name


@pytest.mark.inventory(37)
def test_trls_masks_by_hand() -> None:
    """The table's example: q = 2 and G = 5. Places 0 to 3 count for the critic, and the score is at 3."""
    padding_mask, padding_mask_p1 = ([place > bound for place in range(5)] for bound in (2, 3))
    assert padding_mask == [False, False, False, True, True]
    assert padding_mask_p1 == [False, False, False, False, True]
    config = PPOConfig(
        prompts=1, end="final_state", response_length=5, kl_reward_coef=0.0, gamma=1.0, lam=0.0
    )
    feedback = feedback_of(SIZES)
    one = Feedback(1, feedback.items[:1], 1)
    objective, learner = PPO(config), learner_of()
    rows = [one.items[0].group.trajectories[0]]
    assert int(rows[0].trained.sum()) == 3
    critic = learner.forward("critic", rows, {"value", "value_after"})
    batch = objective.prepare(one, learner.forward, np.random.default_rng(0))
    value, score = critic["value"].tolist(), one.items[0].answer.values[0]
    end = float(critic["value_after"][-1])
    assert batch.columns["has_end_N"].tolist() == [True]
    assert batch.columns["value_mask_K"].tolist() == [1.0, 1.0, 2.0]
    assert float(batch.columns["end_targets_N"][0]) == pytest.approx(score)
    # with lambda 0 a target is the reward, which is 0 at a token, and the next value
    assert batch.columns["value_targets_K"].tolist() == pytest.approx([value[1], value[2], end])
    advantages = torch.tensor([value[1] - value[0], value[2] - value[1], end - value[2]])
    expected = whiten(advantages, torch.ones(3)).tolist()
    assert batch.columns["advantages_K"].tolist() == pytest.approx(expected, rel=1e-4)


@pytest.mark.inventory(24)
def test_values_of_permuted_rows_are_permuted_values() -> None:
    learner, feedback = learner_of(micro=3), feedback_of(SIZES)
    config = PPOConfig(prompts=len(SIZES), whiten=False, reduction="sequence")
    order = [5, 2, 7, 0, 1, 6, 4, 3]
    found = []
    for items in (feedback.items, tuple(feedback.items[place] for place in order)):
        batch = PPO(config).prepare(Feedback(1, items, 8), learner.forward, np.random.default_rng(0))
        by_row: dict[int, list[float]] = {}
        start = 0
        for item, made in zip(items, batch.rows, strict=True):
            size = int(made.trained.sum())
            by_row[item.question.key.occurrence] = [
                float(v)
                for name in ("old_values_K", "advantages_K", "value_targets_K")
                for v in batch.columns[name][start : start + size]
            ]
            start += size
        found.append(by_row)
    assert found[0].keys() == found[1].keys()
    for place, values in found[0].items():
        assert values == pytest.approx(found[1][place], abs=1e-6)
