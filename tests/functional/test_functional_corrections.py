"""Corrections for a sampler that is not the policy: by hand, against plain Python and exact expectations."""

import math
from collections.abc import Callable

import pytest
import torch

from oat.errors import ShapeError
from oat.functional.corrections import (
    Level,
    masked_weights,
    on_policy_mask,
    recorded_gap,
    sampler_ratios,
    truncated_weights,
)

LEVELS: tuple[Level, ...] = ("token", "sequence", "geometric")
ROWS = torch.tensor([0, 0, 2, 2, 2, 3])
"""The row of each token; row 1 has none."""


def made() -> tuple[torch.Tensor, torch.Tensor]:
    """Return old and recorded log-probabilities with ratios (4, 1/2), (1, 8, 1/8) and 1/4."""
    ratios_K = torch.tensor([4.0, 0.5, 1.0, 8.0, 0.125, 0.25], dtype=torch.float64)
    recorded_K = torch.tensor([-3.0, -0.5, -1.0, -4.0, -0.2, -2.0], dtype=torch.float64)
    return recorded_K + ratios_K.log(), recorded_K


EXPECTED: dict[str, list[float]] = {
    "token": [4.0, 0.5, 1.0, 8.0, 0.125, 0.25],
    "sequence": [2.0, 2.0, 1.0, 1.0, 1.0, 0.25],
    "geometric": [2**0.5, 2**0.5, 1.0, 1.0, 1.0, 0.25],
}


@pytest.mark.parametrize("level", LEVELS)
def test_ratios_by_hand(level: Level) -> None:
    """Row 0: the product of 4 and 1/2 is 2, and their geometric mean is the root of 2."""
    found = sampler_ratios(*made(), ROWS, 4, level=level)
    assert found.tolist() == pytest.approx(EXPECTED[level], rel=1e-12)


@pytest.mark.parametrize("level", LEVELS)
def test_truncation_by_hand(level: Level) -> None:
    weights, bounded = truncated_weights(*made(), ROWS, 4, level=level, cap=1.5)
    assert weights.tolist() == pytest.approx([min(k, 1.5) for k in EXPECTED[level]], rel=1e-12)
    assert bounded.tolist() == [float(k > 1.5) for k in EXPECTED[level]]
    weights, bounded = truncated_weights(*made(), ROWS, 4, level=level, cap=1.5, floor=0.4)
    assert weights.tolist() == pytest.approx([min(max(k, 0.4), 1.5) for k in EXPECTED[level]], rel=1e-12)
    assert bounded.tolist() == [float(not 0.4 <= k <= 1.5) for k in EXPECTED[level]]


def test_the_default_cap_is_two() -> None:
    assert truncated_weights(*made(), ROWS, 4)[0].tolist() == pytest.approx([2.0, 0.5, 1.0, 2.0, 0.125, 0.25])


@pytest.mark.parametrize("level", LEVELS)
def test_masks_by_hand(level: Level) -> None:
    """Inside [0.4, 5] the weight is the ratio itself; outside it is 0."""
    weights, out = masked_weights(*made(), ROWS, 4, level=level, low=0.4)
    assert weights.tolist() == pytest.approx([k if 0.4 <= k <= 5 else 0.0 for k in EXPECTED[level]])
    assert out.tolist() == [float(not 0.4 <= k <= 5) for k in EXPECTED[level]]
    open_above, _ = masked_weights(*made(), ROWS, 4, level=level, low=0.9, high=None)
    assert open_above.tolist() == pytest.approx([k if k >= 0.9 else 0.0 for k in EXPECTED[level]])
    open_below, _ = masked_weights(*made(), ROWS, 4, level=level, low=None, high=0.9)
    assert open_below.tolist() == pytest.approx([k if k <= 0.9 else 0.0 for k in EXPECTED[level]])


