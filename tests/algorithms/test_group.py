"""GRPO and Dr. GRPO as algorithms: which samples count, and the weights of their tokens."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from scored_groups import TEXTS, feedback

from oat.algorithms.ensemble import EnsembleConfig
from oat.algorithms.group import GRPO, DrGRPO, DrGRPOConfig, GRPOConfig
from oat.errors import ConfigError
from oat.learner.batching import view_of
from oat.learner.reduction import Reduction
from oat.types import Batch, Feedback, Mark, Trajectory


def forward(model: str, rows: Sequence[Trajectory], wants: set[str]) -> dict[str, torch.Tensor]:
    assert (model, wants) == ("policy", {"sampled"})
    return {"sampled": torch.full((sum(int(row.trained.sum()) for row in rows),), -1.5)}


def batch_of(algorithm: Any, given: Feedback) -> Batch:
    return algorithm.prepare(given, forward, np.random.default_rng(0))


def total(algorithm: Any, batch: Batch, logps_K: torch.Tensor) -> torch.Tensor:
    view = view_of(batch)
    loss = algorithm.losses({"policy": {"sampled": logps_K}}, view)["loss/policy"]
    return loss.coef * Reduction(batch)(loss, view, view.group_of_N, first=True)


def test_the_coefficient_of_the_kl_adapts_before_the_step_learns() -> None:
    """The reference's log-probabilities are below the recorded raw ones by log 2, so k3 is log 2 - 1/2 =
    0.1931 nats per token. With a target of 0.18 the error is 0.0730. After 3 responses, with a horizon of 6,
    the coefficient rises from 0.4 to 0.4146.

    In the second step the divergence is far from the target, and the error is clipped.
    """
    made, seen = (
        GRPO(GRPOConfig(prompts=1, samples=3, kl_coef=0.4, kl_target=0.18, kl_horizon=6)),
        list[str](),
    )
    made.recorded_is_old = True

    def lower(model: str, rows: Sequence[Trajectory], wants: set[str]) -> dict[str, torch.Tensor]:
        seen.append(model)
        assert wants == {"raw"}
        raw_K = torch.from_numpy(np.concatenate([row.recorded("raw_logps") for row in rows]))
        return {"raw": raw_K - shift}

    shift = math.log(2)
    error = (math.log(2) - 0.5) / 0.18 - 1
    batch = made.prepare(feedback((1.0, 4.0, 1.0)), lower, np.random.default_rng(0))
    assert batch.metrics["kl/coef"] == pytest.approx(0.4 * (1 + 0.5 * error), rel=1e-6)
    logps = {"sampled": batch.columns["old_logps_K"], "raw": batch.columns["reference_logps_K"]}
    assert made.losses({"policy": logps}, view_of(batch))["loss/kl"].coef == batch.metrics["kl/coef"]
    assert seen == ["reference"], "the recorded log-probabilities are the policy's own"
    shift, before = 9.0, made.weights.kl
    made.prepare(feedback((1.0, 4.0, 1.0)), lower, np.random.default_rng(0))
    assert made.weights.kl == pytest.approx(1.1 * before, rel=1e-6)
    again = GRPO(made.config)
    again.load_state(made.state)
    assert again.weights.kl == made.weights.kl
    other = GRPO(GRPOConfig(prompts=1, samples=3, kl_coef=0.5, kl_target=0.18, kl_horizon=6))
    other.load_state(made.state)
    assert other.weights.kl == 0.5, "a fork that begins with another coefficient"
    fixed = GRPO(GRPOConfig(prompts=1, samples=3, kl_coef=0.4))
    fixed.load_state(made.state)
    assert (fixed.weights.kl, fixed.state) == (0.4, {})


def test_without_rows_the_coefficient_stays() -> None:
    made = GRPO(GRPOConfig(prompts=1, samples=3, kl_coef=0.4, kl_target=0.18))
    batch = made.prepare(feedback((1.0,), missing="failed"), forward, np.random.default_rng(0))
    assert (made.weights.kl, "kl/coef" in batch.metrics) == (0.4, False)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kl_target": 0.1}, "algorithm.kl_target is set, and algorithm.kl_coef is 0"),
        ({"kl_coef": 0.1, "kl_target": 0.0}, "kl_target is 0.0; it must be positive"),
        ({"kl_coef": 0.1, "kl_target": math.inf}, "must be positive, and finite"),
        ({"kl_coef": 0.1, "kl_horizon": 500}, "nothing reads it without algorithm.kl_target"),
        ({"kl_coef": 0.1, "kl_target": 0.1, "kl_horizon": 127}, "less than the 128 responses of a step"),
    ],
)
def test_control_that_would_control_nothing(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        GRPOConfig(**options)


# Rewards 1, 4, 1 over 1, 4 and 2 tokens: mean 2, so -1, 2, -1; unbiased variance (1 + 4 + 1) / 2 = 3.
STD = math.sqrt(3) + 1e-4


def test_gradient_of_a_fresh_sample_by_hand() -> None:
    """At ratio 1 the gradient of a token's loss is minus its advantage times its weight."""
    expected = {
        # 1 / 3 of the sequences, then 1 / tokens of each.
        GRPO(GRPOConfig(prompts=1, samples=3)): [1 / (3 * STD), *[-2 / (12 * STD)] * 4, *[1 / (6 * STD)] * 2],
        # 1 / 7 of the tokens.
        GRPO(GRPOConfig(prompts=1, samples=3, reduction="token")): [
            1 / (7 * STD),
            *[-2 / (7 * STD)] * 4,
            *[1 / (7 * STD)] * 2,
        ],
        # No standard deviation; 3 sequences of at most 10 tokens.
        DrGRPO(DrGRPOConfig(prompts=1, samples=3, max_length=10)): [1 / 30, *[-2 / 30] * 4, *[1 / 30] * 2],
    }
    for algorithm, gradient in expected.items():
        batch = batch_of(algorithm, feedback((1.0, 4.0, 1.0)))
        logps = batch.columns["old_logps_K"].clone().requires_grad_()
        total(algorithm, batch, logps).backward()
        assert logps.grad is not None
        assert logps.grad.tolist() == pytest.approx(gradient, rel=1e-5)


