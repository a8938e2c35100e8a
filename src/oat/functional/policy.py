"""Policy-gradient terms: the importance ratio and the clipped loss of PPO."""

import torch
from jaxtyping import Float
from torch import Tensor

from oat.functional._checks import check_same_shape


def log_ratio(
    logps: Float[Tensor, "*shape"], old_logps: Float[Tensor, "*shape"], *, max_log_ratio: float = 20.0
) -> Float[Tensor, "*shape"]:
    """Return the logarithm of the importance ratio, logps - old_logps, clamped to [-max_log_ratio,
    max_log_ratio].

    The clamp keeps the exponential finite. A value outside the range gets no gradient. The function is
    elementwise. The two tensors have the same shape, which may be any.

    Args:
        logps: log-probabilities of the sampled tokens under the policy, nats, with grad.
        old_logps: log-probabilities of the same tokens under the policy at `prepare`, nats, no grad.
        max_log_ratio: nats. It only prevents overflow: e^20 is 4.9e8.

    Raises:
        ShapeError: shapes disagree.
    """
    check_same_shape(logps=logps, old_logps=old_logps)
    return (logps - old_logps).clamp(-max_log_ratio, max_log_ratio)


def clipped_policy_loss(
    logps: Float[Tensor, "*shape"],
    old_logps: Float[Tensor, "*shape"],
    advantages: Float[Tensor, "*shape"],
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
    max_log_ratio: float = 20.0,
) -> tuple[Float[Tensor, "*shape"], Float[Tensor, "*shape"]]:
    """Return the clipped surrogate of PPO (arXiv:1707.06347, Eq. 7) with separate bounds (DAPO,
    arXiv:2503.14476, Eq. 10).

    term = - min(r * A, clip(r, 1 - clip_low, 1 + clip_high) * A),   r = exp(logps - old_logps)

    The function is elementwise; all tensors have the same shape, usually (K,) trained tokens. A ratio exactly
    at a bound gets its full gradient. Departure: the log-ratio is clamped as in `log_ratio`.

    With `dual_clip` c, the term of a negative advantage is at most -c A (arXiv:1912.09729, Eq. 5).

    Args:
        logps: log-probabilities of the sampled tokens under the policy, nats, with grad.
        old_logps: log-probabilities of the same tokens under the policy at `prepare`, nats, no grad.
        advantages: the advantage of each token, no grad; without unit, or in units of reward.
        clip_low, clip_high: how far below and above 1 the ratio may be before clipping stops its gradient.
        dual_clip: above 1; None: no second bound.
        max_log_ratio: see `log_ratio`.
    Returns:
        Unreduced terms; and for each token 1 if a bound decides the term, else 0. If the branches are equal,
        it is 0.

    Raises:
        ShapeError: shapes disagree.
    """
    check_same_shape(logps=logps, old_logps=old_logps, advantages=advantages)
    ratio = torch.exp(log_ratio(logps, old_logps, max_log_ratio=max_log_ratio))
    free = -advantages * ratio
    bounded = -advantages * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    terms = torch.maximum(free, bounded)
    is_bounded = bounded > free
    if dual_clip is not None:
        most = torch.where(advantages < 0, -dual_clip * advantages, torch.inf)
        is_above = terms > most
        is_bounded = is_bounded | is_above
        terms = torch.where(is_above, most, terms)
    return terms, is_bounded.to(ratio.dtype)
