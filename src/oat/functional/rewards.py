"""The loss of a reward model, and how well its scores say how sure they may be. All elementwise over pairs;
`U` is their axis."""

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

    A margin asks for so much more than a win (Llama 2, arXiv:2307.09288, Eq. 2).

    Args:
        chosen_U, rejected_U: scores of the two responses of each pair, with grad.
        margin_U: by how much the chosen one is better, in units of score; None: 0.

    Raises:
        ShapeError: shapes disagree.
    """
    check_same_shape(
        chosen_U=chosen_U, rejected_U=rejected_U, margin_U=rejected_U if margin_U is None else margin_U
    )
    difference_U = chosen_U - rejected_U
    return -logsigmoid(difference_U if margin_U is None else difference_U - margin_U)


def centring(chosen_U: Float[Tensor, " U"], rejected_U: Float[Tensor, " U"]) -> Float[Tensor, " U"]:
    """What holds scores around 0, which the loss of differences leaves free (Eisenstein et al.,
    arXiv:2312.09244).

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
    """The squared error of the probability that the chosen response wins (Brier, 1950): 0 where it is sure
    and right, 1/4 where it knows nothing.

    term = (1 - sigmoid(chosen - rejected))^2

    Raises:
        ShapeError: shapes disagree.
    """
    check_same_shape(chosen_U=chosen_U, rejected_U=rejected_U)
    return torch.sigmoid(rejected_U - chosen_U) ** 2


def confidence(chosen_U: Float[Tensor, " U"], rejected_U: Float[Tensor, " U"]) -> Float[Tensor, " U"]:
    """The probability, at least 1/2, of the response that scores higher. Its mean is the accuracy of a model
    that is calibrated on average.

    term = sigmoid(|chosen - rejected|)

    Equal scores give 1/2, and no gradient to either.

    Raises:
        ShapeError: shapes disagree.
    """
    check_same_shape(chosen_U=chosen_U, rejected_U=rejected_U)
    return torch.sigmoid((chosen_U - rejected_U).abs())
