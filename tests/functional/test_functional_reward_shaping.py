"""Shaping of rewards: by hand, and running statistics against those of all numbers at once."""

import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oat.functional.reward_shaping import Moments, clip_filter_weights, merged_moments, overlong_penalty


def test_the_penalty_for_length_by_hand() -> None:
    lengths_N = torch.tensor([0.0, 80.0, 90.0, 95.0, 100.0, 200.0])
    found = overlong_penalty(lengths_N, begin=80, end=100, penalty=2.0)
    assert found.tolist() == pytest.approx([0, 0, 1, 1.5, 2, 2])


@given(st.lists(st.lists(st.floats(-1e3, 1e3, width=32), max_size=6), max_size=6))
def test_running_moments_are_those_of_all_numbers(calls: list[list[float]]) -> None:
    moments = Moments()
    for values in calls:
        moments = merged_moments(moments, torch.tensor(values, dtype=torch.float32))
    everything = [value for values in calls for value in values]
    assert moments.number == len(everything)
    if everything:
        assert moments.mean == pytest.approx(statistics.fmean(everything), rel=1e-9, abs=1e-9)
    if len(everything) > 1:
        assert moments.std == pytest.approx(statistics.stdev(everything), rel=1e-6, abs=1e-6)


def test_a_single_number_has_no_spread() -> None:
    assert merged_moments(Moments(), torch.tensor([5.0])).std == 1.0
    assert merged_moments(Moments(3, 1, 2), torch.zeros(0)) == Moments(3, 1, 2)


@pytest.mark.inventory(50)
def test_groups_with_spread_make_up_for_flat_ones() -> None:
    """Two of four groups are flat: the others weigh 4 / 2. If one of ten is not flat, it weighs 3."""
    rewards_N = torch.tensor([1.0, 1, 0, 1, 2, 2, 5, 3])
    group_of_N = torch.tensor([0, 0, 1, 1, 2, 2, 3, 3])
    weights_N = clip_filter_weights(rewards_N, group_of_N, 4, flat_weight=0.5)
    assert weights_N.tolist() == [0.5, 0.5, 2, 2, 0.5, 0.5, 2, 2]
    assert clip_filter_weights(torch.ones(8), group_of_N, 4, flat_weight=0.5).tolist() == [1.0] * 8
    many_N = torch.tensor([0.0, 1.0] + [1.0] * 18)
    weights_N = clip_filter_weights(many_N, torch.arange(10).repeat_interleave(2), 10)
    assert weights_N.tolist() == [3.0, 3.0] + [1.0] * 18


def test_missing_rewards_do_not_make_a_group_uneven() -> None:
    rewards_N, group_of_N = torch.tensor([1.0, float("nan"), 0.0, 1.0]), torch.tensor([0, 0, 1, 1])
    valid_N = torch.tensor([True, False, True, True])
    weights_N = clip_filter_weights(rewards_N, group_of_N, 2, valid_N=valid_N, flat_weight=0.25)
    assert weights_N.tolist() == [0.25, 0.25, 2.0, 2.0]
