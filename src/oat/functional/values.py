"""The loss of a critic, targets of its values for tokens that another policy sampled (V-trace), and values of
steps without a critic (VinePPO)."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from oat.functional._checks import check_same_shape
from oat.functional.returns import affine_scan


def clipped_value_loss(
    values: Float[Tensor, "*shape"],
    old_values: Float[Tensor, "*shape"],
    targets: Float[Tensor, "*shape"],
    *,
    clip: float | None,
) -> tuple[Float[Tensor, "*shape"], Float[Tensor, "*shape"]]:
    """Return the terms of the critic's loss, with the clip of PPO's first implementation (OpenAI baselines;
    arXiv:1707.06347 does not mention it).

    term = max((V - G)^2, (clip(V, V_old - clip, V_old + clip) - G)^2) / 2

    The clip stops the gradient of a value that has come closer to its target by more than `clip` since
    `prepare`. A value that moves away keeps its gradient. The function is elementwise; all tensors have the
    same shape, usually (K,) trained tokens. The learner reduces: TRL takes the mean over tokens, the older
    package `oat-llm` the mean over rows of means over tokens.

    Args:
        values: the critic's values, in units of reward, with grad.
        old_values: its values at `prepare`, no grad.
        targets: returns G, no grad.
        clip: how far a value may move, in units of reward, positive; None: there is no clip.
    Returns:
        Unreduced terms, in units of reward squared; and for each token 1 if the clip decides its term, else
        0. If the two squares are equal, it is 0.

    Raises:
        ShapeError: shapes disagree.
    """
    check_same_shape(values=values, old_values=old_values, targets=targets)
    free = (values - targets).square()
    if clip is None:
        return 0.5 * free, torch.zeros_like(free)
    bounded = (values.clamp(old_values - clip, old_values + clip) - targets).square()
    is_bounded = bounded > free
    return 0.5 * torch.where(is_bounded, bounded, free), is_bounded.to(free.dtype)


def vtrace(
    rewards_K: Float[Tensor, " K"],
    values_K: Float[Tensor, " K"],
    ratios_K: Float[Tensor, " K"],
    row_of_K: Int[Tensor, " K"],
    *,
    gamma: float,
    lam: float = 1.0,
    max_ratio: float = 1.0,
    max_trace: float = 1.0,
) -> tuple[Float[Tensor, " K"], Float[Tensor, " K"], Float[Tensor, " K"]]:
    """Return V-trace targets of the values, advantages and weights (IMPALA, arXiv:1802.01561, Eq. 1 and
    Section 4.2), for tokens that an older policy sampled.

    rho_t = min(ratio_t, max_ratio),   c_t = lam min(ratio_t, max_trace)
    e_t = rho_t (r_t + gamma V_{t+1} - V_t) + gamma c_t e_{t+1},   V and e after the last token = 0
    target_t = V_t + e_t
    A_t = r_t + gamma (V_{t+1} + lam e_{t+1}) - V_t

    The policy gradient weighs the term of A_t by rho_t. Advantages are whitened before that. `lam` is that of
    the paper's Remark 2.
    With ratios of 1, the advantages are those of `gae`, and the targets are their sum with the values. The
    tokens of each row follow each other, as in `discounted_returns`; the next token is the row's next
    trained token.

    Args:
        rewards_K: any unit; the results have no gradient.
        values_K: the critic's value of the state before each token, in units of reward.
        ratios_K: probability of each token under the policy, divided by that under the sampler.
        row_of_K: index of the row of each token, not decreasing.
        gamma: discount per token, in [0, 1].
        lam: 0: one-step targets; 1: those of the paper's Eq. 1.
        max_ratio: bound of the ratios that weigh differences (the paper's rho-bar); not below `max_trace`.
        max_trace: bound of the ratios that carry later differences back (the paper's c-bar).
    Returns:
        (K,) targets, (K,) advantages and (K,) weights rho.

    Raises:
        ShapeError: shapes disagree.
    """
    check_same_shape(rewards_K=rewards_K, values_K=values_K, ratios_K=ratios_K, row_of_K=row_of_K)
    rewards_K, values_K, ratios_K = rewards_K.detach(), values_K.detach(), ratios_K.detach()
    joined_K = row_of_K[1:] == row_of_K[:-1]
    rho_K = ratios_K.clamp(max=max_ratio)
    traces_K = torch.zeros_like(ratios_K)
    traces_K[:-1] = torch.where(joined_K, gamma * lam * ratios_K[:-1].clamp(max=max_trace), 0.0)
    one_step_K = rewards_K + gamma * _next(values_K, joined_K) - values_K
    errors_K = affine_scan(rho_K * one_step_K, traces_K)
    advantages_K = one_step_K + gamma * lam * _next(errors_K, joined_K)
    return values_K + errors_K, advantages_K, rho_K


def monte_carlo_values(
    returns_SG: Float[Tensor, "S G"], valid_SG: Bool[Tensor, "S G"] | None = None
) -> Float[Tensor, " S"]:
    """Return the value of each state: the mean of the returns of responses that were sampled from it
    (VinePPO, arXiv:2410.01679, Section 4). The mean is unbiased, whereas a critic's value need not be.

    S counts states: the beginnings of the steps of all rows, row after row.

    Args:
        returns_SG: the return of each continuation, any unit; may be NaN where `valid_SG` is False.
        valid_SG: False where a state has no such continuation, or its return is missing; None: all are there.
    Returns:
        (S,) values; NaN for a state without any valid continuation.

    Raises:
        ShapeError: shapes disagree.
    """
    valid_SG = torch.ones_like(returns_SG, dtype=torch.bool) if valid_SG is None else valid_SG
    check_same_shape(returns_SG=returns_SG, valid_SG=valid_SG)
    totals_S = torch.where(valid_SG, returns_SG, 0.0).sum(1)
    return totals_S / valid_SG.sum(1)


def step_advantages(
    rewards_S: Float[Tensor, " S"],
    values_S: Float[Tensor, " S"],
    row_of_S: Int[Tensor, " S"],
    *,
    gamma: float = 1.0,
) -> Float[Tensor, " S"]:
    """Return the advantage of each step of the responses (VinePPO, arXiv:2410.01679, Section 4).

    A_s = r_s + gamma V(next state) - V(this state),   V after the last step = 0

    All tokens of a step have its advantage. These are the one-step differences of `returns.gae`, over steps
    instead of tokens. An advantage is NaN if one of its two values is.

    Args:
        rewards_S: the reward of each step; a reward of the response belongs to its last step.
        values_S: the value of the state before each step, in units of reward, as of `monte_carlo_values`.
        row_of_S: index of the row of each step, not decreasing.
        gamma: discount per step, in [0, 1]; the paper's is 1.

    Raises:
        ShapeError: shapes disagree.
    """
    check_same_shape(rewards_S=rewards_S, values_S=values_S, row_of_S=row_of_S)
    return rewards_S + gamma * _next(values_S, row_of_S[1:] == row_of_S[:-1]) - values_S


def _next(values_K: torch.Tensor, joined_K: torch.Tensor) -> torch.Tensor:
    """Return the value of the next token of the row; 0 at the end of a row. `joined_K` says for each token
    but the last whether the next one is of its row."""
    next_K = torch.zeros_like(values_K)
    next_K[:-1] = torch.where(joined_K, values_K[1:], 0.0)
    return next_K
