"""Shaping of rewards: a penalty for length, statistics of all rewards so far, and weights that make up for
groups without spread. Nothing here has a gradient."""

import math
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from oat.functional._checks import check_same_shape
from oat.functional.segments import segment_sum

MOST_WEIGHT = 3.0
"""Largest weight that `clip_filter_weights` gives to a group with spread."""


class Moments(NamedTuple):
    """Statistics of numbers: how many they are, their mean, and the sum of their squared distances to it."""

    number: float = 0.0
    mean: float = 0.0
    squares: float = 0.0

    @property
    def std(self) -> float:
        """The unbiased standard deviation; 1 for fewer than two numbers."""
        return math.sqrt(self.squares / (self.number - 1)) if self.number > 1 else 1.0


def merged_moments(before: Moments, values_N: Float[Tensor, " N"]) -> Moments:
    """Return the statistics of the earlier numbers together with new ones (Chan et al., 1979, Eq. 2.1).

    The sums are computed in float64, so the result hardly depends on how the numbers were divided into calls.

    Args:
        values_N: finite, any unit; may be empty.
    """
    count = len(values_N)
    if not count:
        return before
    values_N = values_N.detach().double()
    mean = float(values_N.mean())
    squares = float((values_N - mean).square().sum())
    total = before.number + count
    distance = mean - before.mean
    return Moments(
        total,
        before.mean + distance * count / total,
        before.squares + squares + distance * distance * before.number * count / total,
    )


def overlong_penalty(
    lengths_N: Float[Tensor, " N"], *, begin: int, end: int, penalty: float
) -> Float[Tensor, " N"]:
    """Return what is subtracted from the rewards of long responses (the soft punishment of DAPO,
    arXiv:2503.14476, Eq. 13).

    0 up to `begin` tokens, `penalty` from `end` tokens on, and linear in between

    The paper has end = L_max, begin = L_max - L_cache and penalty = 1, and adds the negative number.

    Args:
        lengths_N: number of tokens of each response.
        begin, end: numbers of tokens, begin < end.
        penalty: in units of reward, at least 0.
    """
    return penalty * ((lengths_N - begin) / (end - begin)).clamp(0.0, 1.0)


def clip_filter_weights(
    rewards_N: Float[Tensor, " N"],
    group_of_N: Int[Tensor, " N"],
    num_groups: int,
    *,
    valid_N: Bool[Tensor, " N"] | None = None,
    flat_weight: float = 1.0,
    most: float = MOST_WEIGHT,
) -> Float[Tensor, " N"]:
    """Return a weight for each row, by which groups with spread make up for those without (the clip filter of
    LightRFT's experience maker).

    w = min(P / (P - Z), most) in a group with spread, flat_weight in a group without

    P is the number of groups that have a valid row, and Z the number of those whose rewards are all equal. If
    all groups are without spread, all weights are 1.

    Args:
        rewards_N: any unit; may be NaN where `valid_N` is False.
        group_of_N: the group of each row, in [0, num_groups).
        valid_N: False if the row's reward is missing; None: none is missing.
        flat_weight: the weight of a group without spread, LightRFT's `lamda`.

    Raises:
        ShapeError: shapes disagree.
    """
    valid_N = torch.ones_like(rewards_N, dtype=torch.bool) if valid_N is None else valid_N
    check_same_shape(rewards_N=rewards_N, group_of_N=group_of_N, valid_N=valid_N)
    bounds = []
    for how, empty in (("amin", torch.inf), ("amax", -torch.inf)):
        present_N = rewards_N.detach().masked_fill(~valid_N, empty)
        start_G = rewards_N.new_full((num_groups,), empty)
        bounds.append(start_G.scatter_reduce(0, group_of_N.long(), present_N, how))
    lowest_G, highest_G = bounds
    is_there_G = segment_sum(valid_N.to(rewards_N.dtype), group_of_N, num_groups) > 0
    is_flat_G = is_there_G & (lowest_G == highest_G)
    groups, flat = int(is_there_G.sum()), int(is_flat_G.sum())
    if flat == groups:
        return torch.ones_like(rewards_N)
    weight = min(groups / (groups - flat), most)
    return torch.where(is_flat_G, flat_weight, weight).to(rewards_N.dtype)[group_of_N]
