"""Losses and probabilities of pairs."""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import logsigmoid

from oat.functional._checks import check_same_shape


def dpo_margin(
    policy_chosen_U: Float[Tensor, " U"],
    policy_rejected_U: Float[Tensor, " U"],
    reference_chosen_U: Float[Tensor, " U"],
    reference_rejected_U: Float[Tensor, " U"],
) -> Float[Tensor, " U"]:
    """The margin h of direct losses: how much more than the reference the policy prefers the chosen response (arXiv:2305.18290, Eq. 7).

    h = (policy_chosen - policy_rejected) - (reference_chosen - reference_rejected)

    Args:
        policy_chosen_U, policy_rejected_U: log-probabilities of the two responses of each pair under the policy, nats, with grad; sums or
            means over tokens, as the loss wants.
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


def dpo_loss(margin_U: Float[Tensor, " U"], *, beta: float, label_smoothing: float = 0.0) -> Float[Tensor, " U"]:
    """DPO (arXiv:2305.18290, Eq. 7) with smoothed labels (cDPO, E. Mitchell, ericmitchell.ai/cdpo.pdf).

    term = - (1 - label_smoothing) log sigmoid(beta h) - label_smoothing log sigmoid(-beta h)

    Args:
        margin_U: h of `dpo_margin`, nats.
        beta: strength of the tie to the reference, positive.
        label_smoothing: probability that a label is wrong, in [0, 0.5). Not the "robust DPO" loss, which divides by 1 - 2 label_smoothing.
    Returns:
        Unreduced terms, nats.
    """
    logits = beta * margin_U
    return -(1.0 - label_smoothing) * logsigmoid(logits) - label_smoothing * logsigmoid(-logits)


def bradley_terry(difference: Float[Tensor, "*shape"], *, scale: float = 1.0) -> Float[Tensor, "*shape"]:
    """Probability that the first of two wins: sigmoid((score_first - score_second) / scale) (Bradley and Terry, Biometrika 39, 1952).

    Args:
        difference: score of the first minus score of the second; any shape.
        scale: the difference at which the odds are e to 1, positive, in units of the score.
    """
    return torch.sigmoid(difference / scale)
