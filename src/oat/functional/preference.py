"""Losses and probabilities of pairs.

A direct loss is a margin h, changed by a few options, and a function that is large where the margin is small.
All functions are elementwise over pairs, whose axis is `U`; `chosen` and `rejected` are the two responses of
a pair.
"""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import logsigmoid, relu

from oat.functional._checks import check_same_shape

BNF_EPS = 1e-6
"""Keeps the targets of `bnf_scores` finite where a probability is 0 or 1."""


def dpo_margin(
    policy_chosen_U: Float[Tensor, " U"],
    policy_rejected_U: Float[Tensor, " U"],
    reference_chosen_U: Float[Tensor, " U"],
    reference_rejected_U: Float[Tensor, " U"],
) -> Float[Tensor, " U"]:
    """The margin h of direct losses: the policy's preference for the chosen response over the rejected one,
    minus the reference's (arXiv:2305.18290, Eq. 7).

    h = (policy_chosen - policy_rejected) - (reference_chosen - reference_rejected)

    Args:
        policy_chosen_U, policy_rejected_U: log-probabilities of the two responses of each pair under the
            policy, nats, with grad; sums or means over tokens, as the loss wants.
        reference_chosen_U, reference_rejected_U: the same under the reference, no grad.
    Returns:
        (U,) nats.

    Raises:
        ShapeError: shapes disagree.
    """
    check_same_shape(
        policy_chosen_U=policy_chosen_U,
        policy_rejected_U=policy_rejected_U,
        reference_chosen_U=reference_chosen_U,
        reference_rejected_U=reference_rejected_U,
    )
    return (policy_chosen_U - policy_rejected_U) - (reference_chosen_U - reference_rejected_U)


def length_margin(
    margin_U: Float[Tensor, " U"],
    chosen_length_U: Float[Tensor, " U"],
    rejected_length_U: Float[Tensor, " U"],
    *,
    alpha: float,
    beta: float,
) -> Float[Tensor, " U"]:
    """The margin of DPO against a reward that pays `alpha` less a token (length-regularised DPO,
    arXiv:2403.19159, Eq. 9).

    h' = h + (alpha / beta) (chosen_length - rejected_length),
    so that beta h' = beta h + alpha (chosen_length - rejected_length)

    A longer chosen response starts ahead, and is pushed less.

    Args:
        margin_U: h of `dpo_margin` from summed log-probabilities, nats.
        chosen_length_U, rejected_length_U: trained tokens of the responses.
        alpha: nats a token.
        beta: that of the loss.

    Raises:
        ShapeError: shapes disagree.
    """
    check_same_shape(margin_U=margin_U, chosen_length_U=chosen_length_U, rejected_length_U=rejected_length_U)
    return margin_U + (alpha / beta) * (chosen_length_U - rejected_length_U)


def positive_margin(
    margin_U: Float[Tensor, " U"],
    policy_chosen_U: Float[Tensor, " U"],
    reference_chosen_U: Float[Tensor, " U"],
    *,
    weight: float,
    rounding_U: Float[Tensor, " U"] | None = None,
) -> Float[Tensor, " U"]:
    """The margin of DPO-Positive (arXiv:2402.13228, Eq. 3): it is smaller where the chosen response has
    become less probable than under the reference.

    h' = h - weight max(0, reference_chosen - policy_chosen)

    Where the two are equal, as at the start of every run, the second term has no gradient: only a chosen
    response that has fallen below the reference is pulled back. Departure: a fall of at most `rounding_U`
    does not count, since two passes of the same weights differ by rounding.

    Args:
        margin_U: h of `dpo_margin`, nats.
        policy_chosen_U, reference_chosen_U: log-probabilities of the chosen responses as `dpo_margin` got
        them, nats.
        weight: the paper's lambda, at least 0.
        rounding_U: how far the two log-probabilities may be apart by rounding, nats; None: 0.

    Raises:
        ShapeError: shapes disagree.
    """
    rounding_U = torch.zeros_like(policy_chosen_U) if rounding_U is None else rounding_U
    check_same_shape(
        margin_U=margin_U,
        policy_chosen_U=policy_chosen_U,
        reference_chosen_U=reference_chosen_U,
        rounding_U=rounding_U,
    )
    fallen_U = reference_chosen_U - policy_chosen_U
    return margin_U - weight * torch.where(fallen_U > rounding_U, fallen_U, 0.0)


