"""Corrections for a sampler that is not the old policy, the choice of tokens, the entropy bonus, and the
forms of the KL: columns, losses and gradients of policy gradients by hand, and settings that are wrong."""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from scored_groups import feedback

from oat.algorithms.base import Objective
from oat.errors import ConfigError, OatWarning
from oat.functional.surrogates import vespo_loss
from oat.learner.batching import view_of
from oat.learner.reduction import Reduction
from oat.loop import warn_of_gap
from oat.plugins.registry import ALGORITHMS
from oat.types import Batch, Trajectory

LENGTHS = [1, 4, 2]
ROW_OF_K = [0, 1, 1, 1, 1, 2, 2]
LAG = torch.tensor([0.1, 0.5, -0.2, 0.0, 1.2, -3.0, 2.0])
"""How far the old policy's log-probabilities are above the recorded ones, nats, for each of the 7 tokens."""
ENTROPY = torch.tensor([0.3, 2.0, 0.1, 1.0, 0.2, 3.0, 0.4])


class Models:
    """The models of a step: their passes give recorded log-probabilities plus `LAG` for the policy, and
    recorded ones minus 0.5 for the reference. `asked` has what each pass was asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, set[str]]] = []

    def __call__(self, model: str, rows: Sequence[Trajectory], wants: set[str]) -> Mapping[str, torch.Tensor]:
        self.asked.append((model, wants))
        raw_K = torch.from_numpy(np.concatenate([row.recorded("raw_logps") for row in rows]))
        shift = LAG if model == "policy" else torch.tensor(-0.5)
        return {name: ENTROPY if name == "entropy" else raw_K + shift for name in wants}


def made(name: str, **options: Any) -> Any:
    cls: Any = ALGORITHMS[name]
    sections = {field: value for field, value in options.items() if isinstance(value, dict)}
    kinds = {field: type(getattr(cls.Config(), field)) for field in sections}
    built = {field: kinds[field](**value) for field, value in sections.items()}
    return cls(cls.Config(prompts=1, **{"samples": 3, **options, **built}))


def prepared(objective: Objective, models: Callable[..., Any] | None = None) -> Batch:
    return objective.prepare(feedback((1.0, 4.0, 1.0)), models or Models(), np.random.default_rng(0))


def gradient(objective: Any, batch: Batch, logps_K: torch.Tensor, part: str = "loss/policy") -> list[float]:
    """Return the derivative of a part of the loss with respect to each token's log-probability."""
    logps_K = logps_K.clone().requires_grad_()
    policy = {"sampled": logps_K, "raw": logps_K, "entropy": ENTROPY}
    view = view_of(batch)
    loss = objective.losses({"policy": policy}, view)[part]
    (loss.coef * Reduction(batch)(loss, view, view.group_of_N, first=True)).backward()
    assert logps_K.grad is not None
    return logps_K.grad.tolist()


K = LAG.exp().tolist()
PRODUCT = [math.exp(float(LAG[[k for k in range(7) if ROW_OF_K[k] == n]].sum())) for n in range(3)]
MEAN = [product ** (1 / length) for product, length in zip(PRODUCT, LENGTHS, strict=True)]


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({"form": "truncate"}, [min(k, 2) for k in K]),
        ({"form": "truncate", "low": 0.5}, [min(max(k, 0.5), 2) for k in K]),
        ({"form": "truncate", "level": "sequence"}, [min(PRODUCT[n], 2) for n in ROW_OF_K]),
        ({"form": "truncate", "level": "geometric", "high": 1.3}, [min(MEAN[n], 1.3) for n in ROW_OF_K]),
        ({"form": "mask"}, [k if 0.5 <= k <= 5 else 0 for k in K]),
        ({"form": "mask", "level": "sequence"}, [PRODUCT[n] * (0.5 <= PRODUCT[n] <= 5) for n in ROW_OF_K]),
    ],
)
def test_corrections_multiply_the_numerator_only(section: dict[str, Any], expected: list[float]) -> None:
    plain, corrected = made("rloo"), made("rloo", correction=section)
    batch, without = prepared(corrected), prepared(plain)
    slopes = gradient(corrected, batch, batch.columns["old_logps_K"])
    before = gradient(plain, without, without.columns["old_logps_K"])
    assert slopes == pytest.approx([w * slope for w, slope in zip(expected, before, strict=True)], rel=1e-5)
    assert batch.metrics["correction/weight"] == pytest.approx(sum(expected) / 7, rel=1e-5)


