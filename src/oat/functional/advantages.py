"""Advantages from rewards."""

from collections.abc import Callable

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
    above_N = _above_lowest(rewards_N, group_of_N, num_groups, valid_N)
    counts_G = segment_sum(valid_N.to(rewards_N.dtype), group_of_N, num_groups)
    mean_G = segment_sum(above_N, group_of_N, num_groups) / counts_G.clamp(min=1)
    centred_N = torch.where(valid_N, above_N - mean_G[group_of_N], 0.0)
    if not normalise:
        return centred_N
    variance_G = segment_sum(centred_N.square(), group_of_N, num_groups) / (counts_G - 1).clamp(min=1)
    return _divided(centred_N, (variance_G.sqrt() + eps)[group_of_N])


def _above_lowest(rewards_N: Tensor, group_of_N: Tensor, num_groups: int, valid_N: Tensor) -> Tensor:
    """Return rewards minus the lowest of their group, 0 where a reward is missing. So equal rewards are
    exactly 0, and differences of means have no rounding errors."""
    present_N = rewards_N.detach().masked_fill(~valid_N, torch.inf)
    lowest_G = rewards_N.new_full((num_groups,), torch.inf).scatter_reduce(
        0, group_of_N.long(), present_N, "amin"
    )
    return torch.where(valid_N, rewards_N - lowest_G[group_of_N], 0.0)


def _divided(values: Tensor, divisor: Tensor) -> Tensor:
    """Return a quotient; 0 where the divisor is 0, as that of equal rewards is with an eps of 0."""
    return torch.where(divisor == 0, 0.0, values / divisor)


def leave_one_out(
    rewards_N: Float[Tensor, " N"],
    group_of_N: Int[Tensor, " N"],
    num_groups: int,
    *,
    valid_N: Bool[Tensor, " N"] | None = None,
) -> Float[Tensor, " N"]:
    """Return each reward minus the mean of the other rewards of its group (RLOO, arXiv:2402.14740, Eq. 8).

    A_n = r_n - (sum of the group's r - r_n) / (n' - 1) = n' / (n' - 1) (r_n - mean of the group)

    n' is the number of the group's valid samples. Arguments, units and errors as in `group_advantages`. The
    advantage is exactly 0 if the group has one valid sample only, or if all its rewards are equal.
    """
    valid_N = torch.ones_like(rewards_N, dtype=torch.bool) if valid_N is None else valid_N
    centred_N = group_advantages(rewards_N, group_of_N, num_groups, valid_N=valid_N, normalise=False)
    counts_G = segment_sum(valid_N.to(rewards_N.dtype), group_of_N, num_groups)
    return centred_N * (counts_G / (counts_G - 1).clamp(min=1))[group_of_N]


def leave_one_out_max(
    rewards_N: Float[Tensor, " N"],
    group_of_N: Int[Tensor, " N"],
    num_groups: int,
    *,
    valid_N: Bool[Tensor, " N"] | None = None,
) -> Float[Tensor, " N"]:
    """Return each reward minus the largest of the other rewards of its group.

    A_n = r_n - max over the others of r_m

    Arguments, units and errors as in `group_advantages`. The advantage is exactly 0 if the group has one
    valid sample only.
    """
    valid_N = torch.ones_like(rewards_N, dtype=torch.bool) if valid_N is None else valid_N
    check_same_shape(rewards_N=rewards_N, group_of_N=group_of_N, valid_N=valid_N)
    first_N = first_of_best(rewards_N, group_of_N, num_groups, valid_N=valid_N)
    best_G = _largest(rewards_N, group_of_N, num_groups, valid_N)
    second_G = _largest(rewards_N, group_of_N, num_groups, valid_N & ~first_N)
    others_N = torch.where(first_N, second_G[group_of_N], best_G[group_of_N])
    has_others_N = valid_N & others_N.isfinite()
    return torch.where(has_others_N, rewards_N - others_N, 0.0)