def simpo_margin(
    policy_chosen_U: Float[Tensor, " U"], policy_rejected_U: Float[Tensor, " U"], *, gamma_beta_ratio: float
) -> Float[Tensor, " U"]:
    """The margin of SimPO, which has no reference (arXiv:2405.14734, Eq. 6, divided by beta).

    h = policy_chosen - policy_rejected - gamma_beta_ratio

    Args:
        policy_chosen_U, policy_rejected_U: mean log-probabilities a token of the responses under the policy,
        nats, with grad.
        gamma_beta_ratio: the paper's target margin gamma over beta, nats.

    Raises:
        ShapeError: shapes disagree.
    """
    check_same_shape(policy_chosen_U=policy_chosen_U, policy_rejected_U=policy_rejected_U)
    return policy_chosen_U - policy_rejected_U - gamma_beta_ratio


def dpo_loss(
    margin_U: Float[Tensor, " U"], *, beta: float, label_smoothing: float = 0.0
) -> Float[Tensor, " U"]:
    """DPO (arXiv:2305.18290, Eq. 7) with smoothed labels (cDPO, E. Mitchell, ericmitchell.ai/cdpo.pdf); with
    `simpo_margin`, SimPO.

    term = - (1 - label_smoothing) log sigmoid(beta h) - label_smoothing log sigmoid(-beta h)

    Args:
        margin_U: h of `dpo_margin`, nats.
        beta: strength of the tie to the reference, positive.
        label_smoothing: probability that a label is wrong, in [0, 0.5).
    Returns:
        Unreduced terms, nats.
    """
    logits = beta * margin_U
    return -(1.0 - label_smoothing) * logsigmoid(logits) - label_smoothing * logsigmoid(-logits)


def robust_dpo_loss(
    margin_U: Float[Tensor, " U"], *, beta: float, label_smoothing: float
) -> Float[Tensor, " U"]:
    """Robust DPO (arXiv:2403.00409): its mean over labels flipped with probability `label_smoothing` is the
    loss of DPO on the right labels.

    term = (- (1 - label_smoothing) log sigmoid(beta h) + label_smoothing log sigmoid(-beta h))
           / (1 - 2 label_smoothing)

    Arguments and units as in `dpo_loss`. Not bounded below as soon as label_smoothing is positive.
    """
    logits = beta * margin_U
    return (-(1.0 - label_smoothing) * logsigmoid(logits) + label_smoothing * logsigmoid(-logits)) / (
        1.0 - 2.0 * label_smoothing
    )


def ipo_loss(margin_U: Float[Tensor, " U"], *, beta: float) -> Float[Tensor, " U"]:
    """IPO (arXiv:2310.12036, Eq. 17): it draws the margin to 1 / (2 beta), from both sides.

    term = (h - 1 / (2 beta))^2

    Args:
        margin_U: h of `dpo_margin`, nats.
        beta: the paper's tau, positive.
    Returns:
        Unreduced terms, nats squared.
    """
    return (margin_U - 1.0 / (2.0 * beta)).square()


def hinge_loss(margin_U: Float[Tensor, " U"], *, beta: float) -> Float[Tensor, " U"]:
    """The hinge of SLiC (SLiC-HF, arXiv:2305.10425, its calibration term) on a margin times beta; 0, and
    without gradient, as soon as beta h reaches 1.

    term = max(0, 1 - beta h)

    Departure: the margin is corrected by the reference, as in RSO (arXiv:2309.06657, Section 3); SLiC-HF's
    own is not.

    Args:
        margin_U: h of `dpo_margin` or `simpo_margin`, nats.
        beta: positive.
    Returns:
        Unreduced terms, without unit.
    """
    return relu(1.0 - beta * margin_U)