def test_dr_grpo_weighs_a_token_the_same_in_every_response_and_every_group() -> None:
    """Dr. GRPO gives every token the same weight. GRPO does not: it divides by the response's length and by
    the standard deviation of the group's rewards."""
    close, far = (1.0, 1.5), (1.0, 9.0)
    for algorithm in (
        DrGRPO(DrGRPOConfig(prompts=2, samples=2, max_length=4)),
        GRPO(GRPOConfig(prompts=2, samples=2)),
    ):
        batch = batch_of(algorithm, feedback(close, far))
        logps = batch.columns["old_logps_K"].clone().requires_grad_()
        total(algorithm, batch, logps).backward()
        assert logps.grad is not None
        centred = torch.tensor([-0.25, *[0.25] * 4, -4.0, *[4.0] * 4])
        weights = logps.grad / centred
        assert bool(torch.allclose(weights, weights[0].expand(10))) == isinstance(algorithm, DrGRPO)


def test_the_kl_term_is_reduced_as_the_rest() -> None:
    """The KL term has the reduction of Dr. GRPO. With d = -1.5 - -0.5 = -1, k3 is e^1 - 1 - 1 and its slope
    is 1 - e^1. There are 7 tokens in 3 sequences of at most 10 tokens."""

    def both(model: str, rows: Sequence[Trajectory], wants: set[str]) -> dict[str, torch.Tensor]:
        return {want: torch.full((7,), -1.5 if model == "policy" else -0.5) for want in wants}

    algorithm = DrGRPO(DrGRPOConfig(prompts=1, samples=3, max_length=10, kl_coef=0.2))
    batch = algorithm.prepare(feedback((1.0, 4.0, 1.0)), both, np.random.default_rng(0))
    view, raw = view_of(batch), torch.full((7,), -1.5, requires_grad=True)
    losses = algorithm.losses({"policy": {"sampled": batch.columns["old_logps_K"], "raw": raw}}, view)
    kl = losses["loss/kl"]
    value = kl.coef * Reduction(batch)(kl, view, view.group_of_N, first=True)
    assert value.item() == pytest.approx(0.2 * 7 * (math.e - 2) / 30)
    value.backward()
    assert raw.grad is not None
    assert raw.grad.tolist() == pytest.approx([0.2 * (1 - math.e) / 30] * 7)


@pytest.mark.parametrize("mark", ["failed", "abstain"])
def test_a_missing_score_is_no_part_of_its_group(mark: Mark) -> None:
    for algorithm in (
        GRPO(GRPOConfig(prompts=1, samples=3)),
        DrGRPO(DrGRPOConfig(prompts=1, samples=3, max_length=4)),
    ):
        short = batch_of(algorithm, feedback((1.0, 4.0)))
        batch = batch_of(algorithm, feedback((1.0, 4.0, 99.0), missing=mark))
        assert [row.text for row in batch.rows] == list(TEXTS[:2])
        assert torch.equal(batch.columns["advantages_N"], short.columns["advantages_N"])


@pytest.mark.inventory(28)
def test_a_group_without_spread_teaches_nothing_and_still_counts() -> None:
    for algorithm in (
        GRPO(GRPOConfig(prompts=2, samples=2)),
        DrGRPO(DrGRPOConfig(prompts=2, samples=2, max_length=4)),
    ):
        batch = batch_of(algorithm, feedback((1.0, 4.0), (0.3, 0.3)))
        assert batch.columns["advantages_N"][2:].tolist() == [0.0, 0.0]
        logps = batch.columns["old_logps_K"].clone().requires_grad_()
        total(algorithm, batch, logps).backward()
        assert logps.grad is not None
        halved = logps.grad[:5]
        alone = batch_of(algorithm, feedback((1.0, 4.0)))
        logps = alone.columns["old_logps_K"].clone().requires_grad_()
        total(algorithm, alone, logps).backward()
        torch.testing.assert_close(2 * halved, logps.grad)


def test_settings_out_of_range() -> None:
    with pytest.raises(ConfigError, match="max_length is 0"):
        DrGRPOConfig(prompts=1, samples=2, max_length=0)
    with pytest.raises(ConfigError, match="std_eps is -1"):
        GRPOConfig(prompts=1, samples=2, std_eps=-1.0)
    for name in ("clip_low", "clip_high", "kl_coef", "std_eps"):
        for value in (math.inf, math.nan):
            with pytest.raises(ConfigError, match=f"{name} is {value}"):
                GRPOConfig(**{"prompts": 1, "samples": 2, name: value})
    for name in ("learning_rate", "weight_decay", "prior"):
        with pytest.raises(ConfigError, match=f"{name} is inf"):
            EnsembleConfig(**{name: math.inf})
    with pytest.raises(ConfigError, match="max_length is not set"):
        DrGRPO(DrGRPOConfig(prompts=1, samples=2))
    with pytest.raises(ConfigError, match="samples is 0"):
        DrGRPOConfig(prompts=1, samples=0, max_length=4)