def leave_responses_out(
    rewards_E: Float[Tensor, " E"],
    row_of_E: Int[Tensor, " E"],
    group_of_E: Int[Tensor, " E"],
    num_groups: int,
    *,
    valid_E: Bool[Tensor, " E"],
    largest: bool,
) -> Float[Tensor, " E"]:
    """Return each reward minus the mean, or the largest, of the rewards of its group's other responses, of
    which each may have several. So the baseline of a response depends on none of its own steps. With one
    reward a response, it is `leave_one_out` or `leave_one_out_max`.

    Args:
        rewards_E: (E,) rewards, any unit.
        row_of_E: index of the response of each; the responses are numbered from 0.
        group_of_E: the group id of each, in [0, num_groups).
        valid_E: False for a number that is no reward; its result is 0.
        largest: True: the largest. False: the mean.
    Returns:
        (E,), in units of reward; 0 if the group has no other response with a reward.

    Raises:
        ShapeError: shapes disagree.
    """
    check_same_shape(rewards_E=rewards_E, row_of_E=row_of_E, group_of_E=group_of_E, valid_E=valid_E)
    num_rows = int(row_of_E.max()) + 1 if len(row_of_E) else 0
    group_of_N = group_of_E.new_zeros(num_rows).scatter(0, row_of_E, group_of_E)
    if largest:
        best_N = _largest(rewards_E, row_of_E, num_rows, valid_E)
        is_there_N = best_N.isfinite()
        others_N = best_N - leave_one_out_max(best_N, group_of_N, num_groups, valid_N=is_there_N)
        has_others_N = segment_sum(is_there_N.to(best_N.dtype), group_of_N, num_groups)[group_of_N] > 1
        return torch.where(valid_E & has_others_N[row_of_E], rewards_E - others_N[row_of_E], 0.0)
    above_E = _above_lowest(rewards_E, group_of_E, num_groups, valid_E)
    sums_N = segment_sum(above_E, row_of_E, num_rows)
    counts_N = segment_sum(valid_E.to(rewards_E.dtype), row_of_E, num_rows)
    other_sums_N = segment_sum(sums_N, group_of_N, num_groups)[group_of_N] - sums_N
    other_counts_N = segment_sum(counts_N, group_of_N, num_groups)[group_of_N] - counts_N
    others_N = other_sums_N / other_counts_N.clamp(min=1)
    return torch.where(valid_E & (other_counts_N > 0)[row_of_E], above_E - others_N[row_of_E], 0.0)


def length_weighted(
    rewards_N: Float[Tensor, " N"],
    lengths_N: Float[Tensor, " N"],
    group_of_N: Int[Tensor, " N"],
    num_groups: int,
    *,
    valid_N: Bool[Tensor, " N"] | None = None,
) -> Float[Tensor, " N"]:
    """Return each reward minus the mean of its group's rewards weighted by the responses' lengths (OPO,
    arXiv:2505.23585).

    A_n = r_n - sum of l_m r_m over the group / sum of l_m over the group

    Arguments, units and errors as in `group_advantages`. The advantage is exactly 0 if all rewards of the
    group are equal, and if its responses have no tokens.

    Args:
        lengths_N: number of tokens of each response.
    """
    valid_N = torch.ones_like(rewards_N, dtype=torch.bool) if valid_N is None else valid_N
    check_same_shape(rewards_N=rewards_N, lengths_N=lengths_N, group_of_N=group_of_N, valid_N=valid_N)
    centred_N = group_advantages(rewards_N, group_of_N, num_groups, valid_N=valid_N, normalise=False)
    weight_N = torch.where(valid_N, lengths_N, 0.0)
    weight_G = segment_sum(weight_N, group_of_N, num_groups)
    shift_G = segment_sum(weight_N * centred_N, group_of_N, num_groups) / weight_G.clamp(min=1e-9)
    return torch.where(valid_N & (weight_G > 0)[group_of_N], centred_N - shift_G[group_of_N], 0.0)


def best_of_group(
    rewards_N: Float[Tensor, " N"],
    group_of_N: Int[Tensor, " N"],
    num_groups: int,
    *,
    valid_N: Bool[Tensor, " N"] | None = None,
) -> Float[Tensor, " N"]:
    """Return 1 for the first of the largest rewards of each group, and 0 for the others.

    Arguments and errors as in `group_advantages`; the result has no unit. All are 0 in a group whose rewards
    are equal, and in a group with one valid sample.
    """
    valid_N = torch.ones_like(rewards_N, dtype=torch.bool) if valid_N is None else valid_N
    check_same_shape(rewards_N=rewards_N, group_of_N=group_of_N, valid_N=valid_N)
    first_N = first_of_best(rewards_N, group_of_N, num_groups, valid_N=valid_N)
    best_G = _largest(rewards_N, group_of_N, num_groups, valid_N)
    has_less_N = valid_N & (rewards_N < best_G[group_of_N])
    has_spread_G = segment_sum(has_less_N.to(rewards_N.dtype), group_of_N, num_groups) > 0
    return (first_N & has_spread_G[group_of_N]).to(rewards_N.dtype)


