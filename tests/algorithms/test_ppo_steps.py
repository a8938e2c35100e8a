"""PPO: what a step computes, its settings, and runs of it; test_ppo_tables.py compares it with its two
tables."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fixtures import gradient_of
from objectives import row
from ppo_steps import feedback_of, learner_of

from oat.algorithms.ppo import PPO
from oat.algorithms.ppo_config import PPOConfig
from oat.algorithms.rows import recorded_logps
from oat.algorithms.shaping import RewardsConfig
from oat.errors import ConfigError, ContractError
from oat.functional.kl import kl_k1, kl_k3
from oat.types import Batch, Feedback

SIZES = (3, 5, 1, 4, 5, 2, 3, 3)


def prepared(objective: PPO, learner: Any, feedback: Feedback | None = None) -> Batch:
    return objective.prepare(feedback or feedback_of(SIZES), learner.forward, np.random.default_rng(0))


@pytest.mark.inventory(29)
def test_the_critic_learns_a_fixed_rollout() -> None:
    """The value loss falls, and the values come to explain the targets."""
    config = PPOConfig(prompts=8, value_clip=None, epochs=10)
    objective, learner = PPO(config), learner_of(rate=3e-3)
    batch = prepared(objective, learner)
    losses = [learner.update(objective, batch)["loss/value"] for _ in range(6)]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.2 * losses[0]
    found = learner.forward("critic", batch.rows, {"value"})["value"]
    targets = batch.columns["value_targets_K"]
    assert (
        float((targets - found).var() / targets.var())
        < 0.3
        < float((targets - batch.columns["old_values_K"]).var() / targets.var())
    )


@pytest.mark.inventory(30, 33)
def test_the_first_optimiser_step_has_ratio_one_and_clips_nothing() -> None:
    objective, learner = PPO(PPOConfig(prompts=8, epochs=1)), learner_of(rate=0.05)
    batch = prepared(objective, learner)
    first = learner.update(objective, batch)
    for name in ("mean", "max", "min"):
        assert first[f"policy/ratio_{name}"] == pytest.approx(1.0, abs=1e-3)
    assert first["policy/ratio_var"] == pytest.approx(0.0, abs=1e-6)
    assert first["kl/old_k2"] == pytest.approx(0.0, abs=1e-6)
    assert first["policy/clipped_frac"] == first["value/clipped_frac"] == 0
    reports = [learner.update(objective, batch) for _ in range(3)]
    assert reports[-1]["policy/clipped_frac"] > 0
    assert reports[-1]["value/clipped_frac"] > 0
    assert reports[-1]["policy/ratio_var"] > 1e-3


@pytest.mark.inventory(25)
def test_no_gradient_beyond_the_clip_for_a_positive_advantage() -> None:
    """The old log-probabilities are lowered by 1, so that all ratios are e. Tokens with a positive advantage
    then give no gradient, and with only such tokens the policy gets none."""
    objective, learner = PPO(PPOConfig(prompts=8, epochs=1, kl_reward_coef=0.0)), learner_of()
    batch = prepared(objective, learner)
    for sign, has_gradient in ((1.0, False), (-1.0, True)):
        columns = {
            **batch.columns,
            "old_logps_K": batch.columns["old_logps_K"] - 1,
            "advantages_K": torch.full_like(batch.columns["advantages_K"], sign),
        }
        columns.pop("is_recorded_N", None)
        changed = replace(batch, columns=columns)
        report, found = _gradients(objective, changed)
        assert (max(float(g.abs().max()) for g in found.values()) > 1e-6) == has_gradient
        assert report["policy/clipped_frac"] == (0.0 if has_gradient else 1.0)


def _gradients(objective: PPO, batch: Batch) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    learner = learner_of()
    return gradient_of(learner, lambda: learner.update(objective, batch), "policy")


@pytest.mark.inventory(38)
def test_estimators_of_the_kl() -> None:
    """k3 is 0 for equal models and positive otherwise. Over tokens that the policy drew, k1 and k3 have the
    same mean, the divergence."""
    generator = torch.Generator().manual_seed(0)
    logits, other = torch.randn(2, 12, generator=generator, dtype=torch.float64)
    policy, reference = logits.log_softmax(0), other.log_softmax(0)
    exact = float((policy.exp() * (policy - reference)).sum())
    drawn = torch.multinomial(policy.exp(), 200_000, replacement=True, generator=generator)
    k1, k3 = (kl(policy[drawn], reference[drawn]) for kl in (kl_k1, kl_k3))
    assert (k3 > 0).all()
    assert kl_k3(policy, policy).abs().max() == 0
    assert float(k1.mean()) == pytest.approx(exact, abs=5 * float(k1.std()) / math.sqrt(len(drawn)))
    assert float(k3.mean()) == pytest.approx(exact, abs=5 * float(k3.std()) / math.sqrt(len(drawn)))


@pytest.mark.inventory(26)
@pytest.mark.parametrize("is_equal", [False, True])
def test_the_kl_in_the_loss_is_k3(is_equal: bool) -> None:
    """It is the mean of e^-d - 1 + d over the tokens, d = log policy - log reference; 0 for equal models."""
    config = PPOConfig(prompts=8, epochs=1, kl_reward_coef=0.0, kl_coef=0.3, value_coef=0.5)
    objective, learner = PPO(config), learner_of()
    if is_equal:
        learner.models["reference"].module.load_state_dict(learner.models["policy"].module.state_dict())
    batch = prepared(objective, learner)
    logps = {name: learner.forward(name, batch.rows, {"raw"})["raw"] for name in ("policy", "reference")}
    d_K = (logps["policy"] - logps["reference"]).double()
    report, found = gradient_of(learner, lambda: learner.update(objective, batch), "policy")
    assert report["loss/kl"] == pytest.approx(float(((-d_K).exp() - 1 + d_K).mean()), rel=1e-3, abs=1e-9)
    assert (report["loss/kl"] > 1e-3) is not is_equal
    parts = report["loss/policy"] + 0.5 * report["loss/value"] + 0.3 * report["loss/kl"]
    assert report["loss/total"] == pytest.approx(parts, rel=1e-5)
    without = PPO(replace(config, kl_coef=0.0))
    _, plain = gradient_of(other := learner_of(), lambda: other.update(without, batch), "policy")
    difference = torch.cat([(found[name] - plain[name]).flatten() for name in plain])
    assert (float(difference.norm()) > 1e-3) is not is_equal


def test_the_gap_to_the_sampler_is_that_of_the_first_optimiser_step() -> None:
    """The recorded log-probabilities are 0.01 below the policy's. After the first optimiser step the policy
    has moved away from them."""
    learner = learner_of(rate=0.05)
    rows = [item.group.trajectories[0] for item in feedback_of(SIZES).items]
    raw = learner.forward("policy", rows, {"raw"})["raw"].split(list(SIZES))
    fresh = feedback_of(SIZES, logps=[part.numpy() - np.float32(0.01) for part in raw])
    objective = PPO(PPOConfig(prompts=8, kl_reward_coef=0.0, epochs=4))
    objective.recorded_is_old = True
    report = learner.update(objective, prepared(objective, learner, fresh))
    assert report["optim/steps"] == 4
    assert report["policy/ratio_max"] > 1.1, "the later steps are far from the sampler"
    assert report["logps/recorded_gap"] == pytest.approx(0.01, rel=1e-2)
    assert report["logps/recorded_gap_max"] == pytest.approx(0.01, rel=1e-2)


@pytest.mark.inventory(31, 39)
@pytest.mark.parametrize("end", ["last_token", "final_state"])
def test_the_penalty_of_a_missing_end(end: str) -> None:
    """Only responses without the end get less, by exactly the penalty, and wherever the score is placed."""
    options = {} if end == "last_token" else {"end": end, "response_length": 5}
    common = {"prompts": 8, "whiten": False, "kl_reward_coef": 0.0, "lam": 1.0, **options}
    feedback = feedback_of(SIZES, cut=(1, 4))
    plain = prepared(PPO(PPOConfig(**common)), learner_of(), feedback)
    shaped = PPO(PPOConfig(**common, rewards=RewardsConfig(missing_end_penalty=0.75)))
    batch = prepared(shaped, learner_of(), feedback)
    difference = plain.columns["value_targets_K"] - batch.columns["value_targets_K"]
    row_of_K = np.repeat(np.arange(8), SIZES)
    expected = [0.75 if number in (1, 4) else 0.0 for number in row_of_K]
    assert difference.tolist() == pytest.approx(expected, abs=1e-5)
    shaped = PPO(PPOConfig(**common, rewards=RewardsConfig(missing_end_penalty=0.75, missing_end="no_end")))
    end_id = int(batch.rows[0].completion[-1])
    shaped.end_ids = frozenset({end_id})
    batch = prepared(shaped, learner_of(), feedback)
    has_end = [end_id in made.completion for made in batch.rows]
    assert True in has_end
    assert False in has_end
    difference = plain.columns["value_targets_K"] - batch.columns["value_targets_K"]
    expected = [0.0 if has_end[number] else 0.75 for number in row_of_K]
    assert difference.tolist() == pytest.approx(expected, abs=1e-5)


@pytest.mark.inventory(32, 40)
@pytest.mark.parametrize("end", ["last_token", "final_state"])
def test_whitened_rewards_keep_their_mean(end: str) -> None:
    """With lambda 0, a target minus the value after it is the reward. Whitened rewards have the variance 1,
    over the final states too, and the mean that they had."""
    options = {} if end == "last_token" else {"end": end, "response_length": 5}
    found = []
    for whiten in (False, True):
        config = PPOConfig(
            prompts=8, lam=0.0, gamma=0.0, rewards=RewardsConfig(whiten=whiten, scale=3.0), **options
        )
        batch = prepared(PPO(config), learner_of())
        ends = batch.columns.get("end_targets_N", torch.zeros(0))
        kept = ends[batch.columns["has_end_N"]] if len(ends) else ends
        found.append(torch.cat([batch.columns["value_targets_K"], kept]))
    assert len(found[0]) == sum(SIZES) + (6 if end == "final_state" else 0)
    assert float(found[1].var()) == pytest.approx(1.0, rel=1e-4)
    assert float(found[1].mean()) == pytest.approx(float(found[0].mean()), abs=1e-5)
    assert float(found[0].var()) != pytest.approx(1.0, rel=0.1)


def test_masked_responses_teach_nothing() -> None:
    """The gradient of policy and critic is that of the other rows."""
    feedback = feedback_of(SIZES, cut=(1, 4))
    for options in ({}, {"end": "final_state", "response_length": 5}):
        common = {"prompts": 8, "whiten": False, "epochs": 1, **options}
        config = PPOConfig(**common, rewards=RewardsConfig(truncated="mask"))
        dropped = PPOConfig(**common, rewards=RewardsConfig(truncated="drop"))
        for model in ("policy", "critic"):
            gradients = []
            for each in (config, dropped):
                learner = learner_of()
                batch = prepared(PPO(each), learner, feedback)
                _, found = gradient_of(learner, lambda: learner.update(PPO(each), batch), model)  # noqa: B023
                gradients.append(torch.cat([part.flatten() for part in found.values()]))
            assert float(gradients[0].norm()) > 1e-4
            torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-4, atol=1e-6)


@pytest.mark.sample("*-True-1e-10", seconds=1.4)
@pytest.mark.inventory(110)
@pytest.mark.parametrize(("double", "tolerance"), [(False, 1e-5), (True, 1e-10)])
@pytest.mark.parametrize("model", ["policy", "critic"])
@pytest.mark.parametrize("kind", ["last_token", "final_state"])
def test_any_split_into_forward_passes_gives_the_same_gradient(
    kind: str, model: str, double: bool, tolerance: float
) -> None:
    options: dict[str, Any] = {"reduction": "sequence"}
    if kind == "final_state":
        shaped = RewardsConfig(truncated="mask", whiten=True)
        options = {"end": kind, "response_length": 5, "rewards": shaped, "kl_coef": 0.1}
    objective = PPO(PPOConfig(prompts=8, epochs=1, **options))
    batch = prepared(objective, learner_of(double=double), feedback_of(SIZES, cut=(1,)))
    found = []
    for micro, tokens in ((64, None), (3, None), (1, None), (None, 14)):
        learner = learner_of(micro, double=double, tokens=tokens)
        _, gradients = gradient_of(learner, lambda: learner.update(objective, batch), model)  # noqa: B023
        found.append(torch.cat([part.flatten() for part in gradients.values()]))
    assert float(found[0].norm()) > 1e-3
    for other in found[1:]:
        assert float((other - found[0]).norm() / found[0].norm()) <= tolerance


def test_old_log_probabilities_of_the_reference() -> None:
    """The ratio of the first optimiser step is that of the policy to the reference."""
    config = PPOConfig(prompts=8, epochs=1, kl_reward_coef=0.0, old_from="reference")
    objective, learner, feedback = PPO(config), learner_of(), feedback_of(SIZES)
    assert objective.requires.models == {"policy", "reference", "critic"}
    batch = prepared(objective, learner, feedback)
    rows = [item.group.trajectories[0] for item in feedback.items]
    logps = {name: learner.forward(name, rows, {"raw"})["raw"] for name in ("policy", "reference")}
    assert torch.equal(batch.columns["old_logps_K"], logps["reference"])
    report = learner.update(objective, batch)
    ratio = float((logps["policy"] - logps["reference"]).exp().mean())
    assert report["policy/ratio_mean"] == pytest.approx(ratio, rel=1e-5)
    assert abs(ratio - 1) > 0.01


def test_vtrace_weighs_tokens_that_other_weights_drew() -> None:
    """Without a lag, V-trace is GAE. With older samples it is not."""
    feedback = feedback_of(SIZES)
    found: dict[str, Any] = {}
    for name in ("gae", "vtrace"):
        batch = prepared(PPO(PPOConfig(prompts=8, advantage=name, whiten=False)), learner_of(), feedback)
        found[name] = batch.columns["advantages_K"]
    assert not torch.allclose(found["gae"], found["vtrace"])
    learner = learner_of()
    rows = [item.group.trajectories[0] for item in feedback.items]
    raw = learner.forward("policy", rows, {"raw"})["raw"].split(list(SIZES))
    fresh = feedback_of(SIZES, logps=[part.numpy() for part in raw])
    for name in ("gae", "vtrace"):
        batch = prepared(PPO(PPOConfig(prompts=8, advantage=name, whiten=False)), learner, fresh)
        found[name] = batch.columns["advantages_K"]
    torch.testing.assert_close(found["gae"], found["vtrace"], rtol=1e-5, atol=1e-6)


def test_vtrace_weighs_advantages_after_they_are_whitened() -> None:
    """Whitened, the mean of what the weights multiply is 0, whatever the weights are."""
    feedback = feedback_of(SIZES)
    plain, whitened = (
        prepared(PPO(PPOConfig(prompts=8, advantage="vtrace", whiten=is_white)), learner_of(), feedback)
        for is_white in (False, True)
    )
    recorded_K = np.concatenate([row.recorded("sampled_logps") for row in plain.rows])
    weights_K = (plain.columns["old_logps_K"] - torch.from_numpy(recorded_K)).exp().clamp(max=1)
    assert weights_K.min() < 0.9
    errors_K = plain.columns["advantages_K"] / weights_K
    expected_K = weights_K * (errors_K - errors_K.mean()) / errors_K.std()
    torch.testing.assert_close(whitened.columns["advantages_K"], expected_K, rtol=1e-4, atol=1e-5)


def test_a_discount_per_turn() -> None:
    """Two turns of two tokens each: between the turns a value counts half as much, and with each token 0.8
    times as much. Values are 0, so targets are discounted scores. A final state is one more place."""
    made = row(np.random.default_rng(0), 3, 2)
    episode = replace(made, segments=(*made.segments, *row(np.random.default_rng(1), 2, 2).segments))
    feedback = feedback_of((2,))
    item = replace(feedback.items[0], group=replace(feedback.items[0].group, trajectories=(episode,)))
    score = item.answer.values[0]
    for options, places in (({}, 3), ({"end": "final_state", "response_length": 9}, 4)):
        common = {"turn_gamma": 0.5, "gamma": 0.8, "lam": 1.0, "whiten": False, "kl_reward_coef": 0.0}
        config = PPOConfig(prompts=1, **common, **options)
        learner = learner_of()
        with torch.no_grad():
            learner.models["critic"].score.weight.zero_()
        batch = prepared(PPO(config), learner, Feedback(1, (item,), 1))
        expected = [score * 0.8 ** (places - t) * (0.5 if t < 2 else 1) for t in range(4)]
        assert batch.columns["value_targets_K"].tolist() == pytest.approx(expected)


def test_steps_without_anything_to_learn() -> None:
    """Nothing has a score; or only an empty response has."""
    feedback = feedback_of(SIZES)
    failed = tuple(replace(item, answer=replace(item.answer, marks=("failed",))) for item in feedback.items)
    for options in ({}, {"end": "final_state", "response_length": 5}):
        objective, learner = PPO(PPOConfig(prompts=8, **options)), learner_of()
        batch = prepared(objective, learner, Feedback(1, failed, 8))
        assert batch.size == 0
        before = [p.clone() for p in learner.models["critic"].trainable().values()]
        learner.update(objective, batch)
        assert all(map(torch.equal, before, learner.models["critic"].trainable().values()))
        batch = prepared(objective, learner, feedback_of((0, 3)))
        assert batch.size == 2
        report = learner.update(objective, batch)
        assert math.isfinite(report["loss/total"])
        batch = prepared(objective, learner, feedback_of((0,)))
        assert all(len(column) in (0, 1) for column in batch.columns.values())


ESTIMATORS = """
import torch
from oat.functional.returns import affine_scan

