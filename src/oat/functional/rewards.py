"""The loss of a reward model, a penalty on its scores, and measures of its calibration. All functions are
elementwise over pairs, whose axis is `U`."""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import logsigmoid

from oat.functional._checks import check_same_shape


def reward_loss(
    chosen_U: Float[Tensor, " U"],
    rejected_U: Float[Tensor, " U"],
    margin_U: Float[Tensor, " U"] | None = None,
) -> Float[Tensor, " U"]:
    """Return the negative log-likelihood, under the model of Bradley and Terry (1952), that the chosen
    response wins (Stiennon et al., arXiv:2009.01325, Section 3.4).

    term = - log sigmoid(chosen - rejected - margin)

    With a margin, the chosen score should be higher than the rejected score by this margin (Llama 2,
    arXiv:2307.09288, Eq. 2).

    Args:
        chosen_U, rejected_U: scores of the chosen and of the rejected response of each pair, with grad.
        margin_U: how much better the chosen response is, in units of score; None: 0.

    Raises:
        ShapeError: shapes disagree.
    """
    check_same_shape(
        chosen_U=chosen_U, rejected_U=rejected_U, margin_U=rejected_U if margin_U is None else margin_U
    )
    difference_U = chosen_U - rejected_U
    return -logsigmoid(difference_U if margin_U is None else difference_U - margin_U)


def centring(chosen_U: Float[Tensor, " U"], rejected_U: Float[Tensor, " U"]) -> Float[Tensor, " U"]:
    """Return a penalty that keeps scores near 0 (Eisenstein et al., arXiv:2312.09244). The loss alone depends
    only on differences of scores, and lets their mean drift.

    term = (chosen + rejected)^2

    Args:
        chosen_U, rejected_U: scores of the chosen and of the rejected response of each pair, with grad.
    Returns:
        (U,) unreduced terms, in units of score squared. TRL's `center_rewards_coefficient` multiplies their
        mean.

    Raises:
        ShapeError: shapes disagree.
    """
    check_same_shape(chosen_U=chosen_U, rejected_U=rejected_U)
    return (chosen_U + rejected_U) ** 2


def brier_score(chosen_U: Float[Tensor, " U"], rejected_U: Float[Tensor, " U"]) -> Float[Tensor, " U"]:
    """Return the squared error of the predicted probability that the chosen response wins (Brier, 1950). It
    is 0 if the prediction is certain and right, and 1/4 if the probability is one half.

    term = (1 - sigmoid(chosen - rejected))^2

    Raises:
        ShapeError: shapes disagree.
    """
    check_same_shape(chosen_U=chosen_U, rejected_U=rejected_U)
    return torch.sigmoid(rejected_U - chosen_U) ** 2


def confidence(chosen_U: Float[Tensor, " U"], rejected_U: Float[Tensor, " U"]) -> Float[Tensor, " U"]:
    """Return the predicted probability, at least 1/2, that the response with the higher score wins. If the
    reward model is calibrated on average, the mean of these probabilities equals its accuracy.

    term = sigmoid(|chosen - rejected|)

    If the scores are equal, the term is 1/2, and neither score gets a gradient.

    Raises:
        ShapeError: shapes disagree.
    """
    check_same_shape(chosen_U=chosen_U, rejected_U=rejected_U)
    return torch.sigmoid((chosen_U - rejected_U).abs())
