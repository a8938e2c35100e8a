"""Losses and probabilities of pairs.

A direct loss is a function of a margin h: the more the policy prefers the chosen response, the higher is h.
Options may change the margin before the loss is computed. Tensors with the axis `U` have one value for each
pair; `chosen` and `rejected` are the two responses of a pair.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import logsigmoid, relu

from oat.functional._checks import check_same_shape

BNF_EPS = 1e-6
"""Number added in the targets of `bnf_scores`, so that they are finite if a probability is 0 or 1."""


def dpo_margin(
    policy_chosen_U: Float[Tensor, " U"],
    policy_rejected_U: Float[Tensor, " U"],
    reference_chosen_U: Float[Tensor, " U"],
    reference_rejected_U: Float[Tensor, " U"],
) -> Float[Tensor, " U"]:
    """Return the margin h of direct losses: the policy's preference for the chosen response over the rejected
    one, minus the reference's preference (arXiv:2305.18290, Eq. 7).

    h = (policy_chosen - policy_rejected) - (reference_chosen - reference_rejected)

    Args:
        policy_chosen_U, policy_rejected_U: log-probabilities of the chosen and of the rejected responses
            under the policy, nats, with grad. The loss decides if they are sums or means over a response's
            tokens.
        reference_chosen_U, reference_rejected_U: the same log-probabilities under the reference, no grad.
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
    """Return the margin of length-regularised DPO (arXiv:2403.19159, Eq. 9). The policy is to maximise the
    reward minus `alpha` per token. So the implicit reward is that of DPO plus alpha * length.

    h' = h + (alpha / beta) (chosen_length - rejected_length),
    so that beta h' = beta h + alpha (chosen_length - rejected_length)

    If the chosen response is the longer one, the pair's margin starts higher, and the loss raises it less.

    Args:
        margin_U: h of `dpo_margin` from summed log-probabilities, nats.
        chosen_length_U, rejected_length_U: number of trained tokens of each response.
        alpha: nats per token.
        beta: the beta of the loss that takes the margin.

    Raises:
        ShapeError: shapes disagree.
    """
    check_same_shape(margin_U=margin_U, chosen_length_U=chosen_length_U, rejected_length_U=rejected_length_U)
    return margin_U + (alpha / beta) * (chosen_length_U - rejected_length_U)