def test_the_gap_between_sampler_and_learner_is_measured() -> None:
    batch = prepared(made("rloo"))
    assert batch.metrics["logps/recomputed"] == 1
    assert batch.metrics["logps/recorded_gap"] == pytest.approx(float(LAG.abs().mean()))
    assert batch.metrics["logps/recorded_gap_max"] == pytest.approx(3.0)


def test_recorded_log_probabilities_serve_without_a_pass_and_are_measured_in_the_update() -> None:
    objective, models = made("rloo"), Models()
    objective.recorded_is_old = True
    batch = prepared(objective, models)
    assert models.asked == []
    assert batch.metrics["logps/recomputed"] == 0
    logps_K = batch.columns["old_logps_K"] + LAG
    values = objective.metrics({"policy": {"sampled": logps_K, "entropy": ENTROPY}}, view_of(batch))
    assert float(values["logps/recorded_gap"][0].mean()) == pytest.approx(float(LAG.abs().mean()), rel=1e-5)
    assert values["logps/recorded_gap_max"][1] == "max"
    assert "logps/recorded_gap" not in prepared(objective, models).metrics


def test_a_gap_between_engine_and_learner_is_warned_of() -> None:
    values = {"logps/recorded_gap": 0.06, "lag/versions": 0.0}
    with pytest.warns(OatWarning, match="differ from the learner's by more than 0.05 nats a token"):
        warn_of_gap(values)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_gap({**values, "logps/recorded_gap": 0.04})
        warn_of_gap({**values, "lag/versions": 1.0})
        warn_of_gap({})


def test_the_sampler_as_the_old_policy_needs_no_pass() -> None:
    objective, models = made("rloo", old_from="sampler"), Models()
    batch = prepared(objective, models)
    assert models.asked == []
    recorded = [-1 / 2, -1 / 3, -2 / 3, -3 / 3, -4 / 3, -1 / 4, -2 / 4]
    assert batch.columns["old_logps_K"].tolist() == pytest.approx(recorded)


def test_one_pass_of_the_policy_serves_everything() -> None:
    options = {"kl_reward_coef": 0.1, "tokens": {"high_entropy_share": 0.5}}
    models = Models()
    prepared(made("rloo", **options), models)
    assert sorted(models.asked) == [("policy", {"entropy", "raw", "sampled"}), ("reference", {"raw"})]


def test_a_bad_response_that_the_policy_has_left_behind_gives_no_gradient() -> None:
    """Rewards 1, 4, 1: responses 0 and 2 have negative advantages. The policy is now 1 nat per token below
    the sampler in response 2, and 0.1 in response 0."""
    objective = made("rloo", correction={"off_policy_bound": 0.5})
    batch = prepared(objective)
    recorded_K = batch.columns["recorded_logps_K"]
    behind = torch.tensor([0.1, 1.0, 1.0, 1.0, 1.0, 0.5, 1.5])
    slopes = gradient(objective, batch, recorded_K - behind)
    assert slopes[5:] == [0.0, 0.0]
    assert all(slope != 0 for slope in slopes[:5])


@pytest.mark.inventory(52)
def test_only_tokens_of_high_entropy_give_a_gradient() -> None:
    """The largest 3 of 7 entropies (a share of 0.4 is 2.8, rounded up); and in each row the largest half."""
    batch = prepared(made("grpo", tokens={"high_entropy_share": 0.4}))
    assert batch.columns["gradient_weight_K"].tolist() == [0, 1, 0, 1, 0, 1, 0]
    assert batch.metrics["policy/gradient_frac"] == pytest.approx(3 / 7)
    section = {"high_entropy_share": 0.5, "high_entropy_per": "row"}
    batch = prepared(made("grpo", tokens=section))
    assert batch.columns["gradient_weight_K"].tolist() == [1, 1, 0, 1, 0, 1, 0]


