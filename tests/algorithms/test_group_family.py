"""The estimators and losses that a policy gradient may choose by name: columns and gradients by hand, and
settings that nothing would read."""

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from scored_groups import feedback

from oat.algorithms.base import Objective
from oat.algorithms.estimators import ESTIMATORS
from oat.algorithms.policy_gradient_config import ADVANTAGES, PolicyLoss, SmoothConfig
from oat.algorithms.surrogates import POLICY_LOSSES
from oat.errors import ConfigError, ContractError
from oat.learner.batching import view_of
from oat.learner.reduction import Reduction
from oat.plugins.registry import ALGORITHMS
from oat.types import Batch, Trajectory

OFFSET = 0.5
"""How far the reference's log-probabilities are below the recorded ones, nats."""


def forward(model: str, rows: Sequence[Trajectory], wants: set[str]) -> Mapping[str, torch.Tensor]:
    """Return the recorded log-probabilities for the policy, and lower ones for the reference."""
    raw_K = torch.from_numpy(np.concatenate([row.recorded("raw_logps") for row in rows]))
    return {name: raw_K - (OFFSET if model == "reference" else 0.0) for name in wants}


def made(name: str, **options: Any) -> Any:
    cls: Any = ALGORITHMS[name]
    return cls(cls.Config(prompts=1, **{"samples": 3, **options}))


def batch_of(objective: Objective, *scores: tuple[float, ...]) -> Batch:
    return objective.prepare(feedback(*scores), forward, np.random.default_rng(0))


def gradient(objective: Any, batch: Batch, logps_K: torch.Tensor) -> list[float]:
    """Return the derivative of the policy's loss with respect to each token's log-probability."""
    logps_K = logps_K.clone().requires_grad_()
    view = view_of(batch)
    loss = objective.losses({"policy": {"sampled": logps_K}}, view)["loss/policy"]
    (loss.coef * Reduction(batch)(loss, view, view.group_of_N, first=True)).backward()
    assert logps_K.grad is not None
    return logps_K.grad.tolist()


STD = math.sqrt(3)


@pytest.mark.inventory(47)
@pytest.mark.parametrize(
    ("advantage", "expected"),
    [
        # Rewards 1, 4, 1 over 1, 4 and 2 tokens: mean 2, deviation sqrt(3), mean by length 19 / 7.
        ("none", [1, 4, 1]),
        ("group_mean", [-1, 2, -1]),
        ("group_norm", [-1 / STD, 2 / STD, -1 / STD]),
        ("batch_norm", [-1 / STD, 2 / STD, -1 / STD]),
        ("batch_mean", [-1, 2, -1]),
        ("leave_one_out", [-1.5, 3, -1.5]),
        ("leave_one_out_max", [-3, 3, -3]),
        ("length_weighted", [1 - 19 / 7, 4 - 19 / 7, 1 - 19 / 7]),
        ("best_of_group", [0, 1, 0]),
    ],
)
def test_advantages_of_every_estimator_by_hand(advantage: str, expected: list[float]) -> None:
    batch = batch_of(made("grpo", advantage=advantage), (1.0, 4.0, 1.0))
    assert batch.columns["advantages_N"].tolist() == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("advantage", ["group_norm", "batch_norm"])
def test_a_number_is_added_to_the_deviation(advantage: str) -> None:
    batch = batch_of(made("grpo", advantage=advantage, std_eps=0.5), (1.0, 4.0, 1.0))
    expected = [value / (STD + 0.5) for value in (-1, 2, -1)]
    assert batch.columns["advantages_N"].tolist() == pytest.approx(expected, rel=1e-5)


def test_the_deviation_of_the_step_divides_all_groups() -> None:
    """Groups 1, 4, 1 and 0, 0, 6: means 2 and 2, variance of the six rewards 34 / 5 - 4 * 6 / 5 + ..., that
    is 6.0."""
    batch = batch_of(made("grpo", advantage="batch_norm"), (1.0, 4.0, 1.0), (0.0, 0.0, 6.0))
    deviation = float(torch.tensor([1.0, 4.0, 1.0, 0.0, 0.0, 6.0]).std())
    expected = [value / deviation for value in (-1, 2, -1, -2, -2, 4)]
    assert batch.columns["advantages_N"].tolist() == pytest.approx(expected, rel=1e-3)


