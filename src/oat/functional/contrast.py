"""More losses of pairs, in addition to `preference.py`, and the loss of KTO, which judges single responses.

EXO and DiscoPOP take the margin of `dpo_margin`. NCA, APO, SPPO and KTO take log-ratios: a response's
log-probability under the policy minus that under the reference. ORPO and CPO have no reference. All losses
are elementwise. Their axis `U` is that of pairs; KTO's is that of responses.

Every loss of pairs and its gradient are finite for log-probabilities down to -10,000 nats. Two formulas would
overflow as they stand in the papers. So the code rearranges the product of DiscoPOP, and clamps the
log-probabilities of ORPO at `ORPO_EPS`.
"""

import math

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import logsigmoid

from oat.functional._checks import check_same_shape
from oat.functional._sigmoid import sigmoid
from oat.functional.preference import dpo_loss

ORPO_EPS = 1e-6
"""Bound that keeps the odds of `orpo_loss` finite. A mean log-probability above -ORPO_EPS counts as
-ORPO_EPS."""


def exo_loss(margin_U: Float[Tensor, " U"], *, beta: float, label_smoothing: float) -> Float[Tensor, " U"]:
    """Return the loss of EXO on pairs, EXO-pref (arXiv:2402.00856, Eq. 16): the reverse KL divergence,
    KL(policy || label). The policy's distribution over the two responses of a pair is (q, 1 - q); the label
    is smoothed.

    term = q log(q / (1 - label_smoothing)) + (1 - q) log((1 - q) / label_smoothing),   q = sigmoid(beta h)

    The term has its minimum, 0, at beta h = log((1 - label_smoothing) / label_smoothing). Its gradient
    vanishes as q approaches 0 or 1. Computed in float64, since near the minimum its parts cancel.

    Args:
        margin_U: h of `dpo_margin`, nats.
        beta: the paper's beta_pi, positive.
        label_smoothing: probability that the smoothed label gives to the rejected response, in (0, 0.5).
    Returns:
        Unreduced terms, nats.
    """
    logits = beta * margin_U.double()
    chosen, rejected = logsigmoid(logits), logsigmoid(-logits)
    terms = chosen.exp() * (chosen - math.log1p(-label_smoothing)) + rejected.exp() * (
        rejected - math.log(label_smoothing)
    )
    return terms.to(margin_U.dtype)


def nca_loss(
    chosen_U: Float[Tensor, " U"], rejected_U: Float[Tensor, " U"], *, beta: float
) -> Float[Tensor, " U"]:
    """Return the loss of noise contrastive alignment on pairs, NCA-preference (arXiv:2402.05369). It compares
    each response with responses of the reference, which are the noise. It does not compare the two responses
    of a pair.

    term = - log sigmoid(r_chosen) - log sigmoid(-r_chosen) / 2 - log sigmoid(-r_rejected) / 2,
    r = beta times the log-ratio

    Args:
        chosen_U, rejected_U: log-ratios of the chosen and of the rejected responses, nats, with grad.
        beta: the paper's alpha, positive.
    Returns:
        Unreduced terms, nats.

    Raises:
        ShapeError: shapes disagree.
    """
    check_same_shape(chosen_U=chosen_U, rejected_U=rejected_U)
    chosen, rejected = beta * chosen_U, beta * rejected_U
    return -logsigmoid(chosen) - 0.5 * logsigmoid(-chosen) - 0.5 * logsigmoid(-rejected)


def apo_zero_loss(
    chosen_U: Float[Tensor, " U"], rejected_U: Float[Tensor, " U"], *, beta: float
) -> Float[Tensor, " U"]:
    """Return the loss of anchored preference optimisation, APO-zero (arXiv:2408.06266, Eq. 7). It raises the
    probability of the chosen response and lowers that of the rejected one.

    term = 1 - sigmoid(r_chosen) + sigmoid(r_rejected),   r = beta times the log-ratio

    Arguments and errors as in `nca_loss`, except that beta is the paper's beta. Terms have no unit and are in
    [0, 2].
    """
    check_same_shape(chosen_U=chosen_U, rejected_U=rejected_U)
    return sigmoid(-beta * chosen_U) + sigmoid(beta * rejected_U)


def apo_down_loss(
    chosen_U: Float[Tensor, " U"], rejected_U: Float[Tensor, " U"], *, beta: float
) -> Float[Tensor, " U"]:
    """Return the loss of anchored preference optimisation, APO-down (arXiv:2408.06266, Eq. 8). It lowers the
    probability of both responses, and that of the rejected one further.

    term = sigmoid(r_chosen) + 1 - sigmoid(r_chosen - r_rejected),   r = beta times the log-ratio

    Arguments and errors as in `apo_zero_loss`. Terms have no unit and are in [0, 2].
    """
    check_same_shape(chosen_U=chosen_U, rejected_U=rejected_U)
    return sigmoid(beta * chosen_U) + sigmoid(-beta * (chosen_U - rejected_U))


def sppo_hard_loss(
    chosen_U: Float[Tensor, " U"], rejected_U: Float[Tensor, " U"], *, beta: float
) -> Float[Tensor, " U"]:
    """Return the loss of self-play preference optimisation with hard labels (SPPO, arXiv:2405.00675, Eq. 4.7
    with win probabilities 1 and 0).

    term = (log-ratio of the chosen - 1 / (2 beta))^2 + (log-ratio of the rejected + 1 / (2 beta))^2

    Arguments and errors as in `nca_loss`, except that beta is the paper's 1 / eta. Terms are in nats squared.
    """
    check_same_shape(chosen_U=chosen_U, rejected_U=rejected_U)
    target = 0.5 / beta
    return (chosen_U - target).square() + (rejected_U + target).square()