def test_tokens_of_high_covariance_are_stopped_or_held_back() -> None:
    """Advantages -1.5, 3, -1.5; the covariance is largest where a token's log-probability is far above the
    mean and its response is good, or far below and its response is bad."""
    objective = made("rloo", tokens={"covariance_kl": 0.2, "covariance_kl_coef": 2.0})
    batch = prepared(objective)
    advantages_K = torch.tensor([-1.5, 3, 3, 3, 3, -1.5, -1.5])
    old_K = batch.columns["old_logps_K"]
    covariance_K = (old_K - old_K.mean()) * (advantages_K - advantages_K.mean())
    largest = covariance_K.argsort(descending=True)[:2].tolist()
    assert batch.columns["covariance_kl_K"].nonzero().flatten().tolist() == sorted(largest)
    slopes = gradient(objective, batch, old_K + 0.3, "loss/covariance_kl")
    expected = [2 * (math.exp(0.3) - 1) / 3 if k in largest else 0.0 for k in range(7)]
    assert slopes == pytest.approx(expected, rel=1e-5)
    section = {"covariance_clip": 1.0, "covariance_low": 0.5, "covariance_high": 1.0}
    assert ((covariance_K > 1) & (covariance_K < 5)).any(), "the upper end leaves tokens out"
    stopped = prepared(made("rloo", tokens=section)).columns["gradient_weight_K"]
    in_band_K = (covariance_K >= 0.5) & (covariance_K <= 1.0)
    assert in_band_K.any()
    assert not in_band_K.all()
    assert (stopped == 0).tolist() == in_band_K.tolist()


def test_the_entropy_is_subtracted_from_the_loss() -> None:
    objective = made("grpo", entropy={"coef": 0.01})
    loss = objective.losses(_outputs(prepared(objective)), view_of(prepared(objective)))["loss/entropy"]
    assert (loss.coef, loss.terms.tolist()) == (-0.01, ENTROPY.tolist())
    assert "loss/entropy" not in made("grpo").losses(
        _outputs(prepared(made("grpo"))), view_of(prepared(made("grpo")))
    )


def test_an_adaptive_entropy_coefficient_moves_and_is_saved() -> None:
    """The mean entropy is 1: at a target of 2 the coefficient rises, at 0.5 it falls and is not applied."""
    below = made("grpo", entropy={"coef": 0.01, "target": 2.0})
    batch = prepared(below)
    assert batch.metrics["policy/entropy_coef"] == pytest.approx(0.015)
    assert below.losses(_outputs(batch), view_of(batch))["loss/entropy"].coef == pytest.approx(-0.015)
    for step, highest, expected in ((0.02, 1.0, 0.03), (0.02, 0.025, 0.025)):
        section = {"coef": 0.01, "target": 2.0, "step": step, "highest": highest}
        found = prepared(made("grpo", entropy=section)).metrics["policy/entropy_coef"]
        assert found == pytest.approx(expected)
    continued = made("grpo", entropy={"coef": 0.01, "target": 2.0})
    continued.load_state(below.state)
    assert prepared(continued).metrics["policy/entropy_coef"] == pytest.approx(0.02)
    above = made("grpo", entropy={"coef": 0.01, "target": 0.5})
    assert prepared(above).metrics["policy/entropy_coef"] == 0
    assert above.state["entropy_coef"] == pytest.approx(0.005)
    other = made("grpo", entropy={"coef": 0.5, "target": 2.0})
    other.load_state(below.state)
    assert other.weights.entropy == 0.5, "a fork that begins with another weight keeps its own"


def test_forms_of_the_kl_by_hand() -> None:
    """The policy is 0.5 nats above the reference everywhere, and 0.2 above the old policy."""
    coefs = {"kl_coef": 1.0, "reduction": "token"}
    expected = {
        "k1": 1.0 / 7,
        "k2": 0.5 / 7,
        "k3": (1 - math.exp(-0.5)) / 7,
    }
    for name, slope in expected.items():
        objective = made("grpo", kl_estimator=name, **coefs)
        batch = prepared(objective)
        logps_K = batch.columns["reference_logps_K"] + 0.5
        assert gradient(objective, batch, logps_K, "loss/kl") == pytest.approx([slope] * 7, rel=1e-4)
    objective = made("grpo", kl_unbiased=True, **coefs)
    batch = prepared(objective)
    batch.columns["old_logps_K"] = batch.columns["reference_logps_K"] + 0.3
    k3 = math.exp(-0.5) - 1 + 0.5
    slope = math.exp(0.2) * (k3 + 1 - math.exp(-0.5)) / 7
    found = gradient(objective, batch, batch.columns["reference_logps_K"] + 0.5, "loss/kl")
    assert found == pytest.approx([slope] * 7, rel=1e-4)


