"""Returns and advantages of tokens. One flat tensor, (K,), has the trained tokens of all rows, row after row.
Tokens that are not trained, such as an environment's, are not in it: the token after one is the next trained
token of its row (conventions of PPO implementations differ here; some run through the gap).

The tokens are worked on in blocks of complete rows, because a block stays in the processor's cache.
"""

from collections.abc import Iterator
from itertools import pairwise

import torch
from jaxtyping import Float, Int
from torch import Tensor

from oat.functional._checks import check_same_shape

BLOCK_TOKENS = 2**18
"""Least number of tokens in a block, except the last."""
MOST_BLOCKS = 64
"""Largest number of blocks. If there are more tokens, blocks are larger."""
TILE = 32
"""Number of tokens in a tile of `_sums_of_even_rows`."""


def discounted_returns(
    rewards_K: Float[Tensor, " K"], row_of_K: Int[Tensor, " K"], num_rows: int, *, gamma: float
) -> Float[Tensor, " K"]:
    """Return the discounted sum of rewards from each token to the end of its row.

    R_t = r_t + gamma R_{t+1},   R after the last token = 0

    Args:
        rewards_K: any unit; the result has no gradient. Rows follow each other.
        row_of_K: index of the row of each token, in [0, num_rows), not decreasing.
        num_rows: N; rows may be without tokens.
        gamma: discount per token, in [0, 1].

    Raises:
        ShapeError: shapes disagree.
    """
    check_same_shape(rewards_K=rewards_K, row_of_K=row_of_K)
    returns_K = torch.empty_like(rewards_K)
    length = _even_length(row_of_K, num_rows)
    for block in _blocks(row_of_K):
        rewards = rewards_K.detach()[block]
        if length:
            _sums_of_even_rows(rewards.reshape(-1, length), gamma, returns_K[block].view(-1, length))
        else:
            row_of = row_of_K[block]
            returns_K[block] = _sums_of_rows(rewards.clone(), row_of[1:] == row_of[:-1], gamma)
    return returns_K


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
        values_K: the critic's value of the state before each token, in units of reward.
        lam: 0: one-step differences; 1: discounted returns minus values.
    """
    check_same_shape(rewards_K=rewards_K, values_K=values_K, row_of_K=row_of_K)
    advantages_K = torch.empty_like(rewards_K)
    scratch = torch.empty(0, dtype=rewards_K.dtype, device=rewards_K.device)
    length = _even_length(row_of_K, num_rows)
    for block in _blocks(row_of_K):
        values = values_K.detach()[block]
        scratch = scratch if len(scratch) >= len(values) else torch.empty_like(values)
        deltas = torch.sub(rewards_K.detach()[block], values, out=scratch[: len(values)])
        if length:
            deltas_NT = deltas.view(-1, length)
            deltas_NT[:, :-1].add_(values.reshape(-1, length)[:, 1:], alpha=gamma)
            _sums_of_even_rows(deltas_NT, gamma * lam, advantages_K[block].view(-1, length))
        else:
            row_of = row_of_K[block]
            joined = row_of[1:] == row_of[:-1]
            deltas[:-1].add_(torch.where(joined, values[1:], 0.0), alpha=gamma)
            advantages_K[block] = _sums_of_rows(deltas, joined, gamma * lam)
    return advantages_K


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
    return affine_scan(sums_NT, factors_NT)


def affine_scan(sums: Float[Tensor, "*shape"], factors: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Return the solution of x_t = sums_t + factors_t x_{t+1} along the last axis, with x after the end = 0.
    A factor of 0 ends a row, so a flat tensor may have several rows, and no row spoils another.

    Raises:
        ShapeError: shapes disagree.
    """
    check_same_shape(sums=sums, factors=factors)
    # compose the affine maps of t, t+1, ... by doubling: after n rounds each map spans 2^n steps
    span = 1
    while span < sums.shape[-1] and bool(factors.any()):
        later_sums = torch.nn.functional.pad(sums[..., span:], (0, span))
        later_factors = torch.nn.functional.pad(factors[..., span:], (0, span))
        sums = sums + torch.where(factors == 0, 0.0, factors * later_sums)
        factors = factors * later_factors
        span *= 2
    return sums