def discopop_loss(margin_U: Float[Tensor, " U"], *, beta: float, tau: float) -> Float[Tensor, " U"]:
    """Return the loss of DiscoPOP, the log-ratio modulated loss (arXiv:2406.08414, Eq. 5). It is mostly
    logistic at negative margins, and mostly exponential at positive margins.

    term = - (1 - m) log sigmoid(beta h) + m exp(-beta h),   m = sigmoid(beta h / tau)

    The term is not convex: if tau is below about 0.1, it rises with h at h = 0. The product m exp(-beta h) is
    computed as one exponential. As a product in float32 it could be 0 times infinity, which is NaN.

    Args:
        margin_U: h of `dpo_margin`, nats.
        beta: positive.
        tau: width of the transition from the first part to the second, in (0, 1]. With a tau above 1 the
            second part would also grow exponentially at negative margins.
    Returns:
        Unreduced terms, nats.
    """
    logits = beta * margin_U
    return -torch.sigmoid(-logits / tau) * logsigmoid(logits) + (logsigmoid(logits / tau) - logits).exp()


def orpo_loss(chosen_U: Float[Tensor, " U"], rejected_U: Float[Tensor, " U"]) -> Float[Tensor, " U"]:
    """Return the odds ratio term of ORPO (arXiv:2403.07691, Eqs. 4 and 7). It has no reference.

    term = - log sigmoid(log odds(chosen) - log odds(rejected)),
    odds = p / (1 - p),   log p the mean log-probability per token

    A mean log-probability above -`ORPO_EPS` counts as -`ORPO_EPS` and gets no gradient.

    Args:
        chosen_U, rejected_U: mean log-probabilities per token of the chosen and of the rejected responses
            under the policy, nats, with grad.
    Returns:
        Unreduced terms, nats.

    Raises:
        ShapeError: shapes disagree.
    """
    check_same_shape(chosen_U=chosen_U, rejected_U=rejected_U)
    chosen, rejected = chosen_U.clamp(max=-ORPO_EPS), rejected_U.clamp(max=-ORPO_EPS)
    others = torch.log(-torch.expm1(chosen)) - torch.log(-torch.expm1(rejected))
    return -logsigmoid(chosen - rejected - others)


def cpo_loss(
    chosen_U: Float[Tensor, " U"], rejected_U: Float[Tensor, " U"], *, beta: float
) -> Float[Tensor, " U"]:
    """Return the preference term of CPO (arXiv:2401.08417, Eq. 3). It is the loss of DPO with a uniform
    reference.

    term = - log sigmoid(beta (chosen - rejected))

    Args:
        chosen_U, rejected_U: summed log-probabilities of the chosen and of the rejected responses under the
            policy, nats, with grad.
        beta: positive.
    Returns:
        Unreduced terms, nats.

    Raises:
        ShapeError: shapes disagree.
    """
    check_same_shape(chosen_U=chosen_U, rejected_U=rejected_U)
    return dpo_loss(chosen_U - rejected_U, beta=beta)


def kto_loss(
    ratio_U: Float[Tensor, " U"],
    is_desirable_U: Bool[Tensor, " U"],
    baseline_U: Float[Tensor, " U"],
    *,
    beta: float,
) -> Float[Tensor, " U"]:
    """Return the loss of KTO for single responses (arXiv:2402.01306, Eq. 7), without the paper's weights
    lambda.

    term = 1 - sigmoid(beta (ratio - baseline)) for a desirable response,
           1 - sigmoid(beta (baseline - ratio)) for an undesirable one

    Args:
        ratio_U: log-ratio of each response, nats, with grad.
        is_desirable_U: True for a desirable response, False for an undesirable one.
        baseline_U: the paper's z_0, an estimate of KL(policy || reference), nats, at least 0, no grad.
        beta: positive.
    Returns:
        Unreduced terms, without unit, in [0, 1].

    Raises:
        ShapeError: shapes disagree.
    """
    check_same_shape(ratio_U=ratio_U, is_desirable_U=is_desirable_U, baseline_U=baseline_U)
    above = beta * (ratio_U - baseline_U)
    # 0.0 * above makes the term NaN if the ratio is infinite
    return sigmoid(torch.where(is_desirable_U, -above, above)) + 0.0 * above


def rank_matches(first_U: Float[Tensor, " U"], second_U: Float[Tensor, " U"]) -> Int[Tensor, " U"]:
    """Return, for each value of `first_U`, the index of the value of `second_U` with the same rank (AOT,
    arXiv:2406.05882, Section 3).

    Matching by rank is the optimal transport between the two sets of values. AOT's loss is DPO's loss of each
    match. Equal values are ranked by their index.

    Returns:
        (U,) indices into `second_U`, each once.

    Raises:
        ShapeError: shapes disagree.
    """
    check_same_shape(first_U=first_U, second_U=second_U)
    places_U = torch.empty_like(first_U, dtype=torch.long)
    places_U[first_U.argsort(stable=True)] = second_U.argsort(stable=True)
    return places_U
