"""Returns and advantages of tokens, against plain loops, by hand, and at their limits."""

import pytest
import torch

import oat.functional.returns
from oat.errors import ShapeError
from oat.functional.returns import TILE, affine_scan, discounted_returns, gae, lambda_returns

LENGTHS = (3, 0, 1, TILE, 5 * TILE + 5, 7, 0)
"""Numbers of trained tokens of the rows, with empty rows and rows of more than one tile."""
EVEN = ((1,) * 5, (7,) * 3, (TILE,) * 4, (3 * TILE,) * 2, (2 * TILE + 5,) * 3, (TILE * TILE + 40,))
"""The same for rows that are equally long."""
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}
DECAYS = (0.0, 0.5, 0.95, 0.99, 1.0)


@pytest.fixture(params=["one block", "many blocks"])
def blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a test with all tokens in one block, and with blocks of few rows."""
    if request.param == "many blocks":
        monkeypatch.setattr(oat.functional.returns, "BLOCK_TOKENS", 8)


def ragged(
    dtype: torch.dtype, lengths: tuple[int, ...] = LENGTHS
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return rewards, values and the row of each token."""
    torch.manual_seed(0)
    row_of_K = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
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


@pytest.mark.inventory(22)
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gae_is_that_of_a_loop(blocks: None, decay: float, dtype: torch.dtype) -> None:
    for lengths in (LENGTHS, *EVEN):
        rewards_K, values_K, row_of_K = ragged(dtype, lengths)
        for gamma, lam in ((1.0, decay), (decay, 1.0)):
            found = gae(rewards_K, values_K, row_of_K, len(lengths), gamma=gamma, lam=lam)
            expected = slow_gae(rewards_K.double(), values_K.double(), row_of_K, gamma, lam)
            scale = max(1.0, max(map(abs, expected)))
            assert found.dtype == dtype
            assert found.tolist() == pytest.approx(expected, abs=TOLERANCE[dtype] * scale)


def masked_gae(
    rewards_NT: torch.Tensor, values_NT: torch.Tensor, mask_NT: torch.Tensor, gamma: float, lam: float
) -> torch.Tensor:
    """Go backwards over columns. A token outside the mask changes nothing: the next value and the next
    advantage are those of the row's next token inside."""
    found_NT = torch.zeros_like(rewards_NT)
    value_N, advantage_N = torch.zeros(2, len(rewards_NT), dtype=rewards_NT.dtype)
    for t in reversed(range(rewards_NT.shape[1])):
        step_N = rewards_NT[:, t] + gamma * value_N - values_NT[:, t] + gamma * lam * advantage_N
        found_NT[:, t] = step_N * mask_NT[:, t]
        advantage_N = torch.where(mask_NT[:, t], step_N, advantage_N)
        value_N = torch.where(mask_NT[:, t], values_NT[:, t], value_N)
    return found_NT


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.inventory(51)
@pytest.mark.parametrize("gaps", ["none", "single tokens", "turns"])
def test_gae_skips_the_gaps_of_long_rows(decay: float, dtype: torch.dtype, gaps: str) -> None:
    torch.manual_seed(1)
    rewards_NT, values_NT = torch.randn(2, 12, 640, dtype=torch.float64)
    mask_NT = torch.ones(12, 640, dtype=torch.bool)
    if gaps == "single tokens":
        mask_NT = torch.rand(12, 640) < 0.7
    elif gaps == "turns":
        mask_NT = (torch.rand(12, 20) < 0.6).repeat_interleave(32, dim=1)
    row_of_K = mask_NT.nonzero()[:, 0]
    given_NT = [torch.where(mask_NT, value, torch.nan) for value in (rewards_NT, values_NT)]
    for gamma, lam in ((1.0, decay), (decay, 1.0)):
        expected_NT = masked_gae(rewards_NT, values_NT, mask_NT, gamma, lam)
        rewards_K, values_K = (value[mask_NT].to(dtype) for value in given_NT)
        found_K = gae(rewards_K, values_K, row_of_K, 12, gamma=gamma, lam=lam)
        scale = max(1.0, float(expected_NT.abs().max()))
        error = (found_K - expected_NT[mask_NT]).abs().max()
        assert error <= TOLERANCE[dtype] * scale


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


@pytest.mark.inventory(23)
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


@pytest.mark.parametrize("lengths", [LENGTHS, *EVEN])
def test_rows_do_not_mix(blocks: None, lengths: tuple[int, ...]) -> None:
    """A row's returns are the same alone."""
    rewards_K, _, row_of_K = ragged(torch.float64, lengths)
    together_K = discounted_returns(rewards_K, row_of_K, len(lengths), gamma=0.97)
    for row, length in enumerate(lengths):
        own_K = rewards_K[row_of_K == row]
        alone_K = discounted_returns(own_K, torch.zeros(length, dtype=torch.long), 1, gamma=0.97)
        torch.testing.assert_close(together_K[row_of_K == row], alone_K, rtol=0, atol=1e-12)


