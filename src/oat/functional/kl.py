"""Estimators of the divergence KL(policy || reference) from tokens that the policy sampled (J. Schulman,
"Approximating KL divergence", http://joschu.net/blog/kl-approx.html), and `adapted_coef`, the coefficient of
a penalty on the divergence.

Each line has an estimator, its term with d = logps - reference_logps, and the term's expectation under the
policy:

    k1 = d               the divergence; single terms may be negative
    k2 = d^2 / 2         not the divergence, but close to it if policy and reference are close
    k3 = e^-d - 1 + d    the divergence; no term is negative

The estimators clamp nothing: in float32, e^-d overflows to infinity if d is below -88 nats. They are
elementwise. Their two arguments have the same shape, usually (K,) trained tokens.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from oat.functional._checks import check_same_shape


def kl_k1(
    logps: Float[Tensor, "*shape"], reference_logps: Float[Tensor, "*shape"]
) -> Float[Tensor, "*shape"]:
    """Return the terms of the estimator k1: logps - reference_logps.

    Args:
        logps: log-probabilities of the sampled tokens under the policy, nats.
        reference_logps: log-probabilities of the same tokens under the reference, nats.
    Returns:
        Unreduced terms, nats.

    Raises:
        ShapeError: shapes disagree.
    """
    check_same_shape(logps=logps, reference_logps=reference_logps)
    return logps - reference_logps


def kl_k2(
    logps: Float[Tensor, "*shape"], reference_logps: Float[Tensor, "*shape"]
) -> Float[Tensor, "*shape"]:
    """Return the terms of the estimator k2: half the square of k1. Arguments, units and errors as in
    `kl_k1`."""
    return 0.5 * kl_k1(logps, reference_logps).square()


def kl_k3(
    logps: Float[Tensor, "*shape"], reference_logps: Float[Tensor, "*shape"]
) -> Float[Tensor, "*shape"]:
    """Return the terms of the estimator k3: e^-d - 1 + d with d = k1. Arguments, units and errors as in
    `kl_k1`."""
    difference = kl_k1(logps, reference_logps)
    return torch.expm1(-difference) + difference


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