def test_bounds_themselves_are_inside() -> None:
    recorded = torch.zeros(2, dtype=torch.float64)
    old = torch.tensor([0.5, 4.0], dtype=torch.float64).log()
    low, high = old.exp().tolist()
    weights, out = masked_weights(old, recorded, torch.tensor([0, 1]), 2, low=low, high=high)
    assert weights.tolist() == [low, high]
    assert out.tolist() == [0.0, 0.0]


Weights = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def slow_ratios(old: list[float], recorded: list[float], rows: list[int], level: str) -> list[float]:
    found = []
    for k, row in enumerate(rows):
        own = [old[j] - recorded[j] for j in range(len(rows)) if rows[j] == row]
        logarithm = {"token": old[k] - recorded[k], "sequence": sum(own), "geometric": sum(own) / len(own)}
        found.append(math.exp(logarithm[level]))
    return found


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("seed", range(4))
def test_weights_are_those_of_plain_python(level: Level, seed: int) -> None:
    """Rows in any order, and rows without tokens."""
    torch.manual_seed(seed)
    row_of_K = torch.randint(0, 6, (25,))
    old_K, recorded_K = -2 * torch.rand(2, 25, dtype=torch.float64)
    expected = slow_ratios(old_K.tolist(), recorded_K.tolist(), row_of_K.tolist(), level)
    truncated, _ = truncated_weights(old_K, recorded_K, row_of_K, 6, level=level, cap=1.3, floor=0.8)
    masked, _ = masked_weights(old_K, recorded_K, row_of_K, 6, level=level, low=0.8, high=1.3)
    assert truncated.tolist() == pytest.approx([min(max(k, 0.8), 1.3) for k in expected], abs=1e-12)
    assert masked.tolist() == pytest.approx([k if 0.8 <= k <= 1.3 else 0 for k in expected], abs=1e-12)
    single, _ = truncated_weights(old_K.float(), recorded_K.float(), row_of_K, 6, level=level, cap=1e9)
    assert single.dtype == torch.float32
    assert single.tolist() == pytest.approx(expected, rel=1e-5)


def test_weighted_tokens_of_the_sampler_have_the_mean_of_the_old_policy() -> None:
    """Over all tokens that the sampler may draw, weighted by its probabilities."""
    sampler, old = torch.tensor([0.5, 0.25, 0.25]), torch.tensor([0.2, 0.7, 0.1])
    value = torch.tensor([1.0, -2.0, 5.0])
    weights = sampler_ratios(old.log(), sampler.log(), torch.arange(3), 3)
    assert (sampler * weights * value).sum().item() == pytest.approx((old * value).sum().item(), abs=1e-6)
    swapped = sampler_ratios(sampler.log(), old.log(), torch.arange(3), 3)
    assert (sampler * swapped * value).sum().item() != pytest.approx((old * value).sum().item(), abs=0.1)


@pytest.mark.parametrize("level", LEVELS)
def test_a_sampler_that_is_the_policy_needs_no_correction(level: Level) -> None:
    same = torch.tensor([-1.0, -2.0, -3.0, -0.1, 0.0, -7.0])
    for function in (truncated_weights, masked_weights):
        weights, bounded = function(same, same.clone(), ROWS, 4, level=level)
        assert weights.tolist() == [1.0] * 6
        assert bounded.tolist() == [0.0] * 6


@pytest.mark.parametrize("level", LEVELS)
def test_extreme_ratios_are_finite_and_have_no_gradient(level: Level) -> None:
    old_K = torch.tensor([0.0, -500.0], requires_grad=True)
    recorded_K = torch.tensor([-500.0, 0.0])
    rows = torch.tensor([0, 1])
    weights, bounded = truncated_weights(old_K, recorded_K, rows, 2, level=level)
    assert weights.tolist() == [2.0, 0.0]
    assert bounded.tolist() == [1.0, 0.0]
    masked, out = masked_weights(old_K, recorded_K, rows, 2, level=level, low=None, high=None)
    assert masked.tolist() == [0.0, 0.0]
    assert out.tolist() == [1.0, 0.0]
    assert not weights.requires_grad
    assert not masked.requires_grad