def test_the_mean_of_the_step_is_a_baseline() -> None:
    """The mean of 1, 4, 1, 0, 0, 6 is 2. A flat group far from it teaches something."""
    objective = made("grpo", advantage="batch_mean")
    batch = batch_of(objective, (1.0, 4.0, 1.0), (0.0, 0.0, 6.0))
    assert batch.columns["advantages_N"].tolist() == [-1, 2, -1, -2, -2, 4]
    assert objective.is_usable(feedback((1.0, 1.0, 1.0)).items[0])


@pytest.mark.parametrize("advantage", ["leave_one_out", "group_mean", "none", "batch_mean"])
def test_advantages_are_normalised_over_the_responses_of_a_step(advantage: str) -> None:
    """With `leave_one_out` this is `normalize_advantages` of TRL's RLOO: each response counts once, however
    long it is, and the tokens of a response have one advantage."""
    groups, eps = ((1.0, 4.0, 1.0), (0.0, 0.0, 7.0)), 0.25
    every = [reward for rewards in groups for reward in rewards]
    of_each = {
        "leave_one_out": lambda rewards, i: rewards[i] - (sum(rewards) - rewards[i]) / 2,
        "group_mean": lambda rewards, i: rewards[i] - sum(rewards) / 3,
        "none": lambda rewards, i: rewards[i],
        "batch_mean": lambda rewards, i: rewards[i] - sum(every) / 6,
    }[advantage]
    plain = [of_each(rewards, i) for rewards in groups for i in range(3)]
    mean, std = statistics.mean(plain), statistics.stdev(plain)
    objective = made("rloo", advantage=advantage, whiten=True, whiten_over="responses", std_eps=eps)
    batch = batch_of(objective, *groups)
    expected = [(value - mean) / (std + eps) for value in plain]
    assert batch.columns["advantages_N"].tolist() == pytest.approx(expected, rel=1e-5)
    assert "advantages_K" not in batch.columns
    flat = feedback((1.0, 1.0, 1.0)).items[0]
    assert objective.is_usable(flat) is (advantage in ("none", "batch_mean"))


def test_tables_have_every_name_of_the_settings() -> None:
    assert set(ESTIMATORS) == set(ADVANTAGES)
    assert set(POLICY_LOSSES) == set(get_args(PolicyLoss))


def test_reinforce_pp_by_hand() -> None:
    """Every token's reward is -0.1 * 0.5, the last one's has the score added. A token's return is the sum
    from it on: 1 - 0.05 n with n tokens left. All seven returns are then whitened."""
    batch = batch_of(made("reinforce_pp", kl_reward_coef=0.1), (1.0, 4.0, 1.0))
    left = [1, 4, 3, 2, 1, 2, 1]
    score = [1, 4, 4, 4, 4, 1, 1]
    returns = torch.tensor([r - 0.05 * n for r, n in zip(score, left, strict=True)], dtype=torch.float64)
    expected = (returns - returns.mean()) / (returns.var() + 1e-8).sqrt()
    assert batch.columns["advantages_K"].tolist() == pytest.approx(expected.tolist(), abs=1e-5)
    assert "advantages_N" not in batch.columns


def test_a_discount_counts_tokens_to_the_end() -> None:
    batch = batch_of(made("rloo", gamma=0.5), (1.0, 4.0, 1.0))
    expected = [-1.5, 3 / 8, 3 / 4, 3 / 2, 3, -0.75, -1.5]
    assert batch.columns["advantages_K"].tolist() == pytest.approx(expected, rel=1e-6)


def test_the_kl_in_the_rewards_asks_for_a_reference() -> None:
    assert made("rloo").requires.models == {"policy"}
    assert made("rloo", kl_reward_coef=0.1).requires.models == {"policy", "reference"}
    assert made("rloo", kl_coef=0.1).requires.models == {"policy", "reference"}


