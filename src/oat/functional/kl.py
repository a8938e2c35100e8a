"""Estimators of the divergence KL(policy || reference) from tokens that the policy sampled (J. Schulman,
"Approximating KL divergence", http://joschu.net/blog/kl-approx.html). With d = logps - reference_logps, the
expectation of each under the policy:

    k1 = d               the divergence; single terms may be negative
    k2 = d^2 / 2         biased, small when the two are close
    k3 = e^-d - 1 + d    the divergence; never negative

`adapted_coef` adapts the coefficient of a penalty on such a divergence.

Nothing is clamped: e^-d overflows to infinity past 88 nats in float32. The functions are elementwise; tensors
have any common shape, usually (K,) trained tokens.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from oat.functional._checks import check_same_shape


def kl_k1(
    logps: Float[Tensor, "*shape"], reference_logps: Float[Tensor, "*shape"]
) -> Float[Tensor, "*shape"]:
    """The estimator k1: logps - reference_logps.

    Args:
        logps: log-probabilities of the sampled tokens under the policy, nats.
        reference_logps: the same under the reference.
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
    """The estimator k2: half the square of k1. Arguments, units and errors as in `kl_k1`."""
    return 0.5 * kl_k1(logps, reference_logps).square()


def kl_k3(
    logps: Float[Tensor, "*shape"], reference_logps: Float[Tensor, "*shape"]
) -> Float[Tensor, "*shape"]:
    """The estimator k3: e^-d - 1 + d with d = k1. Arguments, units and errors as in `kl_k1`."""
    difference = kl_k1(logps, reference_logps)
    return torch.expm1(-difference) + difference


MOST_ERROR = 0.2
"""Bound of the relative error that moves a coefficient."""


def adapted_coef(coef: float, divergence: float, *, target: float, samples: int, horizon: int) -> float:
    """The next coefficient of a KL penalty: a proportional controller in log space moves the divergence
    towards its target (arXiv:1909.08593, Section 2.2).

    coef * (1 + samples / horizon * e),   e = clip((divergence - target) / target, -0.2, 0.2)

    The paper has a constant K = 0.1 instead of samples / horizon. The ratio is that of its code: the same
    number of responses moves the coefficient equally far in steps of any size. Arguments and result are
    numbers without gradient, so the bounds of the clip are no kinks of a loss.

    Args:
        divergence: KL(policy || reference) now, nats; if it is NaN the coefficient stays.
        target: nats, positive.
        samples: responses that the divergence was measured on.
        horizon: responses; at least as many as `samples`, so that the factor stays within 0.8 and 1.2.
    """
    if math.isnan(divergence):
        return coef
    error = min(max((divergence - target) / target, -MOST_ERROR), MOST_ERROR)
    return coef * (1 + samples / horizon * error)
