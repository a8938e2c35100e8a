"""Losses of the policy other than the clipped surrogate of PPO (`policy.py`). In all of them
r_t = exp(logps - old_logps) is the importance ratio of a token, whose logarithm is clamped as in `log_ratio`
unless a function says otherwise, A_t its advantage, and sg stops the gradient.

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
from oat.functional._sigmoid import sigmoid
from oat.functional.policy import log_ratio
from oat.functional.segments import segment_mean, segment_sum

LEAST_LOG_WEIGHT = math.log(1e-8)
MOST_LOG_WEIGHT = 20.0
"""Bounds of the logarithm of a response's weight in `vespo_loss`, nats; those of TRL 1.16. The upper one also
bounds the exponent of `policy_drift`."""


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
        mean_K = mean_K.detach() + (logps_K - logps_K.detach())
    ratio_K = mean_K.exp()
    free_K = -ratio_K * advantages_K
    bounded_K = -ratio_K.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages_K
    return torch.maximum(free_K, bounded_K), (bounded_K > free_K).to(ratio_K.dtype)


def luspo_loss(
    logps_K: Float[Tensor, " K"],
    old_logps_K: Float[Tensor, " K"],
    advantages_K: Float[Tensor, " K"],
    row_of_K: Int[Tensor, " K"],
    num_rows: int,
    *,
    clip_low: float,
    clip_high: float,
) -> tuple[Float[Tensor, " K"], Float[Tensor, " K"]]:
    """Return the terms of LUSPO (arXiv:2602.05261): those of `gspo_loss`. The two differ in the reduction.

    GSPO takes the mean of the terms over the tokens of a row, LUSPO their sum (`per: sequence_sum`), so that
    long responses count by their length. This is the loss of TRL 1.16 with its ratio of sequences.

    Raises:
        ShapeError: shapes disagree.
    """
    place = (row_of_K, num_rows)
    return gspo_loss(logps_K, old_logps_K, advantages_K, *place, clip_low=clip_low, clip_high=clip_high)


def sapo_loss(
    logps: Float[Tensor, "*shape"],
    old_logps: Float[Tensor, "*shape"],
    advantages: Float[Tensor, "*shape"],
    *,
    temperature: float = 1.0,
    negative_temperature: float = 1.05,
) -> tuple[Float[Tensor, "*shape"], Float[Tensor, "*shape"]]:
    """Return the terms of SAPO (arXiv:2511.20347), whose gate takes the place of a clip. The gradient of a
    token fades while its ratio departs from 1; it never stops at a bound.

    term_t = - 4 / tau sigmoid(tau (r_t - 1)) A_t,   tau = temperature if A_t > 0, else negative_temperature

    At a ratio of 1, the gradient is that of r_t A_t. The constants are those of the paper and of TRL 1.16.

    Args:
        temperature, negative_temperature: positive; a higher one fades sooner.
    Returns:
        Unreduced terms, and zeros: no bound decides a term.

    Raises:
        ShapeError: shapes disagree.
    """
    check_same_shape(logps=logps, old_logps=old_logps, advantages=advantages)
    ratio = torch.exp(log_ratio(logps, old_logps))
    tau = torch.where(advantages > 0, ratio.new_tensor(temperature), ratio.new_tensor(negative_temperature))
    return -4.0 / tau * sigmoid(tau * (ratio - 1.0)) * advantages, torch.zeros_like(ratio)


def vespo_loss(
    logps_K: Float[Tensor, " K"],
    old_logps_K: Float[Tensor, " K"],
    advantages_K: Float[Tensor, " K"],
    row_of_K: Int[Tensor, " K"],
    num_rows: int,
    *,
    power: float = 2.0,
    decay: float = 3.0,
    negative_power: float = 3.0,
    negative_decay: float = 2.0,
    correction_K: Float[Tensor, " K"] | None = None,
) -> tuple[Float[Tensor, " K"], Float[Tensor, " K"]]:
    """Return the terms of VESPO (arXiv:2602.10693): a smooth weight of the complete response takes the place
    of a ratio.

    term_t = - sg(phi_t) A_t logps_t,   phi_t = exp(c (1 - w)) w^k,   w = exp(sum of log r_t over the row)
    k, c = power, decay if A_t >= 0, else negative_power, negative_decay

    phi is 1 where policy and old policy agree. This is the loss of TRL 1.16: log r_t is clamped as in
    `log_ratio`, and log w to [ln 1e-8, 20]. Its reduction is the mean over tokens.

    Args:
        power, negative_power: k; a higher one lowers the weight of responses with w < 1.
        decay, negative_decay: c; a higher one lowers the weight of responses with w > 1.
        correction_K: token weights of `corrections.py`, no grad, each clamped to [1e-8, e^20]. Their product
            over the row multiplies w. They must not multiply the terms as well. None: no correction.
    Returns:
        Unreduced terms; and for each token 1 if log w is clamped, else 0.

    Raises:
        ShapeError: shapes disagree.
    """
    check_same_shape(logps_K=logps_K, old_logps_K=old_logps_K, advantages_K=advantages_K)
    logs_K = log_ratio(logps_K, old_logps_K).detach().double()
    if correction_K is not None:
        check_same_shape(logps_K=logps_K, correction_K=correction_K)
        logs_K = logs_K + correction_K.double().log().clamp(LEAST_LOG_WEIGHT, MOST_LOG_WEIGHT)
    log_w_N = segment_sum(logs_K, row_of_K, num_rows)
    held_K = log_w_N.clamp(LEAST_LOG_WEIGHT, MOST_LOG_WEIGHT)[row_of_K]
    is_good_K = advantages_K >= 0
    power_K = torch.where(is_good_K, held_K.new_tensor(power), held_K.new_tensor(negative_power))
    decay_K = torch.where(is_good_K, held_K.new_tensor(decay), held_K.new_tensor(negative_decay))
    phi_K = torch.exp(power_K * held_K - decay_K * torch.expm1(held_K)).to(logps_K.dtype)
    is_clamped_K = (held_K != log_w_N[row_of_K]).to(logps_K.dtype)
    return -phi_K * advantages_K * logps_K, is_clamped_K


def cpgd_loss(
    logps: Float[Tensor, "*shape"],
    old_logps: Float[Tensor, "*shape"],
    advantages: Float[Tensor, "*shape"],
    *,
    clip_low: float | None,
    clip_high: float,
) -> tuple[Float[Tensor, "*shape"], Float[Tensor, "*shape"]]:
    """Return the terms of CPGD (arXiv:2505.12504): the logarithm of the ratio takes the place of the ratio,
    so the gradient is never multiplied by a ratio. Nothing can overflow, so l_t is not clamped.

    term_t = - min(l_t A_t, clip(l_t, ln(1 - clip_low), ln(1 + clip_high)) A_t),   l_t = ln r_t

    The paper adds a drift term, `policy_drift`.

    Args:
        clip_low: None, or 1: there is no lower bound.

    Raises:
        ShapeError: shapes disagree.
    """
    check_same_shape(logps=logps, old_logps=old_logps, advantages=advantages)
    difference = logps - old_logps
    lowest = None if clip_low is None or clip_low >= 1 else math.log1p(-clip_low)
    free = -difference * advantages
    bounded = -difference.clamp(lowest, math.log1p(clip_high)) * advantages
    return torch.maximum(free, bounded), (bounded > free).to(free.dtype)


def policy_drift(
    logps: Float[Tensor, "*shape"], old_logps: Float[Tensor, "*shape"]
) -> Float[Tensor, "*shape"]:
    """Return estimates of KL(old policy || policy) from tokens that the old policy sampled: r_t - 1 - ln r_t
    (k3; CPGD, arXiv:2505.12504). Never negative up to a ratio of e^20, nats.

    A ratio above e^20 counts as e^20 in the value and in the slope, r_t - 1. So a token that is far from the
    old policy is still drawn back to it. Computed in float64, since small terms would lose their digits.

    Raises:
        ShapeError: shapes disagree.
    """
    check_same_shape(logps=logps, old_logps=old_logps)
    difference = logps.double() - old_logps.double()
    bounded = difference.detach().clamp(max=MOST_LOG_WEIGHT)
    exponent = bounded + (difference - difference.detach())
    return (torch.expm1(exponent) - difference).to(logps.dtype)