@pytest.mark.parametrize(
    "name", ["rloo", "cispo", "cpgd", "gspo", "grpo", "reinforce_pp", "sapo", "luspo", "vespo"]
)
def test_gradients_at_ratio_one_are_those_of_reinforce(name: str) -> None:
    """At ratio 1 the derivative of every loss is minus the advantage, divided as the reduction says."""
    objective = made(name)
    batch = batch_of(objective, (1.0, 4.0, 1.0))
    lengths = [1, 4, 4, 4, 4, 2, 2]
    divisor = {"sequence": [3 * n for n in lengths], "token": [7] * 7, "sequence_sum": [3] * 7}
    if "advantages_K" in batch.columns:
        advantages = batch.columns["advantages_K"].tolist()
    else:
        by_row = batch.columns["advantages_N"].tolist()
        advantages = [by_row[row] for row in (0, 1, 1, 1, 1, 2, 2)]
    expected = [-a / d for a, d in zip(advantages, divisor[objective.config.reduction], strict=True)]
    assert gradient(objective, batch, batch.columns["old_logps_K"]) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", ["cpgd", "gspo", "grpo"])
def test_beyond_the_upper_bound_a_good_token_gets_no_gradient(name: str) -> None:
    objective = made(name, drift_coef=0.0)
    batch = batch_of(objective, (1.0, 4.0, 1.0))
    slopes = gradient(objective, batch, batch.columns["old_logps_K"] + 0.5)
    assert slopes[1:5] == [0.0] * 4
    assert all(slope > 0 for slope in (slopes[0], *slopes[5:])), "bad tokens are still pushed down"


def test_cispo_keeps_the_gradient_of_a_clipped_ratio() -> None:
    """At a ratio of e^0.5 with a bound of 1.2, a good token's slope is -1.2 times its advantage / 7."""
    objective = made("cispo", clip_high=0.2)
    batch = batch_of(objective, (1.0, 4.0, 1.0))
    slopes = gradient(objective, batch, batch.columns["old_logps_K"] + 0.5)
    good = float(batch.columns["advantages_N"][1])
    assert slopes[1:5] == pytest.approx([-1.2 * good / 7] * 4, rel=1e-5)


@pytest.mark.parametrize("smooth", [SmoothConfig(), SmoothConfig(0.5, 2.0, 1.5, 0.25, 2.5, 0.5)])
def test_smooth_losses_let_the_gradient_fade(smooth: SmoothConfig) -> None:
    """At ratio e^0.5 of every token. SAPO: 4 s (1 - s) r with s = sigmoid(tau (r - 1)). VESPO: w^k exp(c (1 -
    w)), w = e^(0.5 n) for a response of n tokens. Good and bad tokens have constants of their own."""
    lengths = (1, 4, 4, 4, 4, 2, 2)
    ratio = math.exp(0.5)
    for name, divisor in (("sapo", [3 * n for n in lengths]), ("vespo", [7] * 7)):
        objective = made(name, smooth=smooth)
        batch = batch_of(objective, (1.0, 4.0, 1.0))
        advantages = [float(batch.columns["advantages_N"][row]) for row in (0, 1, 1, 1, 1, 2, 2)]
        expected = []
        for advantage, n, by in zip(advantages, lengths, divisor, strict=True):
            if name == "sapo":
                tau = smooth.tau if advantage > 0 else smooth.negative_tau
                gate = 1 / (1 + math.exp(-tau * (ratio - 1)))
                weight = 4 * gate * (1 - gate) * ratio
            else:
                good, bad = (smooth.power, smooth.decay), (smooth.negative_power, smooth.negative_decay)
                power, decay = good if advantage > 0 else bad
                w = math.exp(0.5 * n)
                weight = w**power * math.exp(decay * (1 - w))
            expected.append(-advantage * weight / by)
        found = gradient(objective, batch, batch.columns["old_logps_K"] + 0.5)
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-9)


def test_gspo_with_an_advantage_for_each_token() -> None:
    """Advantages -1.5; 3/8, 3/4, 3/2, 3; -3/4, -3/2. `gspo_token` weighs each token's own advantage by the
    ratio of its response; with `gspo` all tokens have the mean advantage of their response."""
    shift_K = torch.tensor([0.3, 0.1, 0.2, 0.3, 0.4, -0.4, 0.2])
    own = [-1.5, 3 / 8, 3 / 4, 3 / 2, 3, -3 / 4, -3 / 2]
    mean = [-1.5, *[45 / 32] * 4, *[-9 / 8] * 2]
    ratios = [math.exp(mean_log) for mean_log in (0.3, *[0.25] * 4, *[-0.1] * 2)]
    lengths = (1, 4, 4, 4, 4, 2, 2)
    for name, advantages in (("gspo_token", own), ("gspo", mean)):
        options = {"advantage": "leave_one_out", "gamma": 0.5, "clip_low": 0.5, "clip_high": 0.5}
        objective = made("gspo", policy_loss=name, **options)
        batch = batch_of(objective, (1.0, 4.0, 1.0))
        found = gradient(objective, batch, batch.columns["old_logps_K"] + shift_K)
        expected = [-s * a / (3 * n) for s, a, n in zip(ratios, advantages, lengths, strict=True)]
        assert found == pytest.approx(expected, rel=1e-5), name