def batch_scaled(
    rewards_N: Float[Tensor, " N"],
    group_of_N: Int[Tensor, " N"],
    num_groups: int,
    *,
    valid_N: Bool[Tensor, " N"] | None = None,
    eps: float = 1e-4,
    reduce: Callable[[Tensor], Tensor] | None = None,
) -> Float[Tensor, " N"]:
    """Return each reward minus the mean of its group, divided by the standard deviation of all valid rewards.

    A_n = (r_n - mean of the group) / (std of all groups' rewards + eps),   std unbiased

    Arguments, units and errors as in `group_advantages`. The standard deviation is computed in float64. With
    one valid reward in all, it counts as 0.

    Args:
        reduce: sums a tensor over all parts of the batch, such as the ranks of a distributed run, each with
            complete groups; None: the rewards are the whole batch.
    """
    valid_N = torch.ones_like(rewards_N, dtype=torch.bool) if valid_N is None else valid_N
    centred_N = group_advantages(rewards_N, group_of_N, num_groups, valid_N=valid_N, normalise=False)
    count, _, squares = moments_of(rewards_N, valid_N, reduce)
    return _divided(centred_N, ((squares / (count - 1).clamp(min=1)).sqrt() + eps).to(centred_N.dtype))


def batch_centred(
    rewards_N: Float[Tensor, " N"],
    *,
    valid_N: Bool[Tensor, " N"] | None = None,
    reduce: Callable[[Tensor], Tensor] | None = None,
) -> Float[Tensor, " N"]:
    """Return each reward minus the mean of all valid rewards, whatever their groups; it is not divided.

    A_n = r_n - mean of all groups' rewards

    Arguments, units and errors as in `batch_scaled`. The mean is computed in float64. The advantage is
    exactly 0 if all rewards are equal, and where a reward is missing.
    """
    valid_N = torch.ones_like(rewards_N, dtype=torch.bool) if valid_N is None else valid_N
    _, mean, _ = moments_of(rewards_N, valid_N, reduce)
    return torch.where(valid_N, rewards_N.double() - mean, 0.0).to(rewards_N.dtype)


def standardised(
    values_N: Float[Tensor, " N"],
    *,
    eps: float = 1e-4,
    reduce: Callable[[Tensor], Tensor] | None = None,
) -> Float[Tensor, " N"]:
    """Return the advantages of responses, scaled to mean 0 and standard deviation 1 over all of them. This is
    the `normalize_advantages` of TRL's RLOO. `whiten` does so over tokens, so that long responses count more.

    out = (x - mean) / (std + eps),   std unbiased

    The statistics are computed in float64. One value, and equal values, become 0.

    Args:
        values_N: any unit, no gradient needed.
        eps: added to the std, in units of the values.
        reduce: as in `batch_scaled`.
    """
    count, mean, squares = moments_of(values_N, torch.ones_like(values_N, dtype=torch.bool), reduce)
    std = (squares / (count - 1).clamp(min=1)).sqrt()
    return _divided(values_N.double() - mean, std + eps).to(values_N.dtype)


def whiten(
    values_K: Float[Tensor, " K"],
    mask_K: Float[Tensor, " K"],
    *,
    shift_mean: bool = True,
    eps: float = 1e-8,
    reduce: Callable[[Tensor], Tensor] | None = None,
) -> Float[Tensor, " K"]:
    """Return the values scaled to variance 1 over the masked tokens, with mean 0 or with their own mean.

    out = (x - mean) / sqrt(variance + eps) (+ mean),   variance unbiased

    With `shift_mean` False the mean is added again after the scaling, as TRL's reward whitening does. The
    statistics are computed in float64. With fewer than two tokens the variance counts as 1.

    Args:
        values_K: any unit, no gradient needed.
        mask_K: 1 counts, 0 does not. The result is 0 where the mask is 0, whatever the value is.
        eps: added inside the root, in units of the values squared.
        reduce: sums a tensor over all parts of the batch, such as the ranks of a distributed run; None: the
            values are the whole batch.

    Raises:
        ShapeError: shapes disagree.
    """
    check_same_shape(values_K=values_K, mask_K=mask_K)
    count, mean, squares = moments_of(values_K, mask_K > 0, reduce)
    scale = (squares / (count - 1) + eps).sqrt() if count > 1 else torch.ones_like(squares)
    whitened_K = (values_K.double() - mean) / scale + (0.0 if shift_mean else mean)
    return torch.where(mask_K > 0, whitened_K, 0.0).to(values_K.dtype)


def whiten_biased(
    values_K: Float[Tensor, " K"],
    mask_K: Float[Tensor, " K"],
    *,
    least_variance: float = 1e-8,
    reduce: Callable[[Tensor], Tensor] | None = None,
) -> Float[Tensor, " K"]:
    """Return the values scaled to mean 0 and variance 1 over the masked tokens, as LightRFT and OpenRLHF
    normalise advantages over all ranks.

    out = (x - mean) / sqrt(max(variance, least_variance)),   variance biased (divided by the count)

    Arguments and errors as in `whiten`. A step of n tokens gives sqrt(n / (n - 1)) times the values of
    `whiten`, but for the small numbers inside the roots.

    Args:
        least_variance: in units of the values squared.
    """
    check_same_shape(values_K=values_K, mask_K=mask_K)
    count, mean, squares = moments_of(values_K, mask_K > 0, reduce)
    scale = (squares / count.clamp(min=1)).clamp(min=least_variance).sqrt()
    return torch.where(mask_K > 0, (values_K.double() - mean) / scale, 0.0).to(values_K.dtype)