@pytest.mark.parametrize("lengths", [LENGTHS, *EVEN])
def test_a_row_that_is_not_finite_spoils_no_other(blocks: None, lengths: tuple[int, ...]) -> None:
    rewards_K, values_K, row_of_K = ragged(torch.float64, lengths)
    sound_K = gae(rewards_K, values_K, row_of_K, len(lengths), gamma=0.97, lam=0.9)
    spoilt_row = int(row_of_K[len(row_of_K) // 2])
    values_K[row_of_K == spoilt_row] = torch.nan
    found_K = gae(rewards_K, values_K, row_of_K, len(lengths), gamma=0.97, lam=0.9)
    others_K = row_of_K != spoilt_row
    assert torch.equal(found_K[others_K], sound_K[others_K])
    assert found_K[~others_K].isnan().all()


def test_the_arguments_are_not_changed_and_may_be_strided() -> None:
    for lengths in (LENGTHS, (2 * TILE,) * 3):
        rewards_K, values_K, row_of_K = ragged(torch.float64, lengths)
        both = torch.stack((rewards_K, values_K), dim=1)
        before = both.clone()
        expected = gae(rewards_K, values_K, row_of_K, len(lengths), gamma=0.9, lam=0.9)
        assert torch.equal(gae(*both.unbind(1), row_of_K, len(lengths), gamma=0.9, lam=0.9), expected)
        returns = discounted_returns(both[:, 0], row_of_K, len(lengths), gamma=0.9)
        assert torch.equal(returns, discounted_returns(rewards_K, row_of_K, len(lengths), gamma=0.9))
        assert torch.equal(both, before)


def test_a_reward_counts_for_the_tokens_before_it_only() -> None:
    """The sign of the reward is that of the advantages, which fall with the distance."""
    for lengths in ((5, 5), (5, 3)):
        row_of_K = torch.arange(2).repeat_interleave(torch.tensor(lengths))
        rewards_K = torch.zeros(len(row_of_K))
        rewards_K[3] = -2.0
        found = gae(rewards_K, torch.zeros_like(rewards_K), row_of_K, 2, gamma=0.5, lam=1.0)
        assert found.tolist() == [-0.25, -0.5, -1.0, -2.0, *[0.0] * (len(row_of_K) - 4)]


def slow_lambda_returns(rewards: list[float], discounts: list[float], values: list[float], lam: list[float]):
    after, found = values[-1], []
    for t in reversed(range(len(rewards))):
        after = rewards[t] + discounts[t] * ((1 - lam[t]) * values[t] + lam[t] * after)
        found.append(after)
    return found[::-1]


@pytest.mark.inventory(55)
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


@pytest.mark.inventory(55)
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


def test_a_scan_by_hand() -> None:
    """Two rows: 3; 2 + 0.5 * 3 = 3.5; and 5; 1 + 2 * 5 = 11. The NaN of the second row stays there."""
    sums, factors = torch.tensor([2.0, 3.0, 1.0, 5.0]), torch.tensor([0.5, 0.0, 2.0, 0.0])
    assert affine_scan(sums, factors).tolist() == [3.5, 3.0, 11.0, 5.0]
    sums[3] = torch.nan
    assert affine_scan(sums, factors)[:2].tolist() == [3.5, 3.0]
    assert affine_scan(sums[:0], factors[:0]).shape == (0,)


def test_gradients_of_lambda_returns_are_those_of_differences() -> None:
    torch.manual_seed(0)
    rewards, discounts, values, lam = torch.rand(4, 2, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda_returns, (rewards, discounts, values, lam))


def test_wrong_shapes_are_refused(unchecked: None) -> None:
    with pytest.raises(ShapeError, match="rewards_K"):
        discounted_returns(torch.zeros(3), torch.zeros(2, dtype=torch.long), 1, gamma=1.0)
    with pytest.raises(ShapeError, match="values_K"):
        gae(torch.zeros(3), torch.zeros(2), torch.zeros(3, dtype=torch.long), 1, gamma=1.0, lam=1.0)
    with pytest.raises(ShapeError, match="factors"):
        affine_scan(torch.zeros(3), torch.zeros(2))
    with pytest.raises(ShapeError, match="lam_NT"):
        lambda_returns(torch.zeros(1, 3), torch.zeros(1, 3), torch.zeros(1, 3), torch.zeros(1, 2))


def test_no_tokens() -> None:
    empty = torch.zeros(0)
    assert gae(empty, empty, torch.zeros(0, dtype=torch.long), 2, gamma=0.9, lam=0.9).shape == (0,)
