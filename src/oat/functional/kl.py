"""Estimators of the divergence KL(policy || reference) from tokens that the policy sampled (J. Schulman,
"Approximating KL divergence", http://joschu.net/blog/kl-approx.html), and `adapted_coef`, the coefficient of
a penalty on the divergence.

Each line has an estimator, its term with d = logps - reference_logps, and the term's expectation under the
policy:

    k1 = d               the divergence; single terms may be negative
    k2 = d^2 / 2         not the divergence, but close to it if policy and reference are close
    k3 = e^-d - 1 + d    the divergence; no term is negative

The estimators clamp nothing unless `max_log_ratio` is set: in float32, e^-d overflows to infinity if d is
below -88 nats. They are elementwise. Their arguments have the same shape, usually (K,) trained tokens. k2 and
k3 compute in float64, since in float32 e^-d - 1 + d and its slope lose their digits if d is near 0; the
result has the precision of `logps`.

The gradient of a term is not the gradient of the divergence, which also changes with the probabilities by
which tokens are drawn: the gradient of k1 has the mean 0, that of k2 the mean of KL(policy || reference)'s
gradient, and that of k3 the mean of KL(reference || policy)'s. `unbiased_kl` mends this.
"""

import math
from collections.abc import Callable, Mapping
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from oat.functional._checks import check_same_shape
from oat.functional.policy import log_ratio


def kl_k1(
    logps: Float[Tensor, "*shape"],
    reference_logps: Float[Tensor, "*shape"],
    *,
    max_log_ratio: float | None = None,
) -> Float[Tensor, "*shape"]:
    """Return the terms of the estimator k1: logps - reference_logps.

    Args:
        logps: log-probabilities of the sampled tokens under the policy, nats.
        reference_logps: log-probabilities of the same tokens under the reference, nats.
        max_log_ratio: bound of the absolute value of d, nats; a d beyond it is clamped and gets no gradient.
            None: no bound. Other programs bound d, or the term, by numbers from 10 to 40.
    Returns:
        Unreduced terms, nats.

    Raises:
        ShapeError: shapes disagree.
    """
    check_same_shape(logps=logps, reference_logps=reference_logps)
    difference = logps - reference_logps
    return difference if max_log_ratio is None else difference.clamp(-max_log_ratio, max_log_ratio)


def kl_k2(
    logps: Float[Tensor, "*shape"],
    reference_logps: Float[Tensor, "*shape"],
    *,
    max_log_ratio: float | None = None,
) -> Float[Tensor, "*shape"]:
    """Return the terms of the estimator k2: half the square of k1. Arguments, units and errors as in
    `kl_k1`."""
    difference = kl_k1(logps.double(), reference_logps.double(), max_log_ratio=max_log_ratio)
    return (0.5 * difference.square()).to(logps.dtype)


def kl_k3(
    logps: Float[Tensor, "*shape"],
    reference_logps: Float[Tensor, "*shape"],
    *,
    max_log_ratio: float | None = None,
) -> Float[Tensor, "*shape"]:
    """Return the terms of the estimator k3: e^-d - 1 + d with d = k1. Arguments, units and errors as in
    `kl_k1`."""
    difference = kl_k1(logps.double(), reference_logps.double(), max_log_ratio=max_log_ratio)
    return (torch.expm1(-difference) + difference).to(logps.dtype)


KL_ESTIMATORS: Mapping[str, Callable[..., Tensor]] = {"k1": kl_k1, "k2": kl_k2, "k3": kl_k3}
"""The estimators by name."""


def unbiased_kl(
    estimator: Literal["k1", "k3"],
    logps: Float[Tensor, "*shape"],
    reference_logps: Float[Tensor, "*shape"],
    sampled_logps: Float[Tensor, "*shape"],
    old_logps: Float[Tensor, "*shape"],
    *,
    max_log_ratio: float | None = None,
) -> Float[Tensor, "*shape"]:
    """Return the terms k(d) of k1 or k3 times the importance ratio r, which has a gradient (DeepSeek-V3.2,
    arXiv:2512.02556). Over tokens that the old policy drew, the result and its gradient have the mean of the
    divergence and of its gradient.

    out_t = r_t k(d_t),   r_t = exp(sampled_logps - old_logps),   d_t = logps - reference_logps
    slope with respect to sampled_logps: r_t (k(d_t) + k'(d_t)), that is r_t d_t of k3, r_t (d_t + 1) of k1

    The slope is computed by this formula, since the parts of k3's are e^-d and -e^-d, but for small numbers.
    With `max_log_ratio` c, d_t is clamped to [-c, c] in value and slope. So k3 pulls every token towards the
    reference, and the gradients of k1 and k3 have one mean. r_t is clamped as in `policy.log_ratio`.

    If tokens are drawn at another temperature than 1, or from kept sets, the two log-probabilities of the
    policy differ. Departure: `sampled_logps` gets the slope k' of `logps` too. Otherwise the two parts of
    k3's slope would not cancel, and could pull a token away from the reference.

    Args:
        logps: raw log-probabilities of the sampled tokens under the policy, nats; their gradient is not used.
        reference_logps: the same under the reference, nats, no grad.
        sampled_logps: log-probabilities of the tokens under the policy in the distribution that was drawn
            from, nats, with grad.
        old_logps: the same under the policy at `prepare`, nats, no grad.
        max_log_ratio: as in `kl_k1`, but a d beyond it keeps the slope that it has at the bound.
    Returns:
        Unreduced terms, nats.

    Raises:
        ShapeError: shapes disagree.
    """
    check_same_shape(
        logps=logps, reference_logps=reference_logps, sampled_logps=sampled_logps, old_logps=old_logps
    )
    d = kl_k1(logps.detach().double(), reference_logps.double(), max_log_ratio=max_log_ratio)
    terms, slopes = (d, d + 1.0) if estimator == "k1" else (torch.expm1(-d) + d, d)
    x = sampled_logps.double()
    ratio = log_ratio(x.detach(), old_logps.double()).exp()
    return (ratio * terms + ratio * slopes * (x - x.detach())).to(sampled_logps.dtype)


MOST_ERROR = 0.2
"""Bound at which `adapted_coef` clips the absolute relative error of the divergence."""


def adapted_coef(coef: float, divergence: float, *, target: float, samples: int, horizon: int) -> float:
    """Return the next coefficient of a KL penalty. A proportional controller in log space moves the
    divergence towards its target (arXiv:1909.08593, Section 2.2).

    coef * (1 + samples / horizon * e),   e = clip((divergence - target) / target, -0.2, 0.2)

    The paper has a constant K = 0.1 instead of samples / horizon; the paper's code has this ratio. With the
    ratio, the change of the coefficient per response hardly depends on the number of responses of a step.

    Args:
        divergence: KL(policy || reference) now, nats. If it is NaN, the coefficient stays.
        target: the divergence to reach, nats, positive.
        samples: number of responses that the divergence was measured on.
        horizon: number of responses, at least `samples`. The factor is then in [0.8, 1.2].
    """
    if math.isnan(divergence):
        return coef
    error = min(max((divergence - target) / target, -MOST_ERROR), MOST_ERROR)
    return coef * (1 + samples / horizon * error)