def whiten_in_groups(
    values_K: Float[Tensor, " K"],
    mask_K: Float[Tensor, " K"],
    group_of_K: Int[Tensor, " K"],
    num_groups: int,
    *,
    eps: float = 1e-8,
) -> Float[Tensor, " K"]:
    """Return the values scaled to mean 0 and variance 1 over the masked tokens of each group.

    out = (x - mean of the group) / sqrt(variance of the group + eps),   variance unbiased

    Arguments and errors as in `whiten`, which takes the statistics over all groups. In a group with fewer
    than two tokens the variance counts as 1. `group_advantages` normalises responses instead of tokens.

    Args:
        group_of_K: the group of each token, in [0, num_groups), in any order.
    """
    check_same_shape(values_K=values_K, mask_K=mask_K, group_of_K=group_of_K)
    kept_K = torch.where(mask_K > 0, values_K.double(), 0.0)
    counts_G = segment_sum((mask_K > 0).double(), group_of_K, num_groups)
    mean_G = segment_sum(kept_K, group_of_K, num_groups) / counts_G.clamp(min=1)
    centred_K = torch.where(mask_K > 0, kept_K - mean_G[group_of_K], 0.0)
    variance_G = segment_sum(centred_K.square(), group_of_K, num_groups) / (counts_G - 1).clamp(min=1) + eps
    scale_G = torch.where(counts_G > 1, variance_G.sqrt(), 1.0)
    return (centred_K / scale_G[group_of_K]).to(values_K.dtype)


def clipped_advantages(advantages: Float[Tensor, "*shape"], *, limit: float) -> Float[Tensor, "*shape"]:
    """Return the advantages, clipped to [-limit, limit]. The clip comes after every normalisation.

    Args:
        advantages: any unit.
        limit: positive, in the unit of the advantages.
    """
    return advantages.clamp(-limit, limit)


def first_of_best(
    rewards_N: Float[Tensor, " N"],
    group_of_N: Int[Tensor, " N"],
    num_groups: int,
    *,
    valid_N: Bool[Tensor, " N"],
) -> Bool[Tensor, " N"]:
    """Return True for the first valid sample, in row order, that has the largest reward of its group.
    Arguments and errors as in `group_advantages`."""
    check_same_shape(rewards_N=rewards_N, group_of_N=group_of_N, valid_N=valid_N)
    best_G = _largest(rewards_N, group_of_N, num_groups, valid_N)
    place_N = torch.arange(len(rewards_N), device=rewards_N.device)
    is_best_N = valid_N & (rewards_N == best_G[group_of_N])
    candidate_N = torch.where(is_best_N, place_N, len(rewards_N))
    first_G = candidate_N.new_full((num_groups,), len(rewards_N)).scatter_reduce(
        0, group_of_N.long(), candidate_N, "amin"
    )
    return is_best_N & (place_N == first_G[group_of_N])


def _largest(
    rewards_N: torch.Tensor, group_of_N: torch.Tensor, num_groups: int, valid_N: torch.Tensor
) -> torch.Tensor:
    """Return the largest valid reward of each group, (num_groups,); -inf for a group without one."""
    present_N = rewards_N.detach().masked_fill(~valid_N, -torch.inf)
    lowest_G = rewards_N.new_full((num_groups,), -torch.inf)
    return lowest_G.scatter_reduce(0, group_of_N.long(), present_N, "amax")


def moments_of(
    values_N: Float[Tensor, " N"],
    valid_N: Bool[Tensor, " N"],
    reduce: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the number of valid values, their mean, and the sum of their squared distances from it: three
    float64 scalars.

    Args:
        values_N: any unit, no gradient needed; may be NaN where `valid_N` is False.
        reduce: sums a tensor over all parts of the batch, such as the ranks of a distributed run; it is
            called twice. None: the values are the whole batch.

    Raises:
        ShapeError: shapes disagree.
    """
    check_same_shape(values_N=values_N, valid_N=valid_N)
    reduce = reduce or (lambda sums: sums)
    kept_N = torch.where(valid_N, values_N.double(), 0.0)
    count, total = reduce(torch.stack((valid_N.double().sum(), kept_N.sum())))
    mean = total / count.clamp(min=1)
    (squares,) = reduce(torch.where(valid_N, kept_N - mean, 0.0).square().sum()[None])
    return count, mean, squares