def gae(given):
    assert given.values_L.shape == given.ratios_L.shape and given.num_rows == int(given.row_of_L.max()) + 1
    errors = given.rewards_L + given.discounts_L * given.next_values_L - given.values_L
    return affine_scan(errors, given.discounts_L * given.lam)

def ratios(given):
    return given.ratios_L.log().double()

def short(given):
    return given.rewards_L[1:]

def broken(given):
    raise KeyError("no such column")
"""


@pytest.mark.parametrize("options", [{}, {"end": "final_state", "response_length": 4}])
def test_an_estimator_of_a_user(tmp_path: Path, options: dict[str, Any]) -> None:
    """A function by path gets rewards, values, discounts and ratios. If it computes GAE from them, the batch
    is that of `gae`. It sees how far the old policy is from the sampler, and is named where it fails."""
    (tmp_path / "mine.py").write_text(ESTIMATORS)
    given, learner = feedback_of(SIZES), learner_of()

    def batch_of(advantage: str, **others: Any) -> Batch:
        config = PPOConfig(prompts=8, gamma=0.9, advantage=advantage, **options, **others)
        return prepared(PPO(config), learner, given)

    mine, expected = batch_of(f"{tmp_path / 'mine.py'}:gae"), batch_of("gae")
    assert mine.columns.keys() == expected.columns.keys()
    for name, column in expected.columns.items():
        torch.testing.assert_close(mine.columns[name], column, atol=1e-5, rtol=1e-5)
    batch = batch_of(f"{tmp_path / 'mine.py'}:ratios", whiten=False)
    ratios_K = batch.columns["old_logps_K"] - recorded_logps(batch.rows)
    torch.testing.assert_close(batch.columns["advantages_K"], ratios_K, atol=1e-5, rtol=1e-5)
    assert float(ratios_K.abs().max()) > 0.1
    with pytest.raises(ContractError, match=r"mine.py:short returned [^;]* places; return a tensor"):
        batch_of(f"{tmp_path / 'mine.py'}:short")
    with pytest.raises(ContractError, match=r"algorithm.advantage: .*mine.py:broken raised KeyError"):
        batch_of(f"{tmp_path / 'mine.py'}:broken")
    with pytest.raises(ConfigError, match=r"std_eps is 0\.1, and nothing reads it"):
        batch_of(f"{tmp_path / 'mine.py'}:gae", std_eps=0.1)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "lambda": ({"lam": 1.1}, r"algorithm\.lam is 1\.1; it must be at least 0 and at most 1"),
    "value_coef": ({"value_coef": -1.0}, r"algorithm\.value_coef is -1"),
    "value_clip": ({"value_clip": 0.0}, r"algorithm\.value_clip is 0\.0; it must be positive"),
    "an unread length": ({"response_length": 4}, r"nothing reads it with algorithm\.end last_token"),
    "a length of 0": ({"end": "final_state", "response_length": 0}, r"must be at least 1"),
    "another estimator": ({"advantage": "group_norm"}, r"algorithm\.advantage is group_norm, which ppo does"),
    "std_eps": ({"std_eps": 0.1}, r"algorithm\.std_eps is 0\.1, and nothing reads it"),
    "a clip filter": ({"rewards": RewardsConfig(flat_group_weight=1.0)}, "ppo compares no groups"),
    "vtrace of another policy": (
        {"advantage": "vtrace", "old_from": "sampler"},
        "old_from is sampler, and vtrace weighs the policy before the update against the sampler",
    ),
    "vtrace with turns": ({"advantage": "vtrace", "turn_gamma": 0.5}, "vtrace has one discount"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_settings_out_of_bounds(kind: str) -> None:
    options, message = WRONG[kind]
    with pytest.raises(ConfigError, match=message):
        PPOConfig(**options)
