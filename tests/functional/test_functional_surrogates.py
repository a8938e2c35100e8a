"""Losses of the policy: against plain Python, their gradients in float64, and their signs."""

import math
from collections.abc import Callable

import pytest
import torch

from oat.errors import ShapeError
from oat.functional.policy import clipped_policy_loss
from oat.functional.surrogates import (
    cispo_loss,
    cpgd_loss,
    gspo_loss,
    luspo_loss,
    policy_drift,
    reinforce_loss,
    sapo_loss,
    vespo_loss,
)

ROWS = torch.tensor([0, 0, 0, 2, 2, 3])
"""The row of each token; row 1 has none."""
CORRECTION = [2.0, 0.5, 1.5, 0.8, 1.0, 0.7]
"""Weights of the tokens for a sampler that is not the old policy."""
Terms = tuple[torch.Tensor, torch.Tensor]


def made() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return log-probabilities, old ones, and advantages of both signs. Some ratios are beyond the bounds."""
    torch.manual_seed(0)
    old_K = -torch.rand(6, dtype=torch.float64) - 0.5
    shift_K = torch.tensor([0.05, 0.6, -0.7, -0.4, 0.1, 0.5], dtype=torch.float64)
    return old_K + shift_K, old_K, torch.tensor([1.0, 2.0, -1.0, 1.5, -0.5, -2.0], dtype=torch.float64)


def clipped(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


def gate(ratio: float, tau: float) -> float:
    return 4 / tau / (1 + math.exp(-tau * (ratio - 1)))


def gamma_weight(log_w: float, k: float, c: float) -> float:
    log_w = clipped(log_w, math.log(1e-8), 20.0)
    return math.exp(c + k * log_w - c * math.exp(log_w))


def slow(name: str) -> list[float]:
    logps, old, advantages = (values.tolist() for values in made())
    found = []
    for k, row in enumerate(ROWS.tolist()):
        a, ratio = advantages[k], math.exp(logps[k] - old[k])
        own = [logps[j] - old[j] for j in range(6) if ROWS[j] == row]
        s = math.exp(sum(own) / len(own))
        log_r = logps[k] - old[k]
        plain = -min(ratio * a, clipped(ratio, 0.8, 1.3) * a)
        found.append(
            {
                "reinforce": -a * logps[k],
                "dual": min(plain, -1.5 * a) if a < 0 else plain,
                "cispo": -min(ratio, 1.3) * a * logps[k],
                "cispo, both": -clipped(ratio, 0.8, 1.3) * a * logps[k],
                "gspo": -min(s * a, clipped(s, 0.8, 1.3) * a),
                "gspo, tokens": -min(s * a, clipped(s, 0.8, 1.3) * a),
                "luspo": -min(s * a, clipped(s, 0.8, 1.3) * a),
                "sapo": -a * gate(ratio, 1.0 if a > 0 else 1.05),
                "vespo": -a * logps[k] * gamma_weight(sum(own), *((2, 3) if a >= 0 else (3, 2))),
                "vespo, corrected": -a
                * logps[k]
                * gamma_weight(
                    sum(own) + sum(math.log(CORRECTION[j]) for j in range(6) if ROWS[j] == row),
                    *((2, 3) if a >= 0 else (3, 2)),
                ),
                "cpgd": -min(log_r * a, clipped(log_r, math.log(0.8), math.log(1.3)) * a),
                "drift": ratio - 1 - log_r,
            }[name]
        )
    return found


BOUNDS = {"clip_low": 0.2, "clip_high": 0.3}
LOSSES: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "reinforce": lambda new, old, a: reinforce_loss(new, a),
    "dual": lambda new, old, a: clipped_policy_loss(new, old, a, dual_clip=1.5, **BOUNDS)[0],
    "cispo": lambda new, old, a: cispo_loss(new, old, a, clip_high=0.3)[0],
    "cispo, both": lambda new, old, a: cispo_loss(new, old, a, **BOUNDS)[0],
    "gspo": lambda new, old, a: gspo_loss(new, old, a, ROWS, 4, **BOUNDS)[0],
    "gspo, tokens": lambda new, old, a: gspo_loss(new, old, a, ROWS, 4, per_token=True, **BOUNDS)[0],
    "luspo": lambda new, old, a: luspo_loss(new, old, a, ROWS, 4, **BOUNDS)[0],
    "sapo": lambda new, old, a: sapo_loss(new, old, a)[0],
    "vespo": lambda new, old, a: vespo_loss(new, old, a, ROWS, 4)[0],
    "vespo, corrected": lambda new, old, a: vespo_loss(
        new, old, a, ROWS, 4, correction_K=torch.tensor(CORRECTION, dtype=new.dtype)
    )[0],
    "cpgd": lambda new, old, a: cpgd_loss(new, old, a, **BOUNDS)[0],
    "drift": lambda new, old, a: policy_drift(new, old),
}


@pytest.mark.parametrize("name", LOSSES)
def test_terms_are_those_of_plain_python(name: str) -> None:
    new_K, old_K, advantages_K = made()
    assert LOSSES[name](new_K, old_K, advantages_K).tolist() == pytest.approx(slow(name), abs=1e-12)
    single = LOSSES[name](new_K.float(), old_K.float(), advantages_K.float())
    assert single.tolist() == pytest.approx(slow(name), abs=1e-5)


@pytest.mark.parametrize("name", ["reinforce", "dual", "gspo", "luspo", "sapo", "cpgd", "drift"])
def test_gradients_are_those_of_differences(name: str) -> None:
    new_K, old_K, advantages_K = made()
    assert torch.autograd.gradcheck(
        lambda given: LOSSES[name](given, old_K, advantages_K), new_K.requires_grad_(), atol=1e-6
    )


def gradient(name: str, new_K: torch.Tensor, old_K: torch.Tensor, advantages_K: torch.Tensor) -> list[float]:
    new_K = new_K.clone().requires_grad_()
    LOSSES[name](new_K, old_K, advantages_K).sum().backward()
    assert new_K.grad is not None
    return new_K.grad.tolist()


def test_gradients_through_stopped_ratios_by_hand() -> None:
    """CISPO: -min(r, 1.3) A. GSPO by tokens: -s A of the own token where it is not clipped."""
    new_K, old_K, advantages_K = made()
    ratios = (new_K - old_K).exp().tolist()
    expected = [-min(r, 1.3) * a for r, a in zip(ratios, advantages_K.tolist(), strict=True)]
    assert gradient("cispo", new_K, old_K, advantages_K) == pytest.approx(expected, abs=1e-12)
    s = [math.exp(m) for m in (-0.05 / 3, -0.05 / 3, -0.05 / 3, -0.15, -0.15, 0.5)]
    expected = [-r * a for r, a in zip(s, advantages_K.tolist(), strict=True)]
    assert gradient("gspo, tokens", new_K, old_K, advantages_K) == pytest.approx(expected, abs=1e-12)


def test_the_gradient_of_a_sequence_is_shared_by_its_tokens() -> None:
    """Row 0 has advantages that sum to 2, and a ratio within the bounds: every token of it gets -2 s / 3."""
    new_K, old_K, advantages_K = made()
    found = gradient("gspo", new_K, old_K, advantages_K)
    assert found[:3] == pytest.approx([-2 * math.exp(-0.05 / 3) / 3] * 3, abs=1e-12)


@pytest.mark.parametrize("name", [name for name in LOSSES if name not in ("drift", "vespo, corrected")])
def test_descent_follows_the_sign_of_the_advantage(name: str) -> None:
    """At equal policies the slope of each token is minus its advantage. For GSPO it is the mean of its row's
    advantages, so the advantages are equal within rows."""
    _, old_K, _ = made()
    advantages_K = torch.tensor([1.0, 1.0, 1.0, -1.5, -1.5, 2.0], dtype=torch.float64)
    found = gradient(name, old_K, old_K, advantages_K)
    assert found == pytest.approx((-advantages_K).tolist(), abs=1e-12)


def test_a_row_of_luspo_counts_by_its_length() -> None:
    """The sum of a row's terms is its number of tokens times the mean, which is GSPO's."""
    new_K, old_K, _ = made()
    advantages_K = torch.tensor([1.0, 1.0, 1.0, -1.5, -1.5, 2.0], dtype=torch.float64)
    terms_K = LOSSES["luspo"](new_K, old_K, advantages_K)
    s = math.exp(-0.05 / 3)
    assert terms_K[:3].sum().item() == pytest.approx(-3 * s, abs=1e-12)
    assert gradient("luspo", new_K, old_K, advantages_K)[:3] == pytest.approx([-s] * 3, abs=1e-12)


def test_the_gate_of_sapo_by_hand() -> None:
    """At a ratio of 2 the slope by the log-probability is 4 sigmoid'(1) r = 4 * 0.1966 * 2. With a
    temperature of 2 it is 4 sigmoid'(2) r. At a ratio of e^2 it is small, but not 0."""
    logps = torch.tensor([math.log(2.0), math.log(2.0), math.log(2.0), 2.0], requires_grad=True)
    advantages = torch.tensor([1.0, -1.0, 0.0, 1.0])
    terms, bounded = sapo_loss(logps, torch.zeros(4), advantages, temperature=1.0, negative_temperature=2.0)
    assert terms[:3].tolist() == pytest.approx([-4 * 0.7310586, 2 * 0.8807971, 0.0], abs=1e-6)
    assert bounded.tolist() == [0, 0, 0, 0]
    terms.sum().backward()
    assert logps.grad is not None
    assert logps.grad[:3].tolist() == pytest.approx([-8 * 0.1966119, 8 * 0.1049936, 0.0], abs=1e-6)
    assert -0.1 < logps.grad[3].item() < -0.01


