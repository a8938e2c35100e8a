"""Shaping of rewards: by hand, against plain Python, and running statistics against those of all numbers at
once."""

import json
import math
import random
import statistics
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oat.errors import ConfigError, ShapeError
from oat.functional.reward_shaping import (
    Moments,
    clip_filter_weights,
    merged_moments,
    missing_end_penalty,
    normalised,
    overlong_penalty,
)


def test_a_missing_end_costs_the_penalty() -> None:
    rewards, ended = torch.tensor([1.0, 1.0, -2.0]), torch.tensor([True, False, False])
    assert (rewards - missing_end_penalty(ended, penalty=0.25)).tolist() == [1.0, 0.75, -2.25]
    assert missing_end_penalty(ended, penalty=0.0).tolist() == [0.0, 0.0, 0.0]


def test_the_penalty_for_length_is_that_of_the_paper() -> None:
    """DAPO's numbers: 16384 tokens are expected, and the cache has 4096 more."""
    for length in range(0, 25_000, 371):
        if length <= 16_384:
            expected = 0.0
        elif length <= 20_480:
            expected = (16_384 - length) / 4096
        else:
            expected = -1.0
        found = overlong_penalty(torch.tensor([float(length)]), begin=16_384, end=20_480, penalty=1.0)
        assert -found.item() == pytest.approx(expected, abs=1e-6)


def test_penalties_that_would_reward_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"-0\.5"):
        missing_end_penalty(torch.tensor([True]), penalty=-0.5)
    with pytest.raises(ConfigError, match="at least 0"):
        overlong_penalty(torch.zeros(1), begin=1, end=5, penalty=-1.0)
    with pytest.raises(ConfigError, match="from 5 to 5"):
        overlong_penalty(torch.zeros(1), begin=5, end=5, penalty=1.0)


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


def test_moments_by_hand() -> None:
    """1, 3: mean 2, squares 2. Then 8: mean 4, squares 9 + 1 + 16 = 26."""
    first = merged_moments(Moments(), torch.tensor([1.0, 3.0]))
    assert first == Moments(2.0, 2.0, 2.0)
    second = merged_moments(first, torch.tensor([8.0]))
    assert second == pytest.approx(Moments(3.0, 4.0, 26.0), abs=1e-12)
    assert normalised(torch.tensor([4.0, 4 + 13**0.5]), second).tolist() == pytest.approx([0.0, 1.0])
    assert normalised(torch.tensor([13**0.5]), second, shift_mean=False).tolist() == pytest.approx([1.0])


@pytest.mark.parametrize("offset", [0.0, 1e6])
@pytest.mark.parametrize("seed", range(3))
def test_normalised_numbers_have_mean_0_and_std_1(seed: int, offset: float) -> None:
    """Batches of random sizes, with missing values, and a mean that is large beside the spread."""
    draw = random.Random(seed)
    moments, every = Moments(), []
    for _ in range(12):
        values = [offset + draw.gauss(0, 2) for _ in range(draw.randint(0, 5))]
        valid = [draw.random() < 0.7 for _ in values]
        every += [value for value, is_valid in zip(values, valid, strict=True) if is_valid]
        given_N = [value if is_valid else math.nan for value, is_valid in zip(values, valid, strict=True)]
        moments = merged_moments(
            moments,
            torch.tensor(given_N, dtype=torch.float64),
            valid_N=torch.tensor(valid, dtype=torch.bool),
        )
    assert moments.number == len(every)
    assert moments.std == pytest.approx(statistics.stdev(every), rel=1e-8)
    found = normalised(torch.tensor(every, dtype=torch.float64), moments)
    assert found.std().item() == pytest.approx(1.0, rel=1e-6)
    assert found.mean().item() == pytest.approx(0.0, abs=1e-6)


def test_moments_over_several_parts_are_those_of_the_whole() -> None:
    """Two parts whose sums are added, as over ranks."""
    torch.manual_seed(0)
    whole = torch.randn(10, dtype=torch.float64)
    parts = whole.split([3, 7])
    firsts = [torch.stack((torch.tensor(len(part), dtype=torch.float64), part.sum())) for part in parts]
    squares = [(part - whole.mean()).square().sum()[None] for part in parts]

    def over(part: int) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda own: own + (firsts if len(own) == 2 else squares)[1 - part]

    expected = merged_moments(Moments(3, 0.5, 2.0), whole)
    for number, part in enumerate(parts):
        found = merged_moments(Moments(3, 0.5, 2.0), part, reduce=over(number))
        assert found == pytest.approx(expected, rel=1e-12)


def test_moments_survive_a_checkpoint_exactly() -> None:
    moments = merged_moments(Moments(), torch.rand(7))
    assert Moments(*json.loads(json.dumps(moments))) == moments


def test_few_numbers_are_not_scaled() -> None:
    one = merged_moments(Moments(), torch.tensor([5.0]))
    assert normalised(torch.tensor([5.0, 7.0]), one).tolist() == [0.0, 2.0]
    assert normalised(torch.tensor([7.0]), Moments()).tolist() == [7.0]
    same = merged_moments(Moments(), torch.full((4,), 5.0))
    assert normalised(torch.full((4,), 5.0), same).tolist() == [0.0] * 4


@pytest.mark.parametrize("seed", range(6))
def test_weights_are_those_of_plain_python(seed: int) -> None:
    draw = random.Random(seed)
    groups = [draw.randrange(6) for _ in range(15)]
    rewards = [draw.choice([0.0, 1.0]) for _ in groups]
    valid = [draw.random() < 0.7 for _ in groups]
    members: dict[int, list[float]] = {}
    for group, reward, is_valid in zip(groups, rewards, valid, strict=True):
        members.setdefault(group, []).extend([reward] if is_valid else [])
    there = {group: own for group, own in members.items() if own}
    flat = {group for group, own in there.items() if min(own) == max(own)}
    weight = min(len(there) / max(1, len(there) - len(flat)), 3.0)
    expected = [1.0 if len(flat) == len(there) else 0.2 if g in flat else weight for g in groups]
    found = clip_filter_weights(
        torch.tensor(rewards, dtype=torch.float64).masked_fill(~torch.tensor(valid), torch.nan),
        torch.tensor(groups),
        6,
        valid_N=torch.tensor(valid),
        flat_weight=0.2,
    )
    checked = [n for n, group in enumerate(groups) if group in there]
    assert [found[n].item() for n in checked] == pytest.approx([expected[n] for n in checked])


def test_groups_of_all_parts_are_counted() -> None:
    """This part has one group with a spread and no flat one; the other part has three flat ones."""
    other = torch.tensor([3.0, 3.0], dtype=torch.float64)
    found = clip_filter_weights(
        torch.tensor([0.0, 1.0]), torch.tensor([0, 0]), 1, most=9.0, reduce=lambda own: own + other
    )
    assert found.tolist() == [4.0, 4.0]


def test_wrong_shapes_are_refused(unchecked: None) -> None:
    with pytest.raises(ShapeError, match="valid_N"):
        merged_moments(Moments(), torch.zeros(2), valid_N=torch.ones(3, dtype=torch.bool))
    with pytest.raises(ShapeError, match="group_of_N"):
        clip_filter_weights(torch.zeros(2), torch.zeros(3, dtype=torch.long), 1)
