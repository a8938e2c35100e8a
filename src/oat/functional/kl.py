"""Estimators of the divergence KL(policy || reference) from tokens that the policy sampled (J. Schulman, "Approximating KL divergence",
http://joschu.net/blog/kl-approx.html). With d = logps - reference_logps, the expectation of each under the policy:

    k1 = d               the divergence; single terms may be negative
    k2 = d^2 / 2         biased, small when the two are close
    k3 = e^-d - 1 + d    the divergence; never negative

None is clamped: e^-d overflows to infinity past 88 nats in float32. Elementwise; any common shape, usually (K,) trained tokens.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from oat.functional._checks import check_same_shape


def kl_k1(logps: Float[Tensor, "*shape"], reference_logps: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
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


def kl_k2(logps: Float[Tensor, "*shape"], reference_logps: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """The estimator k2: half the square of k1. Arguments, units and errors as in `kl_k1`."""
    return 0.5 * kl_k1(logps, reference_logps).square()


def kl_k3(logps: Float[Tensor, "*shape"], reference_logps: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """The estimator k3: e^-d - 1 + d with d = k1. Arguments, units and errors as in `kl_k1`."""
    difference = kl_k1(logps, reference_logps)
    return torch.expm1(-difference) + difference