def test_a_higher_temperature_of_sapo_fades_sooner() -> None:
    slopes = []
    for temperature in (0.5, 1.3, 2.0):
        logps = torch.tensor([0.7, -0.7], requires_grad=True)
        sapo_loss(logps, torch.zeros(2), torch.ones(2), temperature=temperature)[0].sum().backward()
        assert logps.grad is not None
        slopes.append(logps.grad.abs())
    assert (slopes[0] > slopes[1]).all()
    assert (slopes[1] > slopes[2]).all()


def test_the_weight_of_vespo_by_hand() -> None:
    """Row 0 has w = 2: the weight is 2^2 e^(3 (1 - 2)) for a good token and 2^3 e^(2 (1 - 2)) for a bad one.
    The gradient by the log-probability is minus weight times advantage, without that of w."""
    logps = torch.tensor([math.log(4.0) - 1, math.log(0.5) - 1], dtype=torch.float64, requires_grad=True)
    old = torch.full((2,), -1.0, dtype=torch.float64)
    advantages = torch.tensor([1.0, -1.0], dtype=torch.float64)
    terms, bounded = vespo_loss(logps, old, advantages, torch.tensor([0, 0]), 1)
    assert bounded.tolist() == [0, 0]
    terms.sum().backward()
    assert logps.grad is not None
    assert logps.grad.tolist() == pytest.approx([-4 * math.exp(-3), 8 * math.exp(-2)], abs=1e-12)


