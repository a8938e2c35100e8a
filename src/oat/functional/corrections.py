"""Corrections for tokens that other probabilities drew than the learner's: the sampler's weights were older,
or its arithmetic was different. Let

    ln k_t = old_logps - recorded_logps

where `old` log-probabilities are the policy's at `prepare`, and `recorded` ones are the sampler's. Both
belong to the distribution that was drawn from (after temperature, top-k, top-p and min-p). A policy loss
multiplies its terms by weights made of k, so that their mean is that of tokens drawn by the old policy:

    token       the k_t of the token itself
    sequence    exp(sum of ln k_t over the row): unbiased for the row, of high variance
    geometric   exp(mean of ln k_t over the row): one weight for the row, without its length

Weights and masks belong to numerators only. The denominators of a loss stay those of its reduction, so a
token that a mask leaves out still counts. Nothing here has a gradient.
"""

from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from oat.functional._checks import check_same_shape
from oat.functional.segments import segment_mean, segment_sum

Level = Literal["token", "sequence", "geometric"]
"""What a ratio belongs to: see the head of this file."""


def sampler_ratios(
    old_logps_K: Float[Tensor, " K"],
    recorded_logps_K: Float[Tensor, " K"],
    row_of_K: Int[Tensor, " K"],
    num_rows: int,
    *,
    level: Level = "token",
) -> Float[Tensor, " K"]:
    """Return the ratio of the old policy's probability to the sampler's: of each token, or of its row.

    Sums are computed in float64. A ratio may be infinite, or 0.

    Args:
        old_logps_K: log-probabilities of the sampled tokens under the policy at `prepare`, nats.
        recorded_logps_K: log-probabilities of the same tokens, recorded at sampling, nats.
        row_of_K: index of the row of each token, in [0, num_rows).
        num_rows: N; rows may be without tokens.
        level: `token`, `sequence` or `geometric`, as at the head of this file.

    Raises:
        ShapeError: shapes disagree.
    """
    check_same_shape(old_logps_K=old_logps_K, recorded_logps_K=recorded_logps_K, row_of_K=row_of_K)
    difference_K = (old_logps_K - recorded_logps_K).detach()
    if level == "token":
        return difference_K.exp()
    over_row = segment_sum if level == "sequence" else segment_mean
    difference_N = over_row(difference_K.double(), row_of_K, num_rows)
    return difference_N.exp()[row_of_K].to(old_logps_K.dtype)


def truncated_weights(
    old_logps_K: Float[Tensor, " K"],
    recorded_logps_K: Float[Tensor, " K"],
    row_of_K: Int[Tensor, " K"],
    num_rows: int,
    *,
    level: Level = "token",
    cap: float = 2.0,
    floor: float | None = None,
) -> tuple[Float[Tensor, " K"], Float[Tensor, " K"]]:
    """Return the weights of truncated importance sampling (F. Yao et al., "Your efficient RL framework
    secretly brings you off-policy RL training", 2025).

    w_t = min(k_t, cap), or clip(k_t, floor, cap)

    Departure: `floor`, a lower bound that OpenRLHF has, is off unless it is set. Arguments and errors as in
    `sampler_ratios`.

    Args:
        cap: the largest weight, positive. At the level `sequence` too, it bounds the weight of the row.
        floor: the smallest weight; None: there is no lower bound.
    Returns:
        The weights; and for each token 1 if a bound changed its weight, else 0.
    """
    ratio_K = sampler_ratios(old_logps_K, recorded_logps_K, row_of_K, num_rows, level=level)
    weights_K = ratio_K.clamp(floor, cap)
    return weights_K, (weights_K != ratio_K).to(ratio_K.dtype)


def masked_weights(
    old_logps_K: Float[Tensor, " K"],
    recorded_logps_K: Float[Tensor, " K"],
    row_of_K: Int[Tensor, " K"],
    num_rows: int,
    *,
    level: Level = "token",
    low: float | None = 0.5,
    high: float | None = 5.0,
) -> tuple[Float[Tensor, " K"], Float[Tensor, " K"]]:
    """Return weights that leave out tokens, or complete rows, whose ratio is out of bounds. At the level
    `token` this is IcePop (Ring-1T, arXiv:2510.18855); at the others it is the sequence mask.

    w_t = k_t if low <= k_t <= high, else 0

    Inside the bounds the weight is k_t, not 1. Arguments and errors as in `sampler_ratios`.

    Args:
        low, high: the bounds of the ratio; None: no bound on this side. An infinite ratio is always outside.
    Returns:
        The weights; and for each token 1 if it is left out, else 0.
    """
    ratio_K = sampler_ratios(old_logps_K, recorded_logps_K, row_of_K, num_rows, level=level)
    is_inside_K = (ratio_K >= (0.0 if low is None else low)) & (
        ratio_K <= (torch.finfo(ratio_K.dtype).max if high is None else high)
    )
    return torch.where(is_inside_K, ratio_K, 0.0), (~is_inside_K).to(ratio_K.dtype)


def on_policy_mask(
    logps_K: Float[Tensor, " K"],
    recorded_logps_K: Float[Tensor, " K"],
    advantages_K: Float[Tensor, " K"],
    row_of_K: Int[Tensor, " K"],
    num_rows: int,
    *,
    bound: float,
) -> Float[Tensor, " K"]:
    """Return 0 for the tokens that off-policy sequence masking leaves out, and 1 for the others
    (DeepSeek-V3.2, arXiv:2512.02556, Eq. 9).

    out_t = 0 if A_t < 0 and the mean of (recorded_logps - logps) over the row > bound, else 1

    The mean estimates the divergence of the policy from the sampler. So a bad response that the policy would
    hardly give any more teaches nothing. A response with advantages of both signs keeps the tokens that are
    not negative.

    Args:
        logps_K: log-probabilities of the sampled tokens under the policy now, nats; their gradient is not
            used.
        recorded_logps_K: log-probabilities of the same tokens, recorded at sampling, nats.
        advantages_K: the advantage of each token, any unit.
        row_of_K: index of the row of each token, in [0, num_rows).
        bound: nats per token, positive. A mean of exactly `bound` keeps the row.

    Raises:
        ShapeError: shapes disagree.
    """
    check_same_shape(logps_K=logps_K, recorded_logps_K=recorded_logps_K, advantages_K=advantages_K)
    behind_K = (recorded_logps_K - logps_K).detach().double()
    is_far_N = segment_mean(behind_K, row_of_K, num_rows) > bound
    return (~(is_far_N[row_of_K] & (advantages_K < 0))).to(logps_K.dtype)


def recorded_gap(
    old_logps_K: Float[Tensor, " K"], recorded_logps_K: Float[Tensor, " K"]
) -> tuple[float, float]:
    """Return the mean and the largest absolute difference between old and recorded log-probabilities, nats;
    0 and 0 if there are no tokens.

    Raises:
        ShapeError: shapes disagree.
    """
    check_same_shape(old_logps_K=old_logps_K, recorded_logps_K=recorded_logps_K)
    if not old_logps_K.numel():
        return 0.0, 0.0
    gap_K = (old_logps_K - recorded_logps_K).detach().double().abs()
    return float(gap_K.mean()), float(gap_K.max())