def bnf_scores(
    logps_K: Float[Tensor, " K"], reference_logps_K: Float[Tensor, " K"], entropy_K: Float[Tensor, " K"]
) -> Float[Tensor, " K"]:
    """Score of each token in the bidirectional negative feedback loss (arXiv:2410.04834).

    With p = exp(logps), q = exp(reference_logps), pi_v the policy's probability of token v, and sg for a
    stopped gradient:

        tau   = sg(min(1, p / (q + eps)))              the target of the sampled token
        omega = sg((1 - tau + eps) / (1 - p + eps))    the target of every other token, in units of its own
                                                       probability
        rest  = sum over v of sg(pi_v) log pi_v - sg(p) log p
        score = tau log p + omega rest,   eps = 1e-6

    The sum over v has no gradient: sum of sg(pi_v) grad log pi_v = grad of the sum of pi_v = 0. Its value is
    minus the entropy, which is all that is needed of the vocabulary, and the gradient of a score is
    (tau - omega p) grad log p. For p >= q that is the gradient of the log-likelihood. For p < q it falls as
    p / q (1 - q) / (1 - p), which is 1 at p = q too, so the gradient has no jump, and the feedback on a
    rejected token dies out as its probability does.

    Args:
        logps_K: raw log-probabilities of the trained tokens under the policy, nats, with grad.
        reference_logps_K: the same under the reference, no grad.
        entropy_K: entropy of the policy at each of them, raw, nats; its gradient is not used.
    Returns:
        (K,) nats.

    Raises:
        ShapeError: shapes disagree.
    """
    check_same_shape(logps_K=logps_K, reference_logps_K=reference_logps_K, entropy_K=entropy_K)
    frozen_K = logps_K.detach()
    p_K, others_K = frozen_K.exp(), -torch.expm1(frozen_K)
    tau_K = (p_K / (reference_logps_K.exp() + BNF_EPS)).clamp(max=1)
    omega_K = (1 - tau_K + BNF_EPS) / (others_K + BNF_EPS)
    return tau_K * logps_K + omega_K * (-entropy_K.detach() - p_K * logps_K)


def bnf_loss(
    chosen_U: Float[Tensor, " U"],
    rejected_U: Float[Tensor, " U"],
    chosen_length_U: Float[Tensor, " U"],
    rejected_length_U: Float[Tensor, " U"],
    *,
    own_length: bool = False,
) -> Float[Tensor, " U"]:
    """The bidirectional negative feedback loss of pairs (arXiv:2410.04834).

    term = rejected / n - chosen / n,   n the length of the pair's shorter response

    Args:
        chosen_U, rejected_U: sums of `bnf_scores` over the tokens of the responses, nats, with grad.
        chosen_length_U, rejected_length_U: trained tokens of the responses, no grad; 0 counts as 1.
        own_length: divide each response by its own length instead.
    Returns:
        Unreduced terms, nats a token.

    Raises:
        ShapeError: shapes disagree.
    """
    check_same_shape(
        chosen_U=chosen_U,
        rejected_U=rejected_U,
        chosen_length_U=chosen_length_U,
        rejected_length_U=rejected_length_U,
    )
    shorter_U = torch.minimum(chosen_length_U, rejected_length_U)
    chosen_by_U, rejected_by_U = (
        (chosen_length_U, rejected_length_U) if own_length else (shorter_U, shorter_U)
    )
    return rejected_U / rejected_by_U.clamp(min=1) - chosen_U / chosen_by_U.clamp(min=1)


def bradley_terry(difference: Float[Tensor, "*shape"], *, scale: float = 1.0) -> Float[Tensor, "*shape"]:
    """Probability that the first of two wins: sigmoid((score_first - score_second) / scale) (Bradley and
    Terry, Biometrika 39, 1952).

    Args:
        difference: score of the first minus score of the second; any shape.
        scale: the difference at which the odds are e to 1, positive, in units of the score.
    """
    return torch.sigmoid(difference / scale)