@pytest.mark.parametrize(("fall", "weight"), [(-30.0, math.exp(3 + 2 * math.log(1e-8))), (30.0, 0.0)])
def test_extreme_weights_of_vespo_are_finite(fall: float, weight: float) -> None:
    """Log w of three tokens that moved by 30 nats each is held at its bounds; a correction of 0 also."""
    old = torch.full((3,), -1.0)
    terms, bounded = vespo_loss(old + fall, old, torch.ones(3), torch.zeros(3, dtype=torch.long), 1)
    assert terms.tolist() == pytest.approx((-weight * (old + fall)).tolist(), rel=1e-5)
    assert bounded.tolist() == [1, 1, 1]
    none = torch.zeros(3)
    terms, _ = vespo_loss(old, old, torch.ones(3), torch.zeros(3, dtype=torch.long), 1, correction_K=none)
    assert terms.isfinite().all()


def test_the_drift_has_its_minimum_at_the_old_policy() -> None:
    _, old_K, advantages_K = made()
    assert gradient("drift", old_K, old_K, advantages_K) == [0.0] * 6
    assert all(slope > 0 for slope in gradient("drift", old_K + 0.1, old_K, advantages_K))
    assert all(slope < 0 for slope in gradient("drift", old_K - 0.1, old_K, advantages_K))


def test_marks_say_where_a_bound_decides() -> None:
    new_K, old_K, advantages_K = made()
    assert cispo_loss(new_K, old_K, advantages_K, clip_high=0.3)[1].tolist() == [0, 1, 0, 0, 0, 1]
    assert gspo_loss(new_K, old_K, advantages_K, ROWS, 4, **BOUNDS)[1].tolist() == [0] * 6
    tight = gspo_loss(new_K, old_K, advantages_K, ROWS, 4, clip_low=1e-3, clip_high=1e-3)[1]
    # rows 0 and 2 have a ratio below 1, and tokens 2 and 4 negative advantages; row 3 is above 1, and bad
    assert tight.tolist() == [0, 0, 1, 0, 1, 0]
    assert cpgd_loss(new_K, old_K, advantages_K, **BOUNDS)[1].tolist() == [0, 1, 1, 0, 0, 0]
    plain = clipped_policy_loss(new_K, old_K, advantages_K, **BOUNDS)[1].tolist()
    dual = clipped_policy_loss(new_K, old_K, advantages_K, dual_clip=1.5, **BOUNDS)[1].tolist()
    assert (plain, dual) == ([0, 1, 1, 0, 0, 0], [0, 1, 1, 0, 0, 1])


def test_without_a_lower_bound_a_bad_token_keeps_its_gradient() -> None:
    new_K, old_K, advantages_K = made()
    free, marks = cpgd_loss(new_K, old_K, advantages_K, clip_low=None, clip_high=0.3)
    assert free[2].item() == pytest.approx(-0.7)
    assert marks.tolist() == [0, 1, 0, 0, 0, 0]


def test_wrong_shapes_are_refused(unchecked: None) -> None:
    with pytest.raises(ShapeError, match="advantages"):
        cispo_loss(torch.zeros(3), torch.zeros(3), torch.zeros(2), clip_high=0.2)
    with pytest.raises(ShapeError, match="advantages"):
        sapo_loss(torch.zeros(3), torch.zeros(3), torch.zeros(2))
    with pytest.raises(ShapeError, match="correction_K"):
        vespo_loss(*[torch.zeros(3)] * 3, torch.zeros(3, dtype=torch.long), 1, correction_K=torch.zeros(2))
    with pytest.raises(ShapeError, match="old_logps"):
        policy_drift(torch.zeros(3), torch.zeros(2))
    with pytest.raises(ShapeError, match="row_of_K"):
        gspo_loss(*[torch.zeros(3)] * 3, torch.zeros(2, dtype=torch.long), 1, clip_low=0.1, clip_high=0.1)
