"""The loss of a reward model, and measures of its calibration. All are elementwise over pairs, whose axis is
`U`."""

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
    """The negative log-likelihood of Bradley and Terry (1952) of the chosen response (Stiennon et al.,
    arXiv:2009.01325, Section 3.4).

    term = - log sigmoid(chosen - rejected - margin)

    With a margin the chosen score has to be higher by that much (Llama 2, arXiv:2307.09288, Eq. 2).

    Args:
        chosen_U, rejected_U: scores of the two responses of each pair, with grad.
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
    """A penalty that holds scores around 0, since the loss depends on their differences alone (Eisenstein et
    al., arXiv:2312.09244).

    term = (chosen + rejected)^2

    Args:
        chosen_U, rejected_U: scores of the two responses of each pair, with grad.
    Returns:
        (U,) scores squared; TRL's `center_rewards_coefficient` multiplies their mean.

    Raises:
        ShapeError: shapes disagree.
    """
    check_same_shape(chosen_U=chosen_U, rejected_U=rejected_U)
    return (chosen_U + rejected_U) ** 2


def brier_score(chosen_U: Float[Tensor, " U"], rejected_U: Float[Tensor, " U"]) -> Float[Tensor, " U"]:
    """The squared error of the probability that the chosen response wins (Brier, 1950): 0 for a prediction
    that is certain and right, 1/4 for a probability of one half.

    term = (1 - sigmoid(chosen - rejected))^2

    Raises:
        ShapeError: shapes disagree.
    """
    check_same_shape(chosen_U=chosen_U, rejected_U=rejected_U)
    return torch.sigmoid(rejected_U - chosen_U) ** 2


def confidence(chosen_U: Float[Tensor, " U"], rejected_U: Float[Tensor, " U"]) -> Float[Tensor, " U"]:
    """The probability, at least 1/2, that the response with the higher score wins. For a model that is
    calibrated on average, its mean is the accuracy.

    term = sigmoid(|chosen - rejected|)

    Equal scores give 1/2, and no gradient to either.

    Raises:
        ShapeError: shapes disagree.
    """
    check_same_shape(chosen_U=chosen_U, rejected_U=rejected_U)
    return torch.sigmoid((chosen_U - rejected_U).abs())
