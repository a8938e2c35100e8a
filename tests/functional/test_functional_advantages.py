import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oat.errors import ShapeError
from oat.functional.advantages import batch_scaled, group_advantages

NAN = math.nan


def slow_advantages(rewards, groups, valid, normalise, eps):
    advantages = [0.0] * len(rewards)
    for group in set(groups):
        members = [i for i, g in enumerate(groups) if g == group and valid[i]]
        kept = [rewards[i] for i in members]
        if len(kept) < 2 or min(kept) == max(kept):
            continue
        mean = sum(kept) / len(kept)
        for i in members:
            advantages[i] = (
                (rewards[i] - mean) / (statistics.stdev(kept) + eps) if normalise else rewards[i] - mean
            )
    return advantages


def test_hand_worked():
    # Group 0: rewards 1, 3: mean 2, unbiased variance (1 + 1) / 1 = 2. Group 1: 0, 0, 3: mean 1, variance (1
    #     + 1 + 4) / 2 = 3.
    rewards, groups = torch.tensor([1.0, 0.0, 3.0, 0.0, 3.0]), torch.tensor([0, 1, 0, 1, 1])
    std0, std1 = math.sqrt(2) + 1e-4, math.sqrt(3) + 1e-4
    assert group_advantages(rewards, groups, 2).tolist() == pytest.approx(
        [-1 / std0, -1 / std1, 1 / std0, -1 / std1, 2 / std1], abs=1e-6
    )
    assert group_advantages(rewards, groups, 2, normalise=False).tolist() == [-1.0, -1.0, 1.0, -1.0, 2.0]
    assert group_advantages(rewards, groups, 2, eps=1.0)[0].item() == pytest.approx(
        -1 / (math.sqrt(2) + 1), abs=1e-6
    )


def test_missing_rewards_are_left_out():
    # Without its missing sample group 0 holds 1 and 3; group 1 keeps one reward; group 2 none.
    rewards, groups = torch.tensor([1.0, NAN, 3.0, 5.0, NAN, NAN]), torch.tensor([0, 0, 0, 1, 1, 2])
    valid = torch.tensor([True, False, True, True, False, False])
    assert group_advantages(rewards, groups, 3, valid_N=valid, normalise=False).tolist() == [
        -1.0,
        0.0,
        1.0,
        0.0,
        0.0,
        0.0,
    ]
    normalised = group_advantages(rewards, groups, 3, valid_N=valid).tolist()
    assert normalised == pytest.approx(
        [-1 / (math.sqrt(2) + 1e-4), 0, 1 / (math.sqrt(2) + 1e-4), 0, 0, 0], abs=1e-6
    )
    finite = group_advantages(rewards.nan_to_num(1e30), groups, 3, valid_N=valid).tolist()
    assert finite == normalised


@settings(derandomize=True, deadline=None, max_examples=50)
@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(-4, 4).map(lambda r: r / 4), st.booleans()), max_size=14
    ),
    st.booleans(),
    st.sampled_from([1e-4, 1e-8, 0.5]),
)
def test_equals_slow_version(samples, normalise, eps):
    groups, rewards, valid = ([sample[i] for sample in samples] for i in range(3))
    columns = torch.tensor(rewards, dtype=torch.float64), torch.tensor(groups, dtype=torch.int64)
    fast = group_advantages(
        *columns, 4, valid_N=torch.tensor(valid, dtype=torch.bool), normalise=normalise, eps=eps
    )
    torch.testing.assert_close(
        fast,
        torch.tensor(slow_advantages(rewards, groups, valid, normalise, eps), dtype=torch.float64),
        rtol=1e-9,
        atol=1e-12,
    )


@pytest.mark.inventory(28)
def test_groups_have_mean_0_and_std_1_in_any_order():
    generator = torch.Generator().manual_seed(4)
    rewards, groups = 3 * torch.randn(12, generator=generator, dtype=torch.float64) + 5, torch.arange(12) % 3
    advantages = group_advantages(rewards, groups, 3, eps=0.0)
    for group in range(3):
        assert advantages[groups == group].mean().item() == pytest.approx(0.0, abs=1e-12)
        assert advantages[groups == group].std().item() == pytest.approx(1.0)
    order = torch.randperm(12, generator=generator)
    torch.testing.assert_close(group_advantages(rewards[order], groups[order], 3, eps=0.0), advantages[order])


