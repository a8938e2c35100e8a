"""Shaping of rewards before advantages are made of them: penalties, normalisation by statistics of all
rewards so far, and weights that make up for groups without spread. Penalties are numbers that are subtracted,
and are at least 0. A missing reward is NaN, and stays so. Nothing here has a gradient.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from oat.errors import ConfigError
from oat.functional._checks import check_same_shape
from oat.functional.advantages import moments_of
from oat.functional.segments import segment_sum

MOST_WEIGHT = 3.0
"""Largest weight that `clip_filter_weights` gives to a group with spread."""


def missing_end_penalty(has_ended_N: Bool[Tensor, " N"], *, penalty: float) -> Float[Tensor, " N"]:
    """Return what is subtracted from the rewards of responses that did not end by themselves.

    0 where the response ended, else `penalty`

    What an end is, is the caller's choice: for `oat-llm`, a finish reason other than `length`; for TRL, an
    end token in the response. `oat-llm` itself adds a number, which has to be negative.

    Args:
        has_ended_N: True if the response ended by itself.
        penalty: in units of reward, at least 0.

    Raises:
        ConfigError: the penalty is negative.
    """
    _check_penalty(penalty)
    return penalty * (~has_ended_N).float()


class Moments(NamedTuple):
    """Statistics of numbers: how many they are, their mean, and the sum of their squared distances to it."""

    number: float = 0.0
    mean: float = 0.0
    squares: float = 0.0

    @property
    def std(self) -> float:
        """The unbiased standard deviation; 1 for fewer than two numbers."""
        return math.sqrt(self.squares / (self.number - 1)) if self.number > 1 else 1.0


def merged_moments(
    before: Moments,
    values_N: Float[Tensor, " N"],
    *,
    valid_N: Bool[Tensor, " N"] | None = None,
    reduce: Callable[[Tensor], Tensor] | None = None,
) -> Moments:
    """Return the statistics of the earlier numbers together with new ones (Chan et al., 1979, Eq. 2.1; for
    one new number, this is Welford's update).

    The sums are computed in float64, so the result hardly depends on how the numbers were divided into calls.

    Args:
        values_N: any unit; finite where `valid_N` is True; may be empty.
        valid_N: False where a number is missing; None: none is missing.
        reduce: sums a tensor over all parts of the batch, such as the ranks of a distributed run; None: the
            numbers are the whole batch.

    Raises:
        ShapeError: shapes disagree.
    """
    valid_N = torch.ones_like(values_N, dtype=torch.bool) if valid_N is None else valid_N
    check_same_shape(values_N=values_N, valid_N=valid_N)
    count, mean, squares = (float(moment) for moment in moments_of(values_N.detach(), valid_N, reduce))
    if not count:
        return before
    total = before.number + count
    distance = mean - before.mean
    return Moments(
        total,
        before.mean + distance * count / total,
        before.squares + squares + distance * distance * before.number * count / total,
    )


def normalised(
    values_N: Float[Tensor, " N"], moments: Moments, *, shift_mean: bool = True, eps: float = 1e-8
) -> Float[Tensor, " N"]:
    """Return the numbers less the mean so far, divided by the standard deviation so far.

    out = (x - mean) / sqrt(std^2 + eps),   or x / sqrt(std^2 + eps) without `shift_mean`

    With fewer than two numbers so far, the scale is 1, as in `advantages.whiten`.

    Args:
        values_N: any unit.
        moments: those of the numbers so far, usually with these numbers.
        shift_mean: False: the mean stays.
        eps: added inside the root, in units of the values squared.
    """
    scale = math.sqrt(moments.std**2 + eps) if moments.number > 1 else 1.0
    centred_N = values_N.double() - (moments.mean if shift_mean else 0.0)
    return (centred_N / scale).to(values_N.dtype)


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

    Raises:
        ConfigError: the penalty is negative, or `begin` is not below `end`.
    """
    _check_penalty(penalty)
    if not begin < end:
        raise ConfigError(
            f"a penalty for length rises from {begin} to {end} tokens; the first number must be lower"
        )
    return penalty * ((lengths_N - begin) / (end - begin)).clamp(0.0, 1.0)


def clip_filter_weights(
    rewards_N: Float[Tensor, " N"],
    group_of_N: Int[Tensor, " N"],
    num_groups: int,
    *,
    valid_N: Bool[Tensor, " N"] | None = None,
    flat_weight: float = 1.0,
    most: float = MOST_WEIGHT,
    reduce: Callable[[Tensor], Tensor] | None = None,
) -> Float[Tensor, " N"]:
    """Return a weight for each row, by which groups with spread make up for those without (the clip filter of
    LightRFT's experience maker).

    w = min(P / (P - Z), most) in a group with spread, flat_weight in a group without

    P is the number of groups that have a valid row, and Z the number of those whose rewards are all equal. If
    all groups are without spread, all weights are 1. Departure: LightRFT calls a group flat if its computed
    standard deviation is 0, which rounding may prevent.

    Args:
        rewards_N: any unit; may be NaN where `valid_N` is False.
        group_of_N: the group of each row, in [0, num_groups).
        valid_N: False if the row's reward is missing; None: none is missing.
        flat_weight: the weight of a group without spread, LightRFT's `lamda`.
        most: the largest weight of a group with spread.
        reduce: sums a tensor over all parts of the batch, such as the ranks of a distributed run, each with
            complete groups; None: the rewards are the whole batch.

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
    counts = torch.stack((is_there_G.sum(), is_flat_G.sum())).double()
    groups, flat = (counts if reduce is None else reduce(counts)).tolist()
    if flat == groups:
        return torch.ones_like(rewards_N)
    weight = rewards_N.new_tensor(min(groups / (groups - flat), most))
    return torch.where(is_flat_G, rewards_N.new_tensor(flat_weight), weight)[group_of_N]


def _check_penalty(penalty: float) -> None:
    if penalty < 0:
        raise ConfigError(
            f"a penalty is {penalty:g}, and it is subtracted from rewards; give a number of at least 0"
        )