def test_the_loss_of_a_bad_token_has_a_bound() -> None:
    """Advantages -1, 2, -1 at a ratio of e^0.5 = 1.65: a bad token's loss is at most `dual_clip` times 1."""
    for bound, (bad, slope) in {1.5: (1.5, 0.0), 2.0: (1.6487, 1.6487), None: (1.6487, 1.6487)}.items():
        objective = made("grpo", advantage="group_mean", dual_clip=bound, reduction="sequence_sum")
        batch = batch_of(objective, (1.0, 4.0, 1.0))
        logps_K = batch.columns["old_logps_K"] + 0.5
        loss = objective.losses({"policy": {"sampled": logps_K}}, view_of(batch))["loss/policy"]
        assert loss.terms.tolist() == pytest.approx([bad, *[-1.2 * 2] * 4, bad, bad], rel=1e-4)
        expected = [slope / 3, 0, 0, 0, 0, slope / 3, slope / 3]
        assert gradient(objective, batch, logps_K) == pytest.approx(expected, rel=1e-4)


def test_reinforce_reads_no_ratio() -> None:
    """A token's slope is minus its advantage, -1, 2 or -1, by 3 n, however far the policy has moved."""
    objective = made("grpo", advantage="group_mean", policy_loss="reinforce")
    batch = batch_of(objective, (1.0, 4.0, 1.0))
    expected = [1 / 3, *[-2 / 12] * 4, 1 / 6, 1 / 6]
    for shift in (0.0, 0.5, -3.0):
        found = gradient(objective, batch, batch.columns["old_logps_K"] + shift)
        assert found == pytest.approx(expected, rel=1e-5)


def test_luspo_counts_long_responses_by_their_length() -> None:
    gspo, luspo = made("gspo"), made("luspo")
    batch = batch_of(gspo, (1.0, 4.0, 1.0))
    slopes = gradient(gspo, batch, batch.columns["old_logps_K"])
    lengths = (1, 4, 4, 4, 4, 2, 2)
    expected = [slope * n for slope, n in zip(slopes, lengths, strict=True)]
    assert gradient(luspo, batch, batch.columns["old_logps_K"]) == pytest.approx(expected, rel=1e-5)


def test_advantages_are_whitened_over_the_step_or_the_group() -> None:
    given = ((1.0, 4.0, 1.0), (0.0, 0.0, 6.0))
    values = torch.tensor([1.0, 4, 4, 4, 4, 1, 1, 0, 0, 0, 0, 0, 6, 6], dtype=torch.float64)
    biased = (values - values.mean()) / values.var(unbiased=False).sqrt()
    found = batch_of(made("reinforce_pp", whiten_over="step_biased"), *given).columns["advantages_K"]
    assert found.tolist() == pytest.approx(biased.tolist(), rel=1e-5)
    parts = [(part - part.mean()) / part.std() for part in values.split(7)]
    found = batch_of(made("reinforce_pp", whiten_over="group"), *given).columns["advantages_K"]
    assert found.tolist() == pytest.approx(torch.cat(parts).tolist(), rel=1e-5)


def test_the_drift_pulls_back_to_the_old_policy() -> None:
    objective = made("cpgd", drift_coef=0.5)
    batch = batch_of(objective, (1.0, 4.0, 1.0))
    logps_K = (batch.columns["old_logps_K"] + 0.3).requires_grad_()
    loss = objective.losses({"policy": {"sampled": logps_K}}, view_of(batch))["loss/drift"]
    assert loss.coef == 0.5
    assert loss.terms.tolist() == pytest.approx([math.exp(0.3) - 1 - 0.3] * 7, rel=1e-4)
    assert "loss/drift" not in made("cpgd", drift_coef=0.0).losses(
        {"policy": {"sampled": logps_K}}, view_of(batch)
    )


