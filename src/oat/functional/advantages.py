"""Advantages from rewards."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from oat.functional._checks import check_same_shape
from oat.functional.segments import segment_sum


def group_advantages(
    rewards_N: Float[Tensor, " N"],
    group_of_N: Int[Tensor, " N"],
    num_groups: int,
    *,
    valid_N: Bool[Tensor, " N"] | None = None,
    normalise: bool = True,
    eps: float = 1e-4,
) -> Float[Tensor, " N"]:
    """Return the advantage of each sample within its group (GRPO: DeepSeekMath, arXiv:2402.03300, Section
    4.1.2).

    A_n = (r_n - mean of the group) / (std of the group + eps),   std unbiased

    Samples with the same group id form a group, in whatever order the rows are. The advantage is exactly 0 if
    the group has one valid sample only, or if all rewards of the group are equal. The rewards must not
    require a gradient: the gradient would be undefined for equal rewards.

    Args:
        rewards_N: the reward of each sample, any unit; may be NaN where `valid_N` is False.
        group_of_N: the group id of each sample, in [0, num_groups).
        valid_N: False if the sample's reward is missing. Such a sample does not count in mean and std, and
            its advantage is 0. None: no reward is missing.
        normalise: False leaves out the division (Dr. GRPO, arXiv:2503.20783).
        eps: added to the std, in units of reward.
    Returns:
        (N,) advantages; without unit if `normalise`, else in units of reward.

    Raises:
        ShapeError: shapes disagree.
    """
    valid_N = torch.ones_like(rewards_N, dtype=torch.bool) if valid_N is None else valid_N
    check_same_shape(rewards_N=rewards_N, group_of_N=group_of_N, valid_N=valid_N)
    # subtract the group's lowest reward: equal rewards are then exactly 0, without rounding errors
    present_N = rewards_N.detach().masked_fill(~valid_N, torch.inf)
    lowest_G = rewards_N.new_full((num_groups,), torch.inf).scatter_reduce(
        0, group_of_N.long(), present_N, "amin"
    )
    above_N = torch.where(valid_N, rewards_N - lowest_G[group_of_N], 0.0)
    counts_G = segment_sum(valid_N.to(rewards_N.dtype), group_of_N, num_groups)
    mean_G = segment_sum(above_N, group_of_N, num_groups) / counts_G.clamp(min=1)
    centred_N = torch.where(valid_N, above_N - mean_G[group_of_N], 0.0)
    if not normalise:
        return centred_N
    variance_G = segment_sum(centred_N.square(), group_of_N, num_groups) / (counts_G - 1).clamp(min=1)
    return centred_N / (variance_G.sqrt() + eps)[group_of_N]
