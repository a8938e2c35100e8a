"""Returns and advantages of tokens, against plain loops, by hand, and at their limits."""

import pytest
import torch

from oat.errors import ShapeError
from oat.functional.returns import BLOCK, discounted_returns, gae, lambda_returns

LENGTHS = (3, 0, 1, BLOCK, 2 * BLOCK + 5, 7, 0)
"""Numbers of trained tokens of the rows, with empty rows and rows of more than one block."""
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}


def ragged(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return rewards, values and the row of each token."""
    torch.manual_seed(0)
    row_of_K = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))
    rewards_K, values_K = torch.randn(2, len(row_of_K), dtype=torch.float64).to(dtype)
    return rewards_K, values_K, row_of_K


def slow_gae(
    rewards_K: torch.Tensor, values_K: torch.Tensor, row_of_K: torch.Tensor, gamma: float, lam: float
) -> list[float]:
    found = [0.0] * len(rewards_K)
    for k in reversed(range(len(rewards_K))):
        is_last = k + 1 == len(rewards_K) or row_of_K[k + 1] != row_of_K[k]
        value, advantage = (0.0, 0.0) if is_last else (float(values_K[k + 1]), found[k + 1])
        found[k] = float(rewards_K[k]) + gamma * value - float(values_K[k]) + gamma * lam * advantage
    return found


@pytest.mark.parametrize("decay", [0.0, 0.5, 0.95, 0.99, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gae_is_that_of_a_loop(decay: float, dtype: torch.dtype) -> None:
    rewards_K, values_K, row_of_K = ragged(dtype)
    for gamma, lam in ((1.0, decay), (decay, 1.0)):
        found = gae(rewards_K, values_K, row_of_K, len(LENGTHS), gamma=gamma, lam=lam)
        expected = slow_gae(rewards_K.double(), values_K.double(), row_of_K, gamma, lam)
        scale = max(1.0, max(map(abs, expected)))
        assert found.dtype == dtype
        assert found.tolist() == pytest.approx(expected, abs=TOLERANCE[dtype] * scale)


def test_gae_by_hand() -> None:
    """Two rows: rewards 0, 1 with values 2, 3, and reward 5 with value 1; gamma 0.5, lambda 0.5. Backwards:
    1 - 3 = -2; 0 + 0.5 * 3 - 2 + 0.25 * -2 = -1; and 5 - 1 = 4."""
    found = gae(
        torch.tensor([0.0, 1.0, 5.0]),
        torch.tensor([2.0, 3.0, 1.0]),
        torch.tensor([0, 0, 1]),
        2,
        gamma=0.5,
        lam=0.5,
    )
    assert found.tolist() == [-1.0, -2.0, 4.0]


def test_with_lambda_one_gae_is_the_return_minus_the_value() -> None:
    rewards_K, values_K, row_of_K = ragged(torch.float64)
    returns_K = discounted_returns(rewards_K, row_of_K, len(LENGTHS), gamma=0.9)
    found = gae(rewards_K, values_K, row_of_K, len(LENGTHS), gamma=0.9, lam=1.0)
    torch.testing.assert_close(found, returns_K - values_K, rtol=0, atol=1e-12)


def test_with_lambda_zero_gae_is_one_step() -> None:
    rewards_K, values_K, row_of_K = ragged(torch.float64)
    expected = slow_gae(rewards_K, values_K, row_of_K, 0.9, 0.0)
    found = gae(rewards_K, values_K, row_of_K, len(LENGTHS), gamma=0.9, lam=0.0)
    assert found.tolist() == pytest.approx(expected, abs=1e-12)


def test_rows_do_not_mix() -> None:
    """A row's returns are the same alone."""
    rewards_K, _, row_of_K = ragged(torch.float64)
    together_K = discounted_returns(rewards_K, row_of_K, len(LENGTHS), gamma=0.97)
    for row, length in enumerate(LENGTHS):
        own_K = rewards_K[row_of_K == row]
        alone_K = discounted_returns(own_K, torch.zeros(length, dtype=torch.long), 1, gamma=0.97)
        torch.testing.assert_close(together_K[row_of_K == row], alone_K, rtol=0, atol=1e-12)


def slow_lambda_returns(rewards: list[float], discounts: list[float], values: list[float], lam: list[float]):
    after, found = values[-1], []
    for t in reversed(range(len(rewards))):
        after = rewards[t] + discounts[t] * ((1 - lam[t]) * values[t] + lam[t] * after)
        found.append(after)
    return found[::-1]


@pytest.mark.parametrize("steps", [1, 2, 7, 130])
def test_lambda_returns_are_those_of_a_loop(steps: int) -> None:
    torch.manual_seed(steps)
    rewards, values = torch.randn(2, 3, steps, dtype=torch.float64)
    discounts, lam = torch.rand(2, 3, steps, dtype=torch.float64)
    before = (discounts.clone(), lam.clone())
    found = lambda_returns(rewards, discounts, values, lam)
    for row in range(3):
        given = (rewards[row].tolist(), discounts[row].tolist(), values[row].tolist(), lam[row].tolist())
        assert found[row].tolist() == pytest.approx(slow_lambda_returns(*given), abs=1e-12)
    assert torch.equal(discounts, before[0])
    assert torch.equal(lam, before[1])


def test_limits_of_lambda_returns() -> None:
    rewards, values = torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[4.0, 5.0, 6.0]])
    discounts = torch.full((1, 3), 0.5)
    # 3 + 0.5 * 6 = 6; 2 + 0.5 * 6 = 5; 1 + 0.5 * 5 = 3.5
    assert lambda_returns(rewards, discounts, values, 1.0).tolist() == [[3.5, 5.0, 6.0]]
    assert lambda_returns(rewards, discounts, values, 0.0).tolist() == [[3.0, 4.5, 6.0]]


def test_lambda_returns_minus_values_are_gae() -> None:
    """The value of the state after the last reward is 0, as in `gae`."""
    torch.manual_seed(3)
    rewards_T, values_T = torch.randn(2, 9, dtype=torch.float64)
    after_T = torch.cat([values_T[1:], torch.zeros(1, dtype=torch.float64)])
    discounts = torch.full((1, 9), 0.9, dtype=torch.float64)
    returns = lambda_returns(rewards_T[None], discounts, after_T[None], 0.8)
    advantages = gae(rewards_T, values_T, torch.zeros(9, dtype=torch.long), 1, gamma=0.9, lam=0.8)
    torch.testing.assert_close(returns[0] - values_T, advantages, rtol=0, atol=1e-12)


def test_wrong_shapes_are_refused(unchecked: None) -> None:
    with pytest.raises(ShapeError, match="rewards_K"):
        discounted_returns(torch.zeros(3), torch.zeros(2, dtype=torch.long), 1, gamma=1.0)
    with pytest.raises(ShapeError, match="values_K"):
        gae(torch.zeros(3), torch.zeros(2), torch.zeros(3, dtype=torch.long), 1, gamma=1.0, lam=1.0)
    with pytest.raises(ShapeError, match="lam_NT"):
        lambda_returns(torch.zeros(1, 3), torch.zeros(1, 3), torch.zeros(1, 3), torch.zeros(1, 2))


def test_no_tokens() -> None:
    empty = torch.zeros(0)
    assert gae(empty, empty, torch.zeros(0, dtype=torch.long), 2, gamma=0.9, lam=0.9).shape == (0,)
