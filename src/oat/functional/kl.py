"""Estimators of the divergence KL(policy || reference) from tokens that the policy sampled (J. Schulman,
"Approximating KL divergence", http://joschu.net/blog/kl-approx.html). With d = logps - reference_logps, their
terms and the expectations of these under the policy are:

    k1 = d               the divergence; single terms may be negative
    k2 = d^2 / 2         not the divergence, but close to it if policy and reference are close
    k3 = e^-d - 1 + d    the divergence; no term is negative

The estimators clamp nothing: in float32, e^-d overflows to infinity if d is below -88 nats. They are
elementwise. Their two arguments have the same shape, usually (K,) trained tokens.

`adapted_coef` adapts the coefficient of a penalty on such a divergence.
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
    """The estimator k2: half the square of k1. Arguments, units and errors as in `kl_k1`."""
    return 0.5 * kl_k1(logps, reference_logps).square()


def kl_k3(
    logps: Float[Tensor, "*shape"], reference_logps: Float[Tensor, "*shape"]
) -> Float[Tensor, "*shape"]:
    """The estimator k3: e^-d - 1 + d with d = k1. Arguments, units and errors as in `kl_k1`."""
    difference = kl_k1(logps, reference_logps)
    return torch.expm1(-difference) + difference


MOST_ERROR = 0.2
"""Largest absolute relative error that `adapted_coef` takes into account."""


def adapted_coef(coef: float, divergence: float, *, target: float, samples: int, horizon: int) -> float:
    """Return the next coefficient of a KL penalty. A proportional controller in log space changes the
    coefficient so that the divergence moves towards its target (arXiv:1909.08593, Section 2.2).

    coef * (1 + samples / horizon * e),   e = clip((divergence - target) / target, -0.2, 0.2)

    The paper has a constant K = 0.1 instead of samples / horizon. The ratio is from the paper's code: with
    it, the same number of responses changes the coefficient by about as much, whether they come in many small
    steps or in a few large ones. The clip is not part of a loss: arguments and result are numbers without
    gradient.

    Args:
        divergence: KL(policy || reference) now, nats. If it is NaN, the coefficient stays.
        target: the divergence to reach, nats, positive.
        samples: number of responses that the divergence was measured on.
        horizon: number of responses, at least `samples`, so that the factor stays in [0.8, 1.2].
    """
    if math.isnan(divergence):
        return coef
    error = min(max((divergence - target) / target, -MOST_ERROR), MOST_ERROR)
    return coef * (1 + samples / horizon * error)
