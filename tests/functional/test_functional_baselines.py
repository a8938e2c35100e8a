"""Estimators of advantages within groups, and whitening: by hand and against plain loops."""

import random
import statistics
from collections.abc import Callable

import pytest
import torch

from oat.functional.advantages import (
    batch_scaled,
    best_of_group,
    leave_one_out,
    leave_one_out_max,
    length_weighted,
    whiten,
)

Estimator = Callable[..., torch.Tensor]


def slow(name: str, members: list[tuple[float, float]], every: list[float]) -> list[float]:
    """Return the advantages of one group, whose members are pairs of reward and length."""
    rewards = [reward for reward, _ in members]
    mean = sum(rewards) / len(rewards)
    found = []
    for i, reward in enumerate(rewards):
        others = rewards[:i] + rewards[i + 1 :]
        if name == "batch_scaled":
            spread = statistics.stdev(every) if len(every) > 1 else 0.0
            found.append((reward - mean) / (spread + 1e-4))
        elif name == "length_weighted":
            total = sum(length for _, length in members)
            weighted = sum(r * length for r, length in members) / total if total else reward
            found.append(reward - weighted)
        elif name == "best_of_group":
            is_first = reward == max(rewards) and i == rewards.index(max(rewards))
            found.append(float(is_first and min(rewards) < max(rewards)))
        elif not others:
            found.append(0.0)
        else:
            found.append(reward - (sum(others) / len(others) if name == "leave_one_out" else max(others)))
    return found


ESTIMATORS: dict[str, Estimator] = {
    "leave_one_out": leave_one_out,
    "leave_one_out_max": leave_one_out_max,
    "length_weighted": length_weighted,
    "best_of_group": best_of_group,
    "batch_scaled": batch_scaled,
}


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("seed", range(8))
def test_estimators_are_those_of_plain_loops(name: str, seed: int) -> None:
    """Groups of several sizes, rows in any order, missing rewards, and ties."""
    draw = random.Random(seed)
    count, num_groups = draw.randint(1, 25), 5
    groups = [draw.randrange(num_groups) for _ in range(count)]
    rewards = [draw.choice([0.0, 1.0, 2.5, -3.0]) for _ in range(count)]
    lengths = [float(draw.randint(0, 4)) for _ in range(count)]
    valid = [draw.random() < 0.8 for _ in range(count)]
    expected = [0.0] * count
    every = [reward for reward, is_valid in zip(rewards, valid, strict=True) if is_valid]
    for group in range(num_groups):
        places = [n for n in range(count) if groups[n] == group and valid[n]]
        if places:
            found = slow(name, [(rewards[n], lengths[n]) for n in places], every)
            expected = [found[places.index(n)] if n in places else value for n, value in enumerate(expected)]
    given = [r if v else float("nan") for r, v in zip(rewards, valid, strict=True)]
    between = (torch.tensor(lengths, dtype=torch.float64),) if name == "length_weighted" else ()
    found_N = ESTIMATORS[name](
        torch.tensor(given, dtype=torch.float64),
        *between,
        torch.tensor(groups),
        num_groups,
        valid_N=torch.tensor(valid),
    )
    assert found_N.tolist() == pytest.approx(expected, abs=1e-9)


def test_rloo_by_hand() -> None:
    found = leave_one_out(torch.tensor([1.0, 0.0, 0.0, 1.0]), torch.zeros(4, dtype=torch.long), 1)
    assert found.tolist() == pytest.approx([2 / 3, -2 / 3, -2 / 3, 2 / 3])


@pytest.mark.parametrize("name", ESTIMATORS)
def test_equal_rewards_give_exactly_zero(name: str) -> None:
    between = (torch.tensor([3.0, 1.0, 7.0]),) if name == "length_weighted" else ()
    found = ESTIMATORS[name](torch.full((3,), 0.1), *between, torch.zeros(3, dtype=torch.long), 1)
    assert found.tolist() == [0.0, 0.0, 0.0]


def test_whitening_by_hand() -> None:
    """Values 1, 2, 6 count: mean 3, unbiased variance (4 + 1 + 9) / 2 = 7."""
    values, mask = torch.tensor([1.0, float("nan"), 2.0, 6.0]), torch.tensor([1.0, 0.0, 1.0, 1.0])
    root = 7**0.5
    assert whiten(values, mask).tolist() == pytest.approx([-2 / root, 0, -1 / root, 3 / root], rel=1e-6)
    kept = whiten(values, mask, shift_mean=False).tolist()
    assert kept == pytest.approx([3 - 2 / root, 0, 3 - 1 / root, 3 + 3 / root], rel=1e-6)
    kept_K = torch.tensor([kept[0], kept[2], kept[3]])
    assert (kept_K.mean().item(), kept_K.std().item()) == (pytest.approx(3), pytest.approx(1))


def test_whitening_over_several_parts_is_that_of_the_whole() -> None:
    """Two parts whose sums are added, as over ranks, give the values of the whole."""
    torch.manual_seed(0)
    whole = torch.randn(10, dtype=torch.float64) + 100
    ones = torch.ones(10, dtype=torch.float64)
    parts = whole.split([3, 7])
    sums = [torch.stack((torch.tensor(float(len(p)), dtype=torch.float64), p.sum())) for p in parts]
    mean = whole.mean()
    squares = [(p - mean).square().sum()[None] for p in parts]

    def over(part: int) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda own: own + (sums if len(own) == 2 else squares)[1 - part]

    found = [whiten(p, torch.ones_like(p), reduce=over(n)) for n, p in enumerate(parts)]
    torch.testing.assert_close(torch.cat(found), whiten(whole, ones), rtol=0, atol=1e-12)


def test_one_value_is_not_scaled() -> None:
    assert whiten(torch.tensor([5.0]), torch.ones(1)).tolist() == [0.0]
    assert whiten(torch.tensor([5.0]), torch.ones(1), shift_mean=False).tolist() == [5.0]
    assert whiten(torch.zeros(0), torch.zeros(0)).shape == (0,)
