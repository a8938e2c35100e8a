"""Filters of tokens: which of them give a policy gradient, chosen by entropy or by covariance.

Each filter returns a mask of tokens that multiplies the terms of a loss. A share of tokens is rounded up, so
a positive share of some tokens is at least one token. The tokens are those of a whole step: a filter of a
part of them would choose others. Nothing here has a gradient.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from oat.functional._checks import check_same_shape
from oat.functional.segments import segment_sum

_ROUNDING = 1e-9
"""What a product of share and number may be above a whole number by rounding: 0.07 * 100 is 7, not 8."""


def top_share(
    values_K: Float[Tensor, " K"], *, share: float, mask_K: Float[Tensor, " K"] | None = None
) -> Float[Tensor, " K"]:
    """Return 1 for the tokens with the largest values, and 0 for the others.

    With entropies this is the filter of high-entropy tokens (arXiv:2506.01939; the paper's share is 0.2): one
    quantile over all tokens. With `covariances` it chooses the tokens of KL-Cov (arXiv:2505.22617, Section 4;
    a share of 2e-4), which get a KL term besides their gradient. Exactly ceil(share * tokens) tokens are 1.
    Of equal values, earlier tokens come first.

    Args:
        values_K: any unit; finite where the mask is 1.
        share: in [0, 1].
        mask_K: 1 counts, 0 does not, and gives 0 whatever the value is; None: all tokens count.

    Raises:
        ShapeError: shapes disagree.
    """
    alone_K = torch.zeros(len(values_K), dtype=torch.long, device=values_K.device)
    return top_share_of_rows(values_K, alone_K, 1, share=share, mask_K=mask_K)


def top_share_of_rows(
    values_K: Float[Tensor, " K"],
    row_of_K: Int[Tensor, " K"],
    num_rows: int,
    *,
    share: float,
    mask_K: Float[Tensor, " K"] | None = None,
) -> Float[Tensor, " K"]:
    """Return 1 for the tokens with the largest values of their row, and 0 for the others. In each row exactly
    ceil(share * tokens of the row) tokens are 1. The paper of high-entropy tokens has one quantile for all
    rows (`top_share`). LightRFT takes the share in each row, with two differences: it rounds down, and its
    loss is divided by the number of chosen tokens, where ours keeps the denominator of the reduction.

    Arguments and errors as in `top_share`.

    Args:
        row_of_K: index of the row of each token, in [0, num_rows), in any order.
        num_rows: N; rows may be without tokens.
    """
    mask_K = torch.ones_like(values_K) if mask_K is None else mask_K
    check_same_shape(values_K=values_K, row_of_K=row_of_K, mask_K=mask_K)
    counts_N = segment_sum((mask_K > 0).double(), row_of_K, num_rows)
    numbers_N = (share * counts_N - _ROUNDING).ceil()
    lowered_K = torch.where(mask_K > 0, values_K.detach(), -torch.inf)
    rank_K = _rank_in_row(-lowered_K, row_of_K, num_rows)
    return ((rank_K < numbers_N[row_of_K]) & (mask_K > 0)).to(values_K.dtype)


def covariances(
    logps_K: Float[Tensor, " K"],
    advantages_K: Float[Tensor, " K"],
    *,
    mask_K: Float[Tensor, " K"] | None = None,
    reduce: Callable[[Tensor], Tensor] | None = None,
) -> Float[Tensor, " K"]:
    """Return what each token adds to the covariance of log-probability and advantage over a step
    (arXiv:2505.22617, Section 4). The mean of these numbers is the covariance itself. If it is positive, a
    policy gradient lowers the entropy.

    c_t = (logps_t - mean of logps) (A_t - mean of A)

    Means are computed in float64.

    Args:
        logps_K: log-probabilities of the sampled tokens under the policy, nats; their gradient is not used.
        advantages_K: any unit.
        mask_K: 1 counts, 0 does not, and gives 0 whatever the values are; None: all tokens count.
        reduce: sums a tensor over all parts of the batch, such as the ranks of a distributed run; None: the
            tokens are the whole batch.

    Raises:
        ShapeError: shapes disagree.
    """
    mask_K = torch.ones_like(logps_K) if mask_K is None else mask_K
    check_same_shape(logps_K=logps_K, advantages_K=advantages_K, mask_K=mask_K)
    kept_2K = torch.where(mask_K > 0, torch.stack((logps_K.detach(), advantages_K)).double(), 0.0)
    sums = torch.cat(((mask_K > 0).double().sum()[None], kept_2K.sum(1)))
    count, *totals = sums if reduce is None else reduce(sums)
    centred_2K = kept_2K - torch.stack(totals)[:, None] / count.clamp(min=1)
    return torch.where(mask_K > 0, centred_2K.prod(0), 0.0).to(logps_K.dtype)


def outside_covariance_band(
    covariances_K: Float[Tensor, " K"],
    uniforms_K: Float[Tensor, " K"],
    *,
    share: float = 2e-4,
    low: float = 1.0,
    high: float = 5.0,
    mask_K: Float[Tensor, " K"] | None = None,
) -> Float[Tensor, " K"]:
    """Return 0 for the tokens whose gradient Clip-Cov stops, and 1 for the others (arXiv:2505.22617,
    Section 4). Tokens with a high covariance lower the entropy most. The stopped tokens are drawn from those
    whose covariance is in [low, high].

    Exactly ceil(share * tokens) tokens are stopped, or all of the band if they are fewer: those with the
    smallest of the given random numbers. Departures: the paper rounds down, its code to at least one token.
    Its code also excludes tokens that the bounds of PPO stop already. Errors as in `top_share`.

    Args:
        covariances_K: the result of `covariances`, nats times the unit of advantages.
        uniforms_K: a random number for each token, in [0, 1).
        share: the share of all tokens, not only of those in the band; in [0, 1].
        low, high: bounds of the band, in the unit of the covariances. The defaults are the paper's.
        mask_K: 1 counts, 0 does not, and gives 1: nothing is stopped there; None: all tokens count.
    """
    mask_K = torch.ones_like(covariances_K) if mask_K is None else mask_K
    check_same_shape(covariances_K=covariances_K, uniforms_K=uniforms_K, mask_K=mask_K)
    in_band_K = (mask_K > 0) & (covariances_K >= low) & (covariances_K <= high)
    number = (share * (mask_K > 0).double().sum() - _ROUNDING).ceil()
    alone_K = torch.zeros(len(covariances_K), dtype=torch.long, device=covariances_K.device)
    rank_K = _rank_in_row(torch.where(in_band_K, uniforms_K, torch.inf), alone_K, 1)
    return (~(in_band_K & (rank_K < number))).to(covariances_K.dtype)


def _rank_in_row(values_K: torch.Tensor, row_of_K: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Return the place of each value in the ascending order of its row, from 0. Of equal values, earlier ones
    come first."""
    order_K = values_K.argsort(stable=True)
    order_K = order_K[row_of_K[order_K].argsort(stable=True)]
    counts_N = row_of_K.bincount(minlength=num_rows)
    begin_N = counts_N.cumsum(0) - counts_N
    place_K = torch.empty_like(order_K)
    place_K[order_K] = torch.arange(len(order_K), device=order_K.device)
    return place_K - begin_N[row_of_K]
