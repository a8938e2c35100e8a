"""Rows with a final state: by hand, against plain lists, and gradients."""

import pytest
import torch

from oat.functional.final_states import final_states, mean_with_end
from oat.functional.returns import gae

ROWS = torch.tensor([0, 0, 0, 2, 3, 3])
"""The row of each token; row 1 has none."""
ENDS = torch.tensor([True, False, False, True])


def test_places_by_hand() -> None:
    states = final_states(ROWS, ENDS)
    assert states.row_of_L.tolist() == [0, 0, 0, 0, 2, 3, 3, 3]
    assert states.is_token_L.tolist() == [True, True, True, False, True, True, True, False]
    values_L = states.joined(torch.arange(6.0), torch.tensor([10.0, 11.0, 12.0, 13.0]))
    assert values_L.tolist() == [0, 1, 2, 10, 3, 4, 5, 13]
    values_K, ends_N = states.parted(values_L)
    assert values_K.tolist() == [0, 1, 2, 3, 4, 5]
    assert ends_N.tolist() == [10, 0, 0, 13]


@pytest.mark.parametrize("seed", range(5))
def test_advantages_are_those_of_a_loop_over_each_row(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    lengths_N = torch.randint(0, 6, (9,), generator=generator)
    has_end_N = (torch.rand(9, generator=generator) < 0.5) & (lengths_N > 0)
    row_of_K = torch.arange(9).repeat_interleave(lengths_N)
    numbers = torch.randn(2, len(row_of_K) + 9, generator=generator, dtype=torch.float64)
    rewards_K, end_rewards_N = numbers[0].split([len(row_of_K), 9])
    values_K, end_values_N = numbers[1].split([len(row_of_K), 9])
    states = final_states(row_of_K, has_end_N)
    rewards_L, values_L = states.joined(rewards_K, end_rewards_N), states.joined(values_K, end_values_N)
    found_K, ends_N = states.parted(gae(rewards_L, values_L, states.row_of_L, 9, gamma=0.9, lam=0.7))
    start = 0
    for n, length in enumerate(lengths_N.tolist()):
        rewards, values = (part[start : start + length].tolist() for part in (rewards_K, values_K))
        if has_end_N[n]:
            rewards, values = [*rewards, float(end_rewards_N[n])], [*values, float(end_values_N[n])]
        expected, last = [0.0] * len(rewards), 0.0
        for t in reversed(range(len(rewards))):
            following = values[t + 1] if t + 1 < len(values) else 0.0
            last = rewards[t] + 0.9 * following - values[t] + 0.63 * last
            expected[t] = last
        assert found_K[start : start + length].tolist() == pytest.approx(expected[:length], abs=1e-12)
        assert float(ends_N[n]) == pytest.approx(expected[-1] if has_end_N[n] else 0.0, abs=1e-12)
        start += length


def test_sums_with_a_double_mask_are_those_over_all_places() -> None:
    """With a mask of 2 at the last token of a row with a final state, sums and counts are those of 8
    places."""
    terms_K = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], dtype=torch.float64, requires_grad=True)
    ends_N = torch.tensor([10.0, 20.0, 30.0, 40.0], dtype=torch.float64, requires_grad=True)
    joined_K = mean_with_end(terms_K, ends_N, ROWS, ENDS)
    assert joined_K.tolist() == [1, 2, 6.5, 4, 5, 23]
    mask_K = torch.tensor([1.0, 1.0, 2.0, 1.0, 1.0, 2.0], dtype=torch.float64)
    assert float((mask_K * joined_K).sum()) == 1 + 2 + 3 + 10 + 4 + 5 + 6 + 40
    (mask_K * joined_K).sum().backward()
    assert terms_K.grad is not None
    assert terms_K.grad.tolist() == [1, 1, 1, 1, 1, 1]
    assert ends_N.grad is not None
    assert ends_N.grad.tolist() == [1, 0, 0, 1]
    given = (terms_K.detach().requires_grad_(), ends_N.detach().requires_grad_())
    assert torch.autograd.gradcheck(lambda k, n: mean_with_end(k, n, ROWS, ENDS), given)