def _even_length(row_of_K: torch.Tensor, num_rows: int) -> int:
    """Return the number of tokens of each row if all rows have equally many, else 0."""
    length, rest = divmod(len(row_of_K), max(1, num_rows))
    if rest or not length:
        return 0
    rows_N = torch.arange(num_rows, device=row_of_K.device)
    is_even = (row_of_K[::length] == rows_N) & (row_of_K[length - 1 :: length] == rows_N)
    return length if bool(is_even.all()) else 0


def _blocks(row_of_K: torch.Tensor) -> Iterator[slice]:
    """Yield the tokens in blocks of complete rows."""
    tokens = len(row_of_K)
    wanted = torch.arange(0, tokens, max(BLOCK_TOKENS, -(-tokens // MOST_BLOCKS)), device=row_of_K.device)
    begins = torch.searchsorted(row_of_K.contiguous(), row_of_K[wanted]).unique().tolist()
    yield from (slice(begin, end) for begin, end in pairwise([*begins, tokens]))


def _sums_of_rows(values_K: torch.Tensor, joined_K: torch.Tensor, decay: float) -> torch.Tensor:
    """Return the sum over m >= k of decay^(m - k) values_m, over the tokens m of k's row. `joined_K` is True
    if the next token is of the same row; it has no number for the last token. `values_K` is overwritten.

    The sums are made by doubling: after n rounds, each token has the sum of its next 2^n tokens.
    """
    ends = (~torch.nn.functional.pad(joined_K, (0, 1))).nonzero()[:, 0]
    longest = int(torch.nn.functional.pad(ends + 1, (1, 0)).diff().max())
    spare_K, scratch_K = torch.empty_like(values_K), torch.empty_like(values_K)
    zero = values_K.new_zeros(())
    span = 1
    while span < longest:
        later_K = torch.where(joined_K, values_K[span:], zero, out=scratch_K[:-span])
        torch.add(values_K[:-span], later_K, alpha=decay**span, out=spare_K[:-span])
        spare_K[-span:] = values_K[-span:]
        joined_K = joined_K[:-span] & joined_K[span:]
        values_K, spare_K = spare_K, values_K
        span *= 2
    return values_K


def _sums_of_even_rows(values_NT: torch.Tensor, decay: float, out_NT: torch.Tensor) -> None:
    """Write the sum over m >= t of decay^(m - t) values_m, along the last axis, to `out_NT`.

    A product with a matrix gives the sums within tiles. The sums from the first token of each tile on are
    made in the same way, and a tile gets that of the next one.
    """
    num_rows, length = values_NT.shape
    tile = min(length, TILE)
    if length % tile:
        padded_NT = torch.nn.functional.pad(values_NT, (0, -length % tile))
        sums_NT = torch.empty_like(padded_NT)
        _sums_of_even_rows(padded_NT, decay, sums_NT)
        out_NT.copy_(sums_NT[:, :length])
        return
    place = torch.arange(tile, device=values_NT.device)
    distance = place[:, None] - place[None, :]
    rate = torch.tensor(float(decay), dtype=torch.float64, device=values_NT.device)
    powers = torch.where(distance >= 0, rate ** distance.clamp(min=0), 0.0).to(values_NT.dtype)
    torch.mm(values_NT.view(-1, tile), powers, out=out_NT.view(-1, tile))
    if length > tile:
        sums = out_NT.view(num_rows, -1, tile)
        firsts = sums[:, :, 0].contiguous()
        from_firsts = torch.empty_like(firsts)
        _sums_of_even_rows(firsts, decay**tile, from_firsts)
        to_end = (rate ** (tile - place)).to(values_NT.dtype)
        sums[:, :-1].addcmul_(from_firsts[:, 1:, None], to_end)
