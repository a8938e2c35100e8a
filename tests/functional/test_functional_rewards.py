import math

import pytest
import torch

from oat.errors import ShapeError
from oat.functional.rewards import brier_score, centring, confidence, reward_loss


def float64(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_loss_by_hand() -> None:
    # A difference of log 3 is a probability of 3/4: log(4/3) where it is right, log 4 where it is wrong, log
    #     2 where it knows nothing.
    chosen, rejected = float64(2 + math.log(3), -1.0, 5.0), float64(2.0, math.log(3) - 1, 5.0)
    torch.testing.assert_close(
        reward_loss(chosen, rejected), float64(math.log(4 / 3), math.log(4), math.log(2))
    )
    # A margin of log 3 asks for as much: the first pair knows nothing any more.
    asked = reward_loss(chosen, rejected, float64(math.log(3), 0.0, -math.log(3)))
    torch.testing.assert_close(asked, float64(math.log(2), math.log(4), math.log(4 / 3)))


def test_centring_by_hand() -> None:
    assert centring(float64(3.0, -1.0, 2.0), float64(-3.0, -1.0, 1.0)).tolist() == [0.0, 4.0, 9.0]


def test_calibration_by_hand() -> None:
    # Probabilities 3/4, 1/4 and 1/2 that the chosen one wins: squared errors 1/16, 9/16 and 1/4; confidence
    # 3/4, 3/4, 1/2.
    chosen, rejected = float64(math.log(3), 0.0, 7.0), float64(0.0, math.log(3), 7.0)
    torch.testing.assert_close(brier_score(chosen, rejected), float64(1 / 16, 9 / 16, 1 / 4))
    torch.testing.assert_close(confidence(chosen, rejected), float64(3 / 4, 3 / 4, 1 / 2))


def test_loss_against_plain_python() -> None:
    generator = torch.Generator().manual_seed(0)
    chosen, rejected, margin = torch.randn(3, 50, generator=generator, dtype=torch.float64) * 5
    for number, term in enumerate(reward_loss(chosen, rejected, margin).tolist()):
        h = chosen[number].item() - rejected[number].item() - margin[number].item()
        assert term == pytest.approx(math.log1p(math.exp(-h)), abs=1e-12)


def test_gradients() -> None:
    chosen, rejected, margin = (torch.randn(6, dtype=torch.float64, requires_grad=True) for _ in range(3))
    assert torch.autograd.gradcheck(reward_loss, (chosen, rejected, margin))
    assert torch.autograd.gradcheck(centring, (chosen, rejected))
    (up,) = torch.autograd.grad(reward_loss(chosen, rejected).sum(), chosen)
    assert (up < 0).all()


def test_only_differences_count_and_only_their_size_moves_the_centre() -> None:
    chosen, rejected = float64(0.3, -2.0), float64(1.0, -5.0)
    torch.testing.assert_close(reward_loss(chosen + 9, rejected + 9), reward_loss(chosen, rejected))
    torch.testing.assert_close(centring(rejected, chosen), centring(chosen, rejected))


def test_extremes_stay_finite() -> None:
    chosen, rejected = torch.tensor([1e4, -1e4]), torch.tensor([-1e4, 1e4])
    assert reward_loss(chosen, rejected).tolist() == [0.0, 2e4]
    assert brier_score(chosen, rejected).tolist() == [0.0, 1.0]


@pytest.mark.parametrize("function", [reward_loss, centring, brier_score, confidence])
def test_shapes_that_disagree_are_refused(unchecked, function) -> None:
    with pytest.raises(ShapeError, match="shapes disagree"):
        function(float64(1.0), float64(1.0, 2.0))
