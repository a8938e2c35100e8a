"""Estimators of advantages by name: from the rewards of a step to one number for each response."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from oat.functional.advantages import (
    batch_scaled,
    best_of_group,
    group_advantages,
    leave_one_out,
    leave_one_out_max,
    length_weighted,
)


@dataclass(frozen=True, eq=False)
class Rewards:
    """The rewards of a step, as estimators get them.

    Attributes:
        rewards_N: the reward of each response; NaN where it is missing.
        lengths_N: number of trained tokens of each response.
        group_of_N: index of each response's group, in [0, num_groups).
        valid_N: False where the reward is missing.
        std_eps: number that is added to a standard deviation before the division, in units of reward.
    """

    rewards_N: torch.Tensor
    lengths_N: torch.Tensor
    group_of_N: torch.Tensor
    num_groups: int
    valid_N: torch.Tensor
    std_eps: float


Estimator = Callable[[Rewards], torch.Tensor]
"""Makes the (N,) advantages of rewards; 0 where a reward is missing."""


def _none(given: Rewards) -> torch.Tensor:
    return torch.where(given.valid_N, given.rewards_N, 0.0)


def _group(given: Rewards, *, normalise: bool) -> torch.Tensor:
    place = (given.rewards_N, given.group_of_N, given.num_groups)
    return group_advantages(*place, valid_N=given.valid_N, normalise=normalise, eps=given.std_eps)


def _plain(function: Callable[..., torch.Tensor]) -> Estimator:
    """Return an estimator of a function that needs rewards, groups and `valid_N` only."""
    return lambda given: function(given.rewards_N, given.group_of_N, given.num_groups, valid_N=given.valid_N)


def _batch_norm(given: Rewards) -> torch.Tensor:
    place = (given.rewards_N, given.group_of_N, given.num_groups)
    return batch_scaled(*place, valid_N=given.valid_N, eps=given.std_eps)


def _length_weighted(given: Rewards) -> torch.Tensor:
    place = (given.rewards_N, given.lengths_N, given.group_of_N, given.num_groups)
    return length_weighted(*place, valid_N=given.valid_N)


ESTIMATORS: Mapping[str, Estimator] = {
    "none": _none,
    "group_mean": lambda given: _group(given, normalise=False),
    "group_norm": lambda given: _group(given, normalise=True),
    "batch_norm": _batch_norm,
    "leave_one_out": _plain(leave_one_out),
    "leave_one_out_max": _plain(leave_one_out_max),
    "length_weighted": _length_weighted,
    "best_of_group": _plain(best_of_group),
}
"""The estimator of each name that `algorithm.advantage` may have."""
