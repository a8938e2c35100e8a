"""Losses of the policy other than the clipped surrogate of PPO (`policy.py`). In all of them
r_t = exp(logps - old_logps) is the importance ratio of a token, whose logarithm is clamped as in `log_ratio`,
A_t its advantage, and sg stops the gradient.

Every function has arguments of one shape, usually (K,) trained tokens:

* `logps`: log-probabilities of the sampled tokens under the policy, nats, with grad;
* `old_logps`: the same under the policy at `prepare`, nats, no grad;
* `advantages`: no grad; without unit, or in units of reward.

Functions with bounds return the terms, and for each token 1 if a bound decides its term, else 0.
"""

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

from oat.functional._checks import check_same_shape
from oat.functional.policy import log_ratio
from oat.functional.segments import segment_mean


def reinforce_loss(
    logps: Float[Tensor, "*shape"], advantages: Float[Tensor, "*shape"]
) -> Float[Tensor, "*shape"]:
    """Return the terms of REINFORCE (Williams, 1992): -A_t logps_t. There is no importance ratio.

    Raises:
        ShapeError: shapes disagree.
    """
    check_same_shape(logps=logps, advantages=advantages)
    return -advantages * logps


def cispo_loss(
    logps: Float[Tensor, "*shape"],
    old_logps: Float[Tensor, "*shape"],
    advantages: Float[Tensor, "*shape"],
    *,
    clip_high: float,
    clip_low: float | None = None,
) -> tuple[Float[Tensor, "*shape"], Float[Tensor, "*shape"]]:
    """Return the terms of CISPO (MiniMax-M1, arXiv:2506.13585, Eq. 4): the ratio is clipped and weighs the
    gradient of every token, so no token loses its gradient.

    term_t = - sg(clip(r_t, 1 - clip_low, 1 + clip_high)) A_t logps_t

    Departure: without `clip_low` there is no lower bound, as in the paper's experiments. TRL clamps at
    `clip_high` itself.

    Raises:
        ShapeError: shapes disagree.
    """
    check_same_shape(logps=logps, old_logps=old_logps, advantages=advantages)
    ratio = torch.exp(log_ratio(logps, old_logps)).detach()
    clipped = ratio.clamp(None if clip_low is None else 1.0 - clip_low, 1.0 + clip_high)
    return -clipped * advantages * logps, (clipped != ratio).to(ratio.dtype)


def gspo_loss(
    logps_K: Float[Tensor, " K"],
    old_logps_K: Float[Tensor, " K"],
    advantages_K: Float[Tensor, " K"],
    row_of_K: Int[Tensor, " K"],
    num_rows: int,
    *,
    clip_low: float,
    clip_high: float,
    per_token: bool = False,
) -> tuple[Float[Tensor, " K"], Float[Tensor, " K"]]:
    """Return the terms of GSPO (arXiv:2507.18071, Eq. 5), which has one importance ratio for each response.

    term_t = - min(s_n A_t, clip(s_n, 1 - clip_low, 1 + clip_high) A_t),   s_n = exp(mean of log r_t in row n)

    Every token of a row has the row's ratio, so the mean over the tokens of each row, and then over rows,
    is the paper's loss. With `per_token` (Eq. 13), s_n is replaced by sg(s_n) r_t / sg(r_t): the same value,
    with the gradient of the token alone.

    Args:
        row_of_K: index of the row of each token, in [0, num_rows).
        clip_low, clip_high: distances of the bounds from 1.

    Raises:
        ShapeError: shapes disagree.
    """
    check_same_shape(logps_K=logps_K, old_logps_K=old_logps_K, advantages_K=advantages_K)
    mean_K = segment_mean(log_ratio(logps_K, old_logps_K), row_of_K, num_rows)[row_of_K]
    if per_token:
        mean_K = mean_K.detach() + logps_K - logps_K.detach()
    ratio_K = mean_K.exp()
    free_K = -ratio_K * advantages_K
    bounded_K = -ratio_K.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages_K
    return torch.maximum(free_K, bounded_K), (bounded_K > free_K).to(ratio_K.dtype)


def cpgd_loss(
    logps: Float[Tensor, "*shape"],
    old_logps: Float[Tensor, "*shape"],
    advantages: Float[Tensor, "*shape"],
    *,
    clip_low: float | None,
    clip_high: float,
) -> tuple[Float[Tensor, "*shape"], Float[Tensor, "*shape"]]:
    """Return the terms of CPGD (arXiv:2505.12504): the logarithm of the ratio takes the place of the ratio,
    so the gradient is never multiplied by a ratio.

    term_t = - min(l_t A_t, clip(l_t, ln(1 - clip_low), ln(1 + clip_high)) A_t),   l_t = ln r_t

    The paper adds a drift term, `policy_drift`.

    Args:
        clip_low: None, or 1: there is no lower bound.

    Raises:
        ShapeError: shapes disagree.
    """
    check_same_shape(logps=logps, old_logps=old_logps, advantages=advantages)
    difference = log_ratio(logps, old_logps)
    lowest = None if clip_low is None or clip_low >= 1 else math.log(1 - clip_low)
    free = -difference * advantages
    bounded = -difference.clamp(lowest, math.log1p(clip_high)) * advantages
    return torch.maximum(free, bounded), (bounded > free).to(free.dtype)


def policy_drift(
    logps: Float[Tensor, "*shape"], old_logps: Float[Tensor, "*shape"]
) -> Float[Tensor, "*shape"]:
    """Return estimates of KL(old policy || policy) from tokens that the old policy sampled: r_t - 1 - ln r_t
    (k3; CPGD, arXiv:2505.12504). Never negative, nats.

    Raises:
        ShapeError: shapes disagree.
    """
    difference = log_ratio(logps, old_logps)
    return torch.expm1(difference) - difference
