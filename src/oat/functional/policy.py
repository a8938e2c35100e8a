"""Policy-gradient terms."""

import torch
from jaxtyping import Float
from torch import Tensor

from oat.functional._checks import check_same_shape


def log_ratio(
    logps: Float[Tensor, "*shape"], old_logps: Float[Tensor, "*shape"], *, max_log_ratio: float = 20.0
) -> Float[Tensor, "*shape"]:
    """The log of the importance ratio, logps - old_logps, clamped to [-max_log_ratio, max_log_ratio] so that
    its exponential stays finite. Beyond the clamp it has no gradient; at exactly +-max_log_ratio it has one.

    Elementwise; any common shape.

    Args:
        logps: log-probabilities of the taken tokens under the policy, nats, with grad.
        old_logps: the same under the policy at `prepare`, nats, no grad.
        max_log_ratio: nats, against overflow only; e^20 is 4.9e8.

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
    max_log_ratio: float = 20.0,
) -> tuple[Float[Tensor, "*shape"], Float[Tensor, "*shape"]]:
    """Clipped surrogate of PPO (arXiv:1707.06347, Eq. 7) with separate bounds (DAPO, arXiv:2503.14476, Eq.
    10).

    term = - min(r * A, clip(r, 1 - clip_low, 1 + clip_high) * A),   r = exp(logps - old_logps)

    A ratio that is exactly at a bound is within it: it has its whole gradient, and does not count as clipped.

    Elementwise; tensors have any common shape, usually (K,) trained tokens. The learner masks, weights and
    reduces. Departure: the log-ratio is clamped as in `log_ratio`. There is no second bound for negative
    advantages (dual clip).

    Args:
        logps: log-probabilities of the taken tokens under the policy, nats, with grad.
        old_logps: the same under the policy at `prepare`, nats, no grad.
        advantages: one a token, in units of reward, no grad.
        clip_low, clip_high: how far the ratio may fall below and rise above 1 before its gradient stops.
        max_log_ratio: see `log_ratio`.
    Returns:
        Unreduced terms, and 1 where the clipped branch is the larger loss, else 0 (also where both are
        equal).

    Raises:
        ShapeError: shapes disagree.
    """
    check_same_shape(logps=logps, old_logps=old_logps, advantages=advantages)
    ratio = torch.exp(log_ratio(logps, old_logps, max_log_ratio=max_log_ratio))
    free = -advantages * ratio
    bounded = -advantages * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return torch.maximum(free, bounded), (bounded > free).to(ratio.dtype)
