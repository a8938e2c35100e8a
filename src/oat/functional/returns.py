"""Returns and advantages of tokens. One flat tensor, (K,), has the trained tokens of all rows, row after row.
Tokens that are not trained, such as an environment's, are not in it: the token after one is the next trained
token of its row (conventions of PPO implementations differ here; some run through the gap)."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from oat.functional._checks import check_same_shape

BLOCK = 64
"""Tokens of a block. Within a block, sums are products with a matrix; between blocks they are carried."""


def discounted_returns(
    rewards_K: Float[Tensor, " K"], row_of_K: Int[Tensor, " K"], num_rows: int, *, gamma: float
) -> Float[Tensor, " K"]:
    """Return the discounted sum of rewards from each token to the end of its row.

    R_t = r_t + gamma R_{t+1},   R after the last token = 0

    Args:
        rewards_K: any unit, no gradient needed. Rows follow each other.
        row_of_K: index of the row of each token, in [0, num_rows), not decreasing.
        num_rows: N; rows may be without tokens.
        gamma: discount per token, in [0, 1].

    Raises:
        ShapeError: shapes disagree.
    """
    check_same_shape(rewards_K=rewards_K, row_of_K=row_of_K)
    lengths_N = row_of_K.bincount(minlength=num_rows)
    longest = int(lengths_N.max()) if len(row_of_K) else 0
    # the last token of every row is in the last column
    column_K = longest - (lengths_N.cumsum(0)[row_of_K] - torch.arange(len(row_of_K), device=row_of_K.device))
    dense_NL = rewards_K.new_zeros((num_rows, longest))
    dense_NL[row_of_K, column_K] = rewards_K
    return _decayed_sums(dense_NL, gamma)[row_of_K, column_K]


def gae(
    rewards_K: Float[Tensor, " K"],
    values_K: Float[Tensor, " K"],
    row_of_K: Int[Tensor, " K"],
    num_rows: int,
    *,
    gamma: float,
    lam: float,
) -> Float[Tensor, " K"]:
    """Return generalised advantage estimates (arXiv:1506.02438, Eq. 16).

    d_t = r_t + gamma V_{t+1} - V_t,   A_t = d_t + gamma lam A_{t+1},   V and A after the last token = 0

    The targets of the critic are A + V. Arguments and errors as in `discounted_returns`.

    Args:
        values_K: the critic's value of the state before each token, in units of reward, no gradient needed.
        lam: 0: one-step differences; 1: discounted returns minus values.
    """
    check_same_shape(rewards_K=rewards_K, values_K=values_K, row_of_K=row_of_K)
    next_K = torch.zeros_like(values_K)
    next_K[:-1] = torch.where(row_of_K[1:] == row_of_K[:-1], values_K[1:], 0.0)
    deltas_K = rewards_K + gamma * next_K - values_K
    return discounted_returns(deltas_K, row_of_K, num_rows, gamma=gamma * lam)


def lambda_returns(
    rewards_NT: Float[Tensor, "N T"],
    discounts_NT: Float[Tensor, "N T"],
    values_NT: Float[Tensor, "N T"],
    lam: float | Float[Tensor, "N T"],
) -> Float[Tensor, "N T"]:
    """Return lambda returns (Sutton and Barto, Reinforcement Learning, Section 12.1).

    G_t = r_{t+1} + g_{t+1} ((1 - lam_{t+1}) v_{t+1} + lam_{t+1} G_{t+1}),   G_T = v_T

    The result has G_0 to G_{T-1}. Column t of the arguments has r_{t+1}, g_{t+1}, v_{t+1} and lam_{t+1}, so a
    value is that of the state *after* its reward. With lam = 1 the result is the discounted sum with v_T at
    its end; with lam = 0 it is r + g v. For V-trace (arXiv:1802.01561) give lam times min(1, ratio).

    Raises:
        ShapeError: shapes disagree.
    """
    lam_NT = torch.full_like(rewards_NT, lam) if isinstance(lam, float | int) else lam
    check_same_shape(rewards_NT=rewards_NT, discounts_NT=discounts_NT, values_NT=values_NT, lam_NT=lam_NT)
    if not rewards_NT.shape[1]:
        return rewards_NT.clone()
    sums_NT = rewards_NT + discounts_NT * (1 - lam_NT) * values_NT
    factors_NT = discounts_NT * lam_NT
    sums_NT[:, -1] = rewards_NT[:, -1] + discounts_NT[:, -1] * values_NT[:, -1]
    factors_NT[:, -1] = 0.0
    # compose the affine maps of t, t+1, ... by doubling: after n rounds each map spans 2^n steps
    span = 1
    while span < rewards_NT.shape[1]:
        later_sums = torch.nn.functional.pad(sums_NT[:, span:], (0, span))
        later_factors = torch.nn.functional.pad(factors_NT[:, span:], (0, span))
        sums_NT = sums_NT + factors_NT * later_sums
        factors_NT = factors_NT * later_factors
        span *= 2
    return sums_NT


def _decayed_sums(values_NL: torch.Tensor, decay: float) -> torch.Tensor:
    """Return sum over m >= l of decay^(m - l) values_m, along the last axis."""
    num_rows, length = values_NL.shape
    if not length:
        return values_NL
    blocks = -(-length // BLOCK)
    padded = torch.nn.functional.pad(values_NL, (0, blocks * BLOCK - length)).view(num_rows, blocks, BLOCK)
    place = torch.arange(BLOCK, device=values_NL.device)
    distance = place[:, None] - place[None, :]
    rate = torch.tensor(float(decay), dtype=torch.float64)
    powers = torch.where(distance >= 0, rate ** distance.clamp(min=0), 0.0)
    within = padded @ powers.to(values_NL)
    carried = torch.zeros_like(within)
    total = torch.zeros_like(within[:, 0, 0])
    for block in reversed(range(blocks)):
        carried[:, block] = total[:, None]
        total = within[:, block, 0] + decay**BLOCK * total
    to_end = (rate ** (BLOCK - place)).to(values_NL)
    return (within + carried * to_end).view(num_rows, -1)[:, :length]