@pytest.mark.inventory(28)
@pytest.mark.parametrize("reward", [0.1, 1 / 3, -0.7, 1e6 + 0.1, 1e-30, 0.0])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 64])
@pytest.mark.parametrize("normalise", [True, False])
def test_equal_rewards_give_exactly_zero(reward, size, normalise):
    place = torch.full((size,), reward), torch.zeros(size, dtype=torch.int64), 1
    for eps in (1e-30, 0.0):
        assert group_advantages(*place, normalise=normalise, eps=eps).tolist() == [0.0] * size
        assert batch_scaled(*place, eps=eps).tolist() == [0.0] * size


def test_gradient():
    # Along the rewards: the lowest one, which the others are measured from, must drop out.
    rewards = torch.tensor([0.3, 1.0, -0.4, 2.0, 0.5], dtype=torch.float64, requires_grad=True)
    for normalise in (True, False):
        assert torch.autograd.gradcheck(
            lambda r, n=normalise: group_advantages(r, torch.tensor([0, 1, 0, 1, 0]), 2, normalise=n), rewards
        )


def test_order_of_the_better_sample_on_two():
    better, worse = group_advantages(torch.tensor([1.0, 0.0]), torch.tensor([0, 0]), 1).tolist()
    assert better > 0 > worse


def test_invariances():
    generator = torch.Generator().manual_seed(0)
    rewards = torch.randn(20, generator=generator, dtype=torch.float64)
    groups = torch.randint(0, 4, (20,), generator=generator)
    valid = torch.rand(20, generator=generator) < 0.8
    advantages = group_advantages(rewards, groups, 4, valid_N=valid)
    order = torch.randperm(20, generator=generator)
    torch.testing.assert_close(
        group_advantages(rewards[order], groups[order], 4, valid_N=valid[order]), advantages[order]
    )
    torch.testing.assert_close(group_advantages(rewards + 1000.0, groups, 4, valid_N=valid), advantages)
    torch.testing.assert_close(group_advantages(rewards, 3 - groups, 9, valid_N=valid), advantages)
    torch.testing.assert_close(
        group_advantages(rewards, groups, 4, valid_N=torch.ones_like(valid)),
        group_advantages(rewards, groups, 4),
    )
    sums = torch.zeros(4, dtype=torch.float64).index_add(0, groups, advantages)
    torch.testing.assert_close(sums, torch.zeros(4, dtype=torch.float64))
    scaled = group_advantages(rewards * 7, groups, 4, valid_N=valid, eps=7e-4)
    torch.testing.assert_close(scaled, advantages)


def test_a_large_common_reward_costs_no_precision():
    # Near 1e6 float32 steps by 1/16, so these rewards are exact and 1/8 apart; the mean of their sum would
    # not be.
    rewards = torch.tensor([1e6, 1e6 + 0.125, 1e6 + 0.25])
    assert group_advantages(rewards, torch.zeros(3, dtype=torch.int64), 1, normalise=False).tolist() == [
        -0.125,
        0.0,
        0.125,
    ]


def test_empty_and_index_types():
    assert group_advantages(torch.zeros(0), torch.zeros(0, dtype=torch.int64), 0).shape == (0,)
    assert group_advantages(torch.zeros(0), torch.zeros(0, dtype=torch.int64), 3).shape == (0,)
    rewards = torch.tensor([1.0, 0.0])
    assert group_advantages(rewards, torch.zeros(2, dtype=torch.int32), 1).dtype == torch.float32


def test_shapes(unchecked):
    rewards, groups = torch.zeros(3), torch.zeros(3, dtype=torch.int64)
    with pytest.raises(ShapeError, match="shapes disagree"):
        group_advantages(rewards, groups[:2], 1)
    with pytest.raises(ShapeError, match="shapes disagree"):
        group_advantages(rewards, groups, 1, valid_N=torch.ones(2, dtype=torch.bool))