def test_the_log_ratio_of_a_kl_has_a_bound() -> None:
    """In the loss, the policy is 0.5 nats above the reference; in the rewards, 0.5 + `LAG`, of which the
    bound of 0.4 keeps 0.4, but 0.3 of the third token and -0.4 of the sixth."""
    for bound, d in ((0.4, 0.4), (0.6, 0.5)):
        objective = made("grpo", kl_coef=1.0, kl_max_log_ratio=bound, reduction="token")
        batch = prepared(objective)
        logps_K = batch.columns["reference_logps_K"] + 0.5
        policy = {"sampled": logps_K, "raw": logps_K, "entropy": ENTROPY}
        terms_K = objective.losses({"policy": policy}, view_of(batch))["loss/kl"].terms
        assert terms_K.tolist() == pytest.approx([math.exp(-d) - 1 + d] * 7, rel=1e-4)
        slope = 0.0 if d == bound else (1 - math.exp(-d)) / 7
        assert gradient(objective, batch, logps_K, "loss/kl") == pytest.approx([slope] * 7, rel=1e-4)
    options = {"advantage": "none", "kl_reward_coef": 0.1, "kl_max_log_ratio": 0.4}
    d_K = [0.4, 0.4, 0.3, 0.4, 0.4, -0.4, 0.4]
    penalties = [0.1 * sum(d_K[n:end]) for n, end in zip(range(7), [1, 5, 5, 5, 5, 7, 7], strict=True)]
    expected = [score - p for score, p in zip([1, 4, 4, 4, 4, 1, 1], penalties, strict=True)]
    found = prepared(made("rloo", **options)).columns["advantages_K"]
    assert found.tolist() == pytest.approx(expected, rel=1e-5)


def test_the_distance_that_ends_passes_is_that_of_the_old_policy_to_the_new_one() -> None:
    """KL(old || new) over tokens that the old policy drew, with new - old = 0.5: e^0.5 - 1 - 0.5. That of the
    other direction, e^-0.5 - 1 + 0.5, is smaller."""
    objective = made("rloo", target_kl=0.13, epochs=2)
    batch = prepared(objective)
    policy = {"sampled": batch.columns["old_logps_K"] + 0.5, "entropy": ENTROPY}
    values_K, per = objective.metrics({"policy": policy}, view_of(batch))["kl/old"]
    assert (values_K.tolist(), per) == (pytest.approx([math.exp(0.5) - 1.5] * 7, rel=1e-4), "K")
    assert objective.ends_passes({"kl/old": math.exp(0.5) - 1.5})
    assert not objective.ends_passes({"kl/old": math.exp(-0.5) - 0.5})


def test_the_weight_of_a_kl_in_the_rewards_follows_a_target() -> None:
    """The policy is 0.5 + `LAG` nats above the reference. The weight changes before it is applied, and is a
    state. A fork that begins with another weight, or adapts that of the loss, keeps its own."""
    section = {"advantage": "none", "kl_reward_coef": 0.1, "kl_target": 0.001, "kl_horizon": 30}
    objective = made("rloo", **section)
    batch = prepared(objective)
    present = batch.metrics["kl/coef"]
    d_K = LAG + 0.5
    divergence = float(((-d_K).exp() - 1 + d_K).mean())
    assert divergence > 0.0012, "the factor is at its bound"
    assert present == pytest.approx(0.1 * (1 + 0.2 * 3 / 30))
    rewards_K = torch.tensor([1.0, 0, 0, 0, 4, 0, 1]) - present * d_K
    expected = [float(rewards_K[n:end].sum()) for n, end in zip(range(7), [1, 5, 5, 5, 5, 7, 7], strict=True)]
    assert batch.columns["advantages_K"].tolist() == pytest.approx(expected, rel=1e-4)
    assert "kl_coef_N" not in batch.columns
    continued = made("rloo", **section)
    continued.load_state(objective.state)
    assert continued.state == objective.state == {"kl_reward_coef": present, "started": 0.1}
    assert prepared(continued).metrics["kl/coef"] == prepared(objective).metrics["kl/coef"] > present
    for change, adapted, of_rewards in (({"kl_reward_coef": 0.2}, 0.2, 0.2), ({"kl_coef": 0.3}, 0.3, 0.1)):
        fork = made("rloo", **{**section, **change})
        fork.load_state(objective.state)
        assert (fork.weights.kl, fork.weights.kl_reward_coef) == (adapted, of_rewards)