def test_the_off_policy_mask_by_hand() -> None:
    """The policy fell by (0.4 + 0.8) / 2 = 0.6 nats in row 0, by 0.1 in row 2, and rose by 1 in row 3. Only
    negative advantages of row 0 are left out."""
    recorded_K = torch.full((6,), -1.0, dtype=torch.float64)
    fall_K = torch.tensor([0.4, 0.8, 0.1, 0.1, 0.1, -1.0], dtype=torch.float64)
    advantages_K = torch.tensor([-1.0, 1.0, -1.0, -1.0, -1.0, -1.0], dtype=torch.float64)
    logps_K = (recorded_K - fall_K).requires_grad_()
    kept = on_policy_mask(logps_K, recorded_K, advantages_K, ROWS, 4, bound=0.5)
    assert kept.tolist() == [0, 1, 1, 1, 1, 1]
    assert not kept.requires_grad
    assert on_policy_mask(logps_K, recorded_K, -advantages_K, ROWS, 4, bound=0.5).tolist() == [
        1,
        0,
        1,
        1,
        1,
        1,
    ]
    assert on_policy_mask(recorded_K, logps_K, advantages_K, ROWS, 4, bound=0.5).tolist() == [
        1,
        1,
        1,
        1,
        1,
        0,
    ]
    assert on_policy_mask(logps_K, recorded_K, 0 * advantages_K, ROWS, 4, bound=0.5).tolist() == [1] * 6


def test_a_mean_at_the_bound_keeps_the_row() -> None:
    args = (torch.tensor([-1.5]), torch.tensor([-1.0]), torch.tensor([-1.0]), torch.tensor([0]), 1)
    assert on_policy_mask(*args, bound=0.5).tolist() == [1.0]
    assert on_policy_mask(*args, bound=0.499).tolist() == [0.0]


@pytest.mark.parametrize("seed", range(4))
def test_the_off_policy_mask_is_that_of_plain_python(seed: int) -> None:
    torch.manual_seed(seed)
    row_of_K = torch.randint(0, 6, (25,))
    logps_K, recorded_K, advantages_K = torch.randn(3, 25, dtype=torch.float64)
    expected = []
    for k in range(25):
        own = [j for j in range(25) if row_of_K[j] == row_of_K[k]]
        mean = sum(float(recorded_K[j] - logps_K[j]) for j in own) / len(own)
        expected.append(float(not (mean > 0.2 and advantages_K[k] < 0)))
    found = on_policy_mask(logps_K, recorded_K, advantages_K, row_of_K, 6, bound=0.2)
    assert found.tolist() == expected
    assert 0 < sum(expected) < 25


def test_gaps_by_hand() -> None:
    old, recorded = torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([-1.0, -2.5, -2.75])
    assert recorded_gap(old, recorded) == (pytest.approx(0.25), pytest.approx(0.5))
    assert recorded_gap(recorded, old) == recorded_gap(old, recorded)
    assert recorded_gap(torch.zeros(0), torch.zeros(0)) == (0.0, 0.0)


def test_wrong_shapes_are_refused(unchecked: None) -> None:
    rows = torch.zeros(3, dtype=torch.long)
    with pytest.raises(ShapeError, match="recorded_logps_K"):
        truncated_weights(torch.zeros(3), torch.zeros(2), rows, 1)
    with pytest.raises(ShapeError, match="row_of_K"):
        masked_weights(torch.zeros(3), torch.zeros(3), torch.zeros(2, dtype=torch.long), 1)
    with pytest.raises(ShapeError, match="advantages_K"):
        on_policy_mask(torch.zeros(3), torch.zeros(3), torch.zeros(2), rows, 1, bound=0.5)
    with pytest.raises(ShapeError, match="recorded_logps_K"):
        recorded_gap(torch.zeros(3), torch.zeros(2))