def test_a_group_teaches_what_its_estimator_sees() -> None:
    flat, spread = feedback((1.0, 1.0, 1.0)).items[0], feedback((1.0, 0.0, 1.0)).items[0]
    for advantage in ("group_mean", "group_norm", "leave_one_out", "leave_one_out_max", "best_of_group"):
        objective = made("grpo", advantage=advantage)
        assert (objective.is_usable(flat), objective.is_usable(spread)) == (False, True)
    assert made("reinforce_pp").is_usable(flat), "its advantages are normalised over the step"
    assert not made("reinforce_pp").is_usable(feedback((1.0,), missing="failed").items[0])


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("reinforce_pp", {"samples": 0}, "algorithm.samples is 0; it must be at least 1"),
        (
            "grpo",
            {"policy_loss": "reinforce", "clip_high": 0.3},
            "nothing reads it with algorithm.policy_loss",
        ),
        ("gspo", {"dual_clip": 3.0}, "algorithm.dual_clip is 3.0, and nothing reads it"),
        ("grpo", {"dual_clip": 1.0}, "algorithm.dual_clip is 1.0; it must be above 1"),
        ("rloo", {"std_eps": 0.1}, "algorithm.std_eps is 0.1, and nothing reads it with algorithm.advantage"),
        ("grpo", {"whiten_over": "group"}, "whiten_over is group, and nothing reads it with"),
        ("rloo", {"whiten": True, "whiten_over": "responses", "gamma": 0.9}, "whiten_over is responses, and"),
        ("rloo", {"whiten": True, "whiten_over": "responses", "kl_reward_coef": 0.1}, "whiten_over is resp"),
        ("rloo", {"whiten_over": "responses"}, "whiten_over is responses, and nothing reads it"),
        ("ppo", {"whiten_over": "responses"}, "whiten_over is responses, and the tokens of a response have"),
        ("vespo", {"clip_high": 0.1}, "clip_high is 0.1, and nothing reads it with algorithm.policy_loss"),
        ("grpo", {"gamma": 1.5}, "algorithm.gamma is 1.5; it must be at least 0 and at most 1"),
        ("grpo", {"kl_reward_coef": math.nan}, "algorithm.kl_reward_coef is nan; it must be at least 0"),
        ("cpgd", {"drift_coef": -1.0}, "algorithm.drift_coef is -1.0; it must be at least 0"),
    ],
)
def test_settings_that_are_wrong_or_that_nothing_would_read(
    name: str, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        made(name, **options)


ESTIMATOR = """
import torch

def doubled(given):
    return 2 * given.rewards_N

def short(given):
    return given.rewards_N[:1]

def infinite(given):
    return given.rewards_N / 0

def huge(given):
    return given.rewards_N.double() * 1e300

def complex(given):
    return given.rewards_N.to(torch.complex64)

def broken(given):
    raise KeyError("no such column")

number = 3
"""


def test_an_estimator_of_a_user_by_path(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(ESTIMATOR)
    batch = batch_of(made("grpo", samples=1, advantage=f"{file}:doubled"), (1.0, 4.0, 1.0))
    assert batch.columns["advantages_N"].tolist() == [2.0, 8.0, 2.0]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("short", "returned .* for 3 rewards; return a tensor with one finite number for each"),
        ("infinite", "returned .* for 3 rewards"),
        ("huge", "returned .* for 3 rewards"),
        ("complex", "returned .* for 3 rewards"),
        ("broken", r"raised KeyError.* \(line \d+ of mine\.py\); repair it"),
    ],
)
def test_an_estimator_that_fails_is_named(tmp_path: Path, name: str, words: str) -> None:
    file = tmp_path / "mine.py"
    file.write_text(ESTIMATOR)
    with pytest.raises(ContractError, match=f"algorithm.advantage: .*mine.py:{name} {words}"):
        batch_of(made("grpo", advantage=f"{file}:{name}"), (1.0, 4.0, 1.0))


def test_an_estimator_that_is_none_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(ESTIMATOR)
    with pytest.raises(ConfigError, match="advantage is group_norms, which is no estimator"):
        made("grpo", advantage="group_norms")
    with pytest.raises(ConfigError, match=":number is 3; name a function"):
        made("grpo", advantage=f"{file}:number")
    with pytest.raises(ConfigError, match="has no missing"):
        made("grpo", advantage=f"{file}:missing")