def test_with_the_reference_as_old_policy_nothing_is_said_of_the_sampler() -> None:
    metrics = prepared(made("grpo", old_from="reference")).metrics
    assert metrics["logps/recomputed"] == 1
    assert "logps/recorded_gap" not in metrics


def test_vespo_weighs_a_response_by_its_correction_too() -> None:
    objective = made("vespo", correction={"form": "truncate"})
    batch = prepared(objective)
    old_K = batch.columns["old_logps_K"]
    assert "gradient_weight_K" not in batch.columns
    weights_K = torch.tensor([min(k, 2) for k in K])
    logps_K = old_K + 0.1
    advantages_K = batch.columns["advantages_N"][torch.tensor(ROW_OF_K)]
    place = (torch.tensor(ROW_OF_K), 3)
    given = logps_K.clone().requires_grad_()
    vespo_loss(given, old_K, advantages_K, *place, correction_K=weights_K)[0].mean().backward()
    assert given.grad is not None
    assert gradient(objective, batch, logps_K) == pytest.approx(given.grad.tolist(), rel=1e-5)
    plain = made("vespo")
    assert gradient(plain, prepared(plain), logps_K) != pytest.approx(given.grad.tolist(), rel=1e-2)


def test_an_advantage_has_a_bound() -> None:
    batch = prepared(made("rloo", advantage_clip=1.0))
    assert batch.columns["advantages_N"].tolist() == [-1.0, 1.0, -1.0]
    batch = prepared(made("rloo", advantage_clip=1.0, gamma=0.5))
    assert batch.columns["advantages_K"].abs().max() == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"correction": {"high": 3.0}}, "correction.high is 3.0, and nothing reads it without"),
        (
            {"old_from": "reference", "tokens": {"covariance_clip": 0.1}},
            "covariance_kl read the policy's log-probabilities before the update, and with algorithm.old_fr",
        ),
        ({"correction": {"form": "mask", "low": 6.0}}, "correction.low is 6.0, and high is 5.0"),
        ({"correction": {"form": "truncate", "high": -1.0}}, "correction.high is -1.0; it must be positive"),
        ({"correction": {"off_policy_bound": math.inf}}, "correction.off_policy_bound is inf"),
        ({"correction": {"form": "mask"}, "old_from": "sampler"}, "there is no old policy beside"),
        ({"tokens": {"high_entropy_share": 0.0}}, "high_entropy_share is 0, with which no token"),
        ({"tokens": {"high_entropy_per": "row"}}, "high_entropy_per is row, and nothing reads it"),
        ({"tokens": {"covariance_clip": 2.0}}, "covariance_clip is 2.0; it must be a share"),
        ({"tokens": {"covariance_low": 0.5}}, "covariance_low is 0.5, and nothing reads it without"),
        ({"entropy": {"step": 0.1}}, "entropy.step is 0.1, and nothing reads it without"),
        ({"entropy": {"coef": -1.0}}, "entropy.coef is -1.0; it must be at least 0"),
        ({"kl_estimator": "k1"}, "kl_estimator is k1, and nothing reads it with"),
        ({"kl_coef": 0.1, "kl_estimator": "k2", "kl_unbiased": True}, "k2 is no estimator of the KL"),
        ({"advantage_clip": 0.0}, "advantage_clip is 0.0; it must be positive"),
    ],
)
def test_settings_that_are_wrong(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words.replace(".", r"\.")):
        made("grpo", **options)


def _outputs(batch: Batch) -> dict[str, dict[str, torch.Tensor]]:
    old_K = batch.columns["old_logps_K"]
    return {"policy": {"sampled": old_K, "raw": old_K, "entropy": ENTROPY}}
