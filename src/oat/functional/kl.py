"""Estimators of the divergence KL(policy || reference) from tokens that the policy sampled (J. Schulman,
"Approximating KL divergence", http://joschu.net/blog/kl-approx.html), and `adapted_coef`, the coefficient of
a penalty on the divergence.

Each line has an estimator, its term with d = logps - reference_logps, and the term's expectation under the
policy:

    k1 = d               the divergence; single terms may be negative
    k2 = d^2 / 2         not the divergence, but close to it if policy and reference are close
    k3 = e^-d - 1 + d    the divergence; no term is negative

The estimators clamp nothing unless `max_log_ratio` is set: in float32, e^-d overflows to infinity if d is
below -88 nats. They are elementwise. Their two arguments have the same shape, usually (K,) trained tokens.

The gradient of a term is not the gradient of the divergence, which also changes with the probabilities by
which tokens are drawn: the gradient of k1 has the mean 0, that of k2 the mean of KL(policy || reference)'s
gradient, and that of k3 the mean of KL(reference || policy)'s. `importance_weighted` mends this.
"""

import math
from collections.abc import Callable, Mapping

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
    return 0.5 * kl_k1(logps, reference_logps, max_log_ratio=max_log_ratio).square()


def kl_k3(
    logps: Float[Tensor, "*shape"],
    reference_logps: Float[Tensor, "*shape"],
    *,
    max_log_ratio: float | None = None,
) -> Float[Tensor, "*shape"]:
    """Return the terms of the estimator k3: e^-d - 1 + d with d = k1. Arguments, units and errors as in
    `kl_k1`."""
    difference = kl_k1(logps, reference_logps, max_log_ratio=max_log_ratio)
    return torch.expm1(-difference) + difference


KL_ESTIMATORS: Mapping[str, Callable[..., Tensor]] = {"k1": kl_k1, "k2": kl_k2, "k3": kl_k3}
"""The estimators by name."""


def importance_weighted(
    terms: Float[Tensor, "*shape"], logps: Float[Tensor, "*shape"], old_logps: Float[Tensor, "*shape"]
) -> Float[Tensor, "*shape"]:
    """Return the terms of k1 or k3 times the importance ratio, which has a gradient (DeepSeek-V3.2,
    arXiv:2512.02556). Over tokens that the old policy drew, the result and its gradient have the mean of the
    divergence and of its gradient.

    out_t = r_t term_t,   r_t = exp(logps - old_logps), clamped as in `policy.log_ratio`

    Args:
        terms: terms of `kl_k1` or `kl_k3`, nats, with grad.
        logps: log-probabilities of the sampled tokens under the policy, nats, with grad. They belong to the
            distribution that was drawn from, whereas `terms` may be made of raw log-probabilities.
        old_logps: the same under the policy at `prepare`, nats, no grad.

    Raises:
        ShapeError: shapes disagree.
    """
    check_same_shape(terms=terms, logps=logps, old_logps=old_logps)
    return log_ratio(logps, old_logps).exp() * terms


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