def length_desensitised(
    logps_K: Float[Tensor, " K"], row_of_K: Int[Tensor, " K"], num_rows: int, *, alpha: float
) -> Float[Tensor, " K"]:
    """Return the log-probabilities of tokens as they count in length-desensitised DPO (LD-DPO,
    arXiv:2409.06411, Section 4): those beyond the length of the pair's shorter response are multiplied by
    alpha. The log-probability of a response is their sum.

    out_t = logps_t for the first n tokens of a row, alpha logps_t for the others,
    n the number of tokens of the pair's shorter response

    With alpha = 0 a long response has no larger gradient for its length alone. With alpha = 1 all tokens
    count fully, as in DPO.

    Args:
        logps_K: log-probabilities of the trained tokens, nats; the gradient flows back to them. The tokens of
            a row follow each other.
        row_of_K: index of the row of each token, in [0, num_rows). Rows 2u and 2u + 1 are a pair.
        num_rows: N, even.
        alpha: in [0, 1].

    Raises:
        ShapeError: shapes disagree.
    """
    check_same_shape(logps_K=logps_K, row_of_K=row_of_K)
    shorter_U = row_of_K.bincount(minlength=num_rows).view(-1, 2).amin(1)
    at_K = torch.arange(len(row_of_K), device=row_of_K.device)
    first_N = at_K.new_full((num_rows,), len(at_K)).scatter_reduce(0, row_of_K, at_K, "amin")
    is_shared_K = at_K - first_N[row_of_K] < shorter_U[row_of_K // 2]
    return torch.where(is_shared_K, logps_K, alpha * logps_K)


def positive_margin(
    margin_U: Float[Tensor, " U"],
    policy_chosen_U: Float[Tensor, " U"],
    reference_chosen_U: Float[Tensor, " U"],
    *,
    weight: float,
    rounding_U: Float[Tensor, " U"] | None = None,
) -> Float[Tensor, " U"]:
    """Return the margin of DPO-Positive (arXiv:2402.13228, Eq. 3). It is lower than h if the chosen response
    is less probable under the policy than under the reference.

    h' = h - weight max(0, reference_chosen - policy_chosen)

    While the policy equals the reference, the second term has no gradient. Departure: a difference of at most
    `rounding_U` counts as 0, since two passes of the same weights differ by rounding.

    Args:
        margin_U: h of `dpo_margin`, nats.
        policy_chosen_U, reference_chosen_U: the arguments of `dpo_margin` with these names, nats.
        weight: the paper's lambda, at least 0.
        rounding_U: largest difference of the two log-probabilities from rounding alone, nats; None: 0.

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
    """Return the margin of SimPO (arXiv:2405.14734, Eq. 6, divided by beta). It has no reference.

    h = policy_chosen - policy_rejected - gamma_beta_ratio

    Args:
        policy_chosen_U, policy_rejected_U: mean log-probabilities per token of the chosen and of the rejected
            responses under the policy, nats, with grad.
        gamma_beta_ratio: the paper's target margin gamma, divided by beta, nats.

    Raises:
        ShapeError: shapes disagree.
    """
    check_same_shape(policy_chosen_U=policy_chosen_U, policy_rejected_U=policy_rejected_U)
    return policy_chosen_U - policy_rejected_U - gamma_beta_ratio


def dpo_loss(
    margin_U: Float[Tensor, " U"], *, beta: float, label_smoothing: float = 0.0
) -> Float[Tensor, " U"]:
    """Return the loss of DPO (arXiv:2305.18290, Eq. 7) with smoothed labels (cDPO, E. Mitchell,
    ericmitchell.ai/cdpo.pdf). With the margin of `simpo_margin` it is the loss of SimPO.

    term = - (1 - label_smoothing) log sigmoid(beta h) - label_smoothing log sigmoid(-beta h)

    Args:
        margin_U: h of `dpo_margin`, or of another function of this module that returns a margin, nats.
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
    """Return the loss of robust DPO (arXiv:2403.00409). If labels are flipped with probability
    `label_smoothing`, its expectation is the loss of DPO on the labels before the flips.

    term = (- (1 - label_smoothing) log sigmoid(beta h) + label_smoothing log sigmoid(-beta h))
           / (1 - 2 label_smoothing)

    Arguments and units as in `dpo_loss`. If `label_smoothing` is positive, the loss has no lower bound.
    """
    logits = beta * margin_U
    return (-(1.0 - label_smoothing) * logsigmoid(logits) + label_smoothing * logsigmoid(-logits)) / (
        1.0 - 2.0 * label_smoothing
    )


def ipo_loss(margin_U: Float[Tensor, " U"], *, beta: float) -> Float[Tensor, " U"]:
    """Return the loss of IPO (arXiv:2310.12036, Eq. 17). It draws the margin towards 1 / (2 beta), from below
    and from above.

    term = (h - 1 / (2 beta))^2

    Args:
        margin_U: h of `dpo_margin`, nats.
        beta: the paper's tau, positive.
    Returns:
        Unreduced terms, nats squared.
    """
    return (margin_U - 1.0 / (2.0 * beta)).square()


def hinge_loss(margin_U: Float[Tensor, " U"], *, beta: float) -> Float[Tensor, " U"]:
    """Return the hinge loss of SLiC (the calibration term of SLiC-HF, arXiv:2305.10425) on beta times the
    margin.

    term = max(0, 1 - beta h)

    If beta h is at least 1, the term is 0 and has no gradient. Departure: the h of `dpo_margin` is relative
    to the reference, as in RSO (arXiv:2309.06657, Section 3). The margin of SLiC-HF is not.

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
    """Return the score of each token in the bidirectional negative feedback loss (arXiv:2410.04834).

    With p = exp(logps), q = exp(reference_logps), pi_v the policy's probability of token v, and sg for a
    stopped gradient:

        tau   = sg(min(1, p / (q + eps)))              the target of the sampled token
        omega = sg((1 - tau + eps) / (1 - p + eps))    the target of every other token, in units of its own
                                                       probability
        rest  = sum over v of sg(pi_v) log pi_v - sg(p) log p
        score = tau log p + omega rest,   eps = 1e-6

    The sum over v equals minus the entropy, and has no gradient, since the probabilities add up to 1. The
    gradient of a score is (tau - omega p) grad log p, where, up to eps:
    * if p >= q, the factor is 1: the gradient is that of the log-likelihood;
    * if p < q, the factor is p / q (1 - q) / (1 - p). It goes to 0 with p, so an improbable rejected token is
      hardly pushed down further.

    Args:
        logps_K: raw log-probabilities of the trained tokens under the policy, nats, with grad.
        reference_logps_K: raw log-probabilities of the same tokens under the reference, nats, no grad.
        entropy_K: entropy of the policy's raw distribution at each token, nats; its gradient is not used.
    Returns:
        (K,) nats.

    Raises:
        ShapeError: shapes disagree.
    """
    check_same_shape(logps_K=logps_K, reference_logps_K=reference_logps_K, entropy_K=entropy_K)
    # in float32, 1 - tau and tau - omega p would lose their digits where p and q are near 1
    frozen_K = logps_K.detach().double()
    p_K, others_K = frozen_K.exp(), -torch.expm1(frozen_K)
    tau_K = (p_K / (reference_logps_K.double().exp() + BNF_EPS)).clamp(max=1)
    omega_K = (1 - tau_K + BNF_EPS) / (others_K + BNF_EPS)
    scores_K = (tau_K - omega_K * p_K) * logps_K.double() - omega_K * entropy_K.detach().double()
    return scores_K.to(logps_K.dtype)


def bnf_loss(
    chosen_U: Float[Tensor, " U"],
    rejected_U: Float[Tensor, " U"],
    chosen_length_U: Float[Tensor, " U"],
    rejected_length_U: Float[Tensor, " U"],
    *,
    own_length: bool = False,
) -> Float[Tensor, " U"]:
    """Return the bidirectional negative feedback loss of pairs (arXiv:2410.04834).

    term = rejected / n - chosen / n,   n the length of the pair's shorter response

    Args:
        chosen_U, rejected_U: sums of `bnf_scores` over the trained tokens of the chosen and of the rejected
            responses, nats, with grad.
        chosen_length_U, rejected_length_U: number of trained tokens of each response, no grad; 0 counts as 1.
        own_length: divide each response's sum by its own length instead of n.
    Returns:
        Unreduced terms, nats per token.

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
    """Return the probability that the first of two responses wins, sigmoid((score_first - score_second) /
    scale) (Bradley and Terry, Biometrika 39, 1952).

    Args:
        difference: score of the first minus score of the second response; any shape.
        scale: the difference of scores at which the odds are e to 1, positive, in units of the score.
    """
    return torch.sigmoid(difference / scale)
