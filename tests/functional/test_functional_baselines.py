"""Estimators of advantages within groups, and whitening: by hand and against plain loops."""

import json
import math
import os
import random
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from oat.functional.advantages import (
    batch_centred,
    batch_scaled,
    best_of_group,
    clipped_advantages,
    leave_one_out,
    leave_one_out_max,
    leave_responses_out,
    length_weighted,
    standardised,
    whiten,
    whiten_biased,
    whiten_in_groups,
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


@pytest.mark.parametrize("largest", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_leaving_responses_out_is_that_of_a_loop(seed: int, largest: bool) -> None:
    """Responses with one to three rewards, of which some are missing, in three groups."""
    draw = random.Random(seed)
    groups = [draw.randrange(3) for _ in range(9)]
    rows = sorted(draw.randrange(9) for _ in range(18))
    rewards = [draw.choice([0.0, 1.0, 2.5, -3.0]) for _ in rows]
    valid = [draw.random() < 0.8 for _ in rows]
    expected = []
    for e, row in enumerate(rows):
        others = [
            reward
            for reward, other, is_there in zip(rewards, rows, valid, strict=True)
            if is_there and other != row and groups[other] == groups[row]
        ]
        base = max(others) if largest and others else sum(others) / max(1, len(others))
        expected.append(rewards[e] - base if valid[e] and others else 0.0)
    place = (torch.tensor(rows), torch.tensor([groups[row] for row in rows]), 3)
    rewards_E, valid_E = torch.tensor(rewards, dtype=torch.float64), torch.tensor(valid)
    found = leave_responses_out(rewards_E, *place, valid_E=valid_E, largest=largest)
    assert found.tolist() == pytest.approx(expected, abs=1e-12)
    equal = leave_responses_out(torch.full((18,), 0.1), *place, valid_E=valid_E, largest=largest)
    assert equal.tolist() == [0.0] * 18


def test_leaving_responses_out_with_one_reward_each() -> None:
    rewards, groups = torch.tensor([1.0, 4.0, 0.5, 2.0, 7.0]), torch.tensor([0, 1, 0, 0, 1])
    for largest, plain in ((False, leave_one_out), (True, leave_one_out_max)):
        found = leave_responses_out(
            rewards, torch.arange(5), groups, 2, valid_E=torch.ones(5) > 0, largest=largest
        )
        torch.testing.assert_close(found, plain(rewards, groups, 2))


@pytest.mark.inventory(47)
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


def summed_over(
    parts: list[tuple[torch.Tensor, ...]], function: Callable[..., torch.Tensor]
) -> list[torch.Tensor]:
    """Return what each part gets when the sums of all parts are added, as over ranks. The function reduces
    twice, and the second sums depend on the first."""

    def run(known: list[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Run all parts with the sums that are known, and return their results and their next sums."""
        found, own_sums = [], []
        for part in parts:
            totals = iter(known)
            own: list[torch.Tensor] = []

            def reduce(
                sums: torch.Tensor,
                totals: Iterator[torch.Tensor] = totals,
                own: list[torch.Tensor] = own,
            ) -> torch.Tensor:
                own.append(sums)
                return next(totals, sums)

            found.append(function(*part, reduce=reduce))
            own_sums.append(own[min(len(known), len(own) - 1)])
        return found, own_sums

    known: list[torch.Tensor] = []
    for _ in range(2):
        known.append(torch.stack(run(known)[1]).sum(0))
    return run(known)[0]


@pytest.mark.inventory(49)
@pytest.mark.parametrize("function", [whiten, whiten_biased])
def test_whitening_over_several_parts_is_that_of_the_whole(function: Callable[..., torch.Tensor]) -> None:
    """Two parts whose sums are added, as over ranks, give the values of the whole: their mean is 0 and their
    variance 1."""
    torch.manual_seed(0)
    whole = torch.randn(10, dtype=torch.float64) + 100
    mask = torch.tensor([1.0, 0, 1, 1, 1, 0, 1, 1, 1, 1], dtype=torch.float64)
    parts = list(zip(whole.split([3, 7]), mask.split([3, 7]), strict=True))
    found = torch.cat(summed_over(parts, function))
    torch.testing.assert_close(found, function(whole, mask), rtol=0, atol=1e-12)
    kept = found[mask > 0]
    assert kept.mean().item() == pytest.approx(0, abs=1e-9)
    assert kept.var(correction=int(function is whiten)).item() == pytest.approx(1, abs=1e-6)


OF_A_PROCESS = """
import json, sys, torch
import torch.distributed as dist
from oat.functional import advantages

def over_processes(sums):
    dist.all_reduce(sums)
    return sums

rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
whole, mask = torch.tensor(json.loads(sys.argv[3]), dtype=torch.float64)
part = slice(0, 3) if rank == 0 else slice(3, None)
functions = (advantages.whiten, advantages.whiten_biased)
found = [function(whole[part], mask[part], reduce=over_processes) for function in functions]
print(json.dumps([values.tolist() for values in found]))
dist.destroy_process_group()
"""


@pytest.mark.inventory(49)
@pytest.mark.slow(instead="test_whitening_over_several_parts_is_that_of_the_whole", seconds=4.0)
def test_whitening_over_two_processes_is_that_of_the_whole(tmp_path: Path) -> None:
    torch.manual_seed(1)
    whole = torch.randn(9, dtype=torch.float64) * 3 - 20
    mask = torch.tensor([1.0, 1, 0, 1, 1, 1, 0, 1, 1], dtype=torch.float64)
    given = json.dumps(torch.stack((whole, mask)).tolist())
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", OF_A_PROCESS, str(rank), str(tmp_path / "store"), given],
            stdout=subprocess.PIPE,
            env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
        )
        for rank in range(2)
    ]
    found = [json.loads(process.communicate(timeout=120)[0]) for process in processes]
    for number, function in enumerate((whiten, whiten_biased)):
        together = torch.tensor(found[0][number] + found[1][number], dtype=torch.float64)
        torch.testing.assert_close(together, function(whole, mask), rtol=0, atol=1e-12)
        assert together[mask > 0].mean().item() == pytest.approx(0, abs=1e-9)


def test_biased_whitening_by_hand() -> None:
    """Values 1, 2, 6 count: mean 3, biased variance (4 + 1 + 9) / 3."""
    values, mask = torch.tensor([1.0, float("nan"), 2.0, 6.0]), torch.tensor([1.0, 0.0, 1.0, 1.0])
    root = (14 / 3) ** 0.5
    assert whiten_biased(values, mask).tolist() == pytest.approx([-2 / root, 0, -1 / root, 3 / root])
    assert whiten_biased(torch.full((3,), 2.0), torch.ones(3)).tolist() == [0.0] * 3
    near = torch.tensor([1.0, 1.0 + 2e-5], dtype=torch.float64)
    # the variance, 1e-10, counts as 1e-8: the values are 1e-5 / 1e-4 from 0
    assert whiten_biased(near, torch.ones_like(near)).tolist() == pytest.approx([-0.1, 0.1], rel=1e-6)
    assert whiten_biased(torch.zeros(2), torch.zeros(2)).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("seed", range(4))
def test_whitening_in_groups_is_that_of_plain_python(seed: int) -> None:
    draw = random.Random(seed)
    groups = [draw.randrange(5) for _ in range(20)]
    values = [draw.gauss(3, 2) for _ in groups]
    counted = [draw.random() < 0.8 for _ in groups]
    expected = []
    for group, value, counts in zip(groups, values, counted, strict=True):
        own = [v for g, v, c in zip(groups, values, counted, strict=True) if g == group and c]
        spread = (statistics.variance(own) + 1e-8) ** 0.5 if len(own) > 1 else 1.0
        expected.append((value - statistics.fmean(own)) / spread if counts else 0.0)
    given = torch.tensor(values, dtype=torch.float64).masked_fill(~torch.tensor(counted), torch.nan)
    mask = torch.tensor(counted).double()
    found = whiten_in_groups(given, mask, torch.tensor(groups), 5)
    assert found.tolist() == pytest.approx(expected, abs=1e-9)


def test_whitening_in_groups_by_hand() -> None:
    """Group 0 has 1 and 3: mean 2, variance 2. Group 2 has one value."""
    found = whiten_in_groups(torch.tensor([1.0, 9.0, 3.0]), torch.ones(3), torch.tensor([0, 2, 0]), 3)
    assert found.tolist() == pytest.approx([-1 / 2**0.5, 0.0, 1 / 2**0.5])


def test_batch_scaled_over_several_parts_is_that_of_the_whole() -> None:
    rewards = torch.tensor([0.0, 1.0, 3.0, 1.0, 2.0, 7.0, 0.5], dtype=torch.float64)
    groups = torch.tensor([0, 0, 1, 1, 0, 0, 0])

    def scaled(rewards_N: torch.Tensor, group_of_N: torch.Tensor, **given: Any) -> torch.Tensor:
        return batch_scaled(rewards_N, group_of_N, 2, **given)

    found = summed_over([(rewards[:4], groups[:4]), (rewards[4:], groups[4:])], scaled)
    whole = batch_scaled(rewards, torch.tensor([0, 0, 1, 1, 2, 2, 2]), 3)
    torch.testing.assert_close(torch.cat(found), whole, rtol=0, atol=1e-12)


def test_the_mean_of_the_step_is_over_all_its_parts() -> None:
    """The mean of 0, 1, 5 and 10 is 4; the missing reward does not count."""
    rewards = torch.tensor([0.0, 1.0, 5.0, math.nan, 10.0])
    valid = ~rewards.isnan()
    assert batch_centred(rewards, valid_N=valid).tolist() == [-4.0, -3.0, 1.0, 0.0, 6.0]
    total = torch.tensor([4.0, 16.0], dtype=torch.float64)
    part = batch_centred(rewards[:2], reduce=lambda sums: total if len(sums) == 2 else sums)
    assert part.tolist() == [-4.0, -3.0]
    assert batch_centred(torch.full((3,), 0.1)).tolist() == [0.0] * 3


def test_advantages_of_responses_are_standardised() -> None:
    values = [0.5, -1.0, 2.0, 7.0]
    mean, std = statistics.mean(values), statistics.stdev(values)
    found = standardised(torch.tensor(values, dtype=torch.float64), eps=0.25)
    assert found.tolist() == pytest.approx([(x - mean) / (std + 0.25) for x in values], rel=1e-12)
    assert standardised(torch.full((4,), 0.1), eps=0.0).tolist() == [0.0] * 4
    assert standardised(torch.tensor([3.0])).tolist() == [0.0]


def test_a_clip_of_advantages() -> None:
    found = clipped_advantages(torch.tensor([-9.0, -2.0, 0.5, 3.0]), limit=2.0)
    assert found.tolist() == [-2.0, -2.0, 0.5, 2.0]


def test_one_value_is_not_scaled() -> None:
    assert whiten(torch.tensor([5.0]), torch.ones(1)).tolist() == [0.0]
    assert whiten(torch.tensor([5.0]), torch.ones(1), shift_mean=False).tolist() == [5.0]
    assert whiten(torch.zeros(0), torch.zeros(0)).shape == (0,)
