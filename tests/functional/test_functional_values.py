"""The critic's loss and V-trace: by hand, against plain Python, gradients in float64, and directions."""

import pytest
import torch

from oat.errors import ShapeError
from oat.functional.returns import gae, lambda_returns
from oat.functional.values import clipped_value_loss, monte_carlo_values, step_advantages, vtrace

ROWS = torch.tensor([0, 0, 0, 2, 2, 3])
"""The row of each token; row 1 has none."""


def test_the_value_loss_by_hand() -> None:
    """Old value 1 and clip 0.5, so values are held in [0.5, 1.5]. Target 3: a value of 2 has gone too far
    towards it, and counts as 1.5: (1.5 - 3)^2 / 2 = 1.125. A value of 0 went away: (0 - 3)^2 / 2 = 4.5.
    Target 0: a value of 0.2 counts as 0.5; one of 2 counts in full."""
    values = torch.tensor([2.0, 0.0, 1.2, 0.2, 2.0], requires_grad=True)
    targets = torch.tensor([3.0, 3.0, 3.0, 0.0, 0.0])
    terms, clipped = clipped_value_loss(values, torch.ones(5), targets, clip=0.5)
    assert terms.tolist() == pytest.approx([1.125, 4.5, 1.62, 0.125, 2.0])
    assert clipped.tolist() == [1, 0, 0, 1, 0]
    terms.sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == pytest.approx([0.0, -3.0, -1.8, 0.0, 2.0])


def test_without_a_clip_the_value_loss_is_half_the_square() -> None:
    values, targets = torch.tensor([2.0, -1.0]), torch.tensor([5.0, 0.0])
    terms, clipped = clipped_value_loss(values, torch.zeros(2), targets, clip=None)
    assert terms.tolist() == [4.5, 0.5]
    assert clipped.tolist() == [0, 0]


def made(count: int = 200) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    values, old, targets = torch.randn(3, count, dtype=torch.float64)
    return values, old, targets


@pytest.mark.parametrize("clip", [0.0, 0.3, 1.0, 10.0])
def test_the_value_loss_is_that_of_plain_python(clip: float) -> None:
    expected, marks = [], []
    for value, old, target in zip(*(given.tolist() for given in made()), strict=True):
        held = min(max(value, old - clip), old + clip)
        expected.append(max((value - target) ** 2, (held - target) ** 2) / 2)
        marks.append(float((held - target) ** 2 > (value - target) ** 2))
    terms, clipped = clipped_value_loss(*made(), clip=clip)
    assert terms.tolist() == pytest.approx(expected, abs=1e-12)
    assert clipped.tolist() == marks


@pytest.mark.parametrize("clip", [0.3, None])
def test_gradients_of_the_value_loss_are_those_of_differences(clip: float | None) -> None:
    values, old, targets = made(30)
    assert torch.autograd.gradcheck(
        lambda given: clipped_value_loss(given, old, targets, clip=clip)[0], values.requires_grad_()
    )


@pytest.mark.inventory(30)
def test_values_are_clipped_only_after_a_large_update() -> None:
    """Small steps of descent clip nothing; after a step over the clip's distance, values are clipped."""
    _, old, targets = made()
    for step, is_clipped in ((0.05, False), (0.5, True)):
        values = old.clone().requires_grad_()
        clipped_value_loss(values, old, targets, clip=0.2)[0].sum().backward()
        assert values.grad is not None
        moved = old - step * values.grad
        share = clipped_value_loss(moved, old, targets, clip=0.2)[1].mean().item()
        assert (share > 0) == ((step * values.grad).abs().max().item() > 0.2)
        assert (share > 0.3) == is_clipped


def test_descent_moves_values_to_their_targets() -> None:
    _, old, targets = made()
    values = old.clone().requires_grad_()
    clipped_value_loss(values, old, targets, clip=0.2)[0].sum().backward()
    assert values.grad is not None
    assert torch.equal(values.grad.sign(), (old - targets).sign())


def trajectory() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(2)
    rewards, values = torch.randn(2, 6, dtype=torch.float64)
    return rewards, values, torch.tensor([0.5, 2.0, 1.0, 0.9, 3.0, 0.1], dtype=torch.float64)


def slow_vtrace(
    gamma: float, lam: float, max_ratio: float, max_trace: float
) -> tuple[list[float], list[float]]:
    """Return the sums of the paper's Eq. 1 over all later tokens of the row, without a recursion."""
    rewards, values, ratios = (given.tolist() for given in trajectory())
    rows = ROWS.tolist()
    own = [[m for m in range(6) if rows[m] == rows[k]] for k in range(6)]
    after = [values[k + 1] if k + 1 in own[k] else 0.0 for k in range(6)]
    targets = []
    for k in range(6):
        target = values[k]
        for m in (m for m in own[k] if m >= k):
            trace = 1.0
            for i in range(k, m):
                trace *= lam * min(ratios[i], max_trace)
            step = rewards[m] + gamma * after[m] - values[m]
            target += gamma ** (m - k) * trace * min(ratios[m], max_ratio) * step
        targets.append(target)
    advantages = []
    for k in range(6):
        mixed = lam * targets[k + 1] + (1 - lam) * values[k + 1] if k + 1 in own[k] else 0.0
        advantages.append(min(ratios[k], max_ratio) * (rewards[k] + gamma * mixed - values[k]))
    return targets, advantages


@pytest.mark.parametrize("lam", [0.0, 0.7, 1.0])
@pytest.mark.parametrize(("max_ratio", "max_trace"), [(1.0, 1.0), (2.5, 1.0), (1e9, 1e9)])
def test_vtrace_is_the_sum_of_the_paper(lam: float, max_ratio: float, max_trace: float) -> None:
    targets, advantages, weights = vtrace(
        *trajectory(), ROWS, gamma=0.9, lam=lam, max_ratio=max_ratio, max_trace=max_trace
    )
    expected_targets, expected_advantages = slow_vtrace(0.9, lam, max_ratio, max_trace)
    assert targets.tolist() == pytest.approx(expected_targets, abs=1e-12)
    assert (weights * advantages).tolist() == pytest.approx(expected_advantages, abs=1e-12)
    assert weights.tolist() == pytest.approx(trajectory()[2].clamp(max=max_ratio).tolist())


def test_vtrace_by_hand() -> None:
    """One row, values 1 and 2, rewards 0 and 4, ratios 1/2 and 3, gamma 1. Last: e = 1 (4 - 2) = 2. First:
    e = 1/2 (0 + 2 - 1) + 1/2 * 2 = 3/2. Its advantage: 0 + 2 + 2 - 1 = 3, and its weight 1/2."""
    targets, advantages, weights = vtrace(
        torch.tensor([0.0, 4.0]),
        torch.tensor([1.0, 2.0]),
        torch.tensor([0.5, 3.0]),
        torch.tensor([0, 0]),
        gamma=1.0,
    )
    assert targets.tolist() == [2.5, 4.0]
    assert (advantages.tolist(), weights.tolist()) == ([3.0, 2.0], [0.5, 1.0])


@pytest.mark.parametrize("lam", [0.0, 0.8, 1.0])
def test_on_policy_vtrace_is_gae(lam: float) -> None:
    rewards, values, _ = trajectory()
    targets, advantages, _ = vtrace(rewards, values, torch.ones_like(values), ROWS, gamma=0.9, lam=lam)
    expected = gae(rewards, values, ROWS, 4, gamma=0.9, lam=lam)
    torch.testing.assert_close(advantages, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(targets, values + expected, rtol=0, atol=1e-12)


@pytest.mark.inventory(55)
def test_vtrace_is_made_of_lambda_returns_with_a_lambda_for_each_step() -> None:
    """V + min(1, ratio) (G - V), where G are the lambda returns with lam min(1, ratio) of the next token."""
    torch.manual_seed(3)
    rewards, values = torch.randn(2, 9, dtype=torch.float64)
    ratios = 2 * torch.rand(9, dtype=torch.float64)
    zero = torch.zeros(1, dtype=torch.float64)
    after, later = torch.cat((values[1:], zero)), torch.cat((ratios[1:].clamp(max=1), zero))
    returns = lambda_returns(
        rewards[None], torch.full((1, 9), 0.9, dtype=torch.float64), after[None], 0.8 * later[None]
    )[0]
    targets, advantages, weights = vtrace(
        rewards, values, ratios, torch.zeros(9, dtype=torch.long), gamma=0.9, lam=0.8
    )
    expected = ratios.clamp(max=1) * (returns - values)
    torch.testing.assert_close(targets, values + expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(weights * advantages, expected, rtol=0, atol=1e-12)


def test_a_token_that_the_policy_would_not_draw_changes_nothing_before_it() -> None:
    rewards, values, ratios = trajectory()
    ratios[1] = 0.0
    first = vtrace(rewards, values, ratios, ROWS, gamma=0.9)[0]
    rewards[1:3] += 5.0
    second = vtrace(rewards, values, ratios, ROWS, gamma=0.9)[0]
    assert torch.equal(first[:2], second[:2])
    assert second[2] > first[2]


def test_step_advantages_by_hand() -> None:
    """A response of three steps, right in the end. From the prompt a quarter of the continuations is right,
    after step 1 three quarters, after step 2 a half. Steps: +1/2, -1/4, and 1 - 1/2. Then a wrong one of one
    step, from a prompt that is solved always: -1."""
    returns_SG = torch.tensor([[1.0, 0, 0, 0], [1, 1, 0, 1], [0, 1, 1, 0], [1, 1, 1, 1]])
    values = monte_carlo_values(returns_SG)
    assert values.tolist() == [0.25, 0.75, 0.5, 1.0]
    rewards, rows = torch.tensor([0.0, 0.0, 1.0, 0.0]), torch.tensor([0, 0, 0, 2])
    assert step_advantages(rewards, values, rows).tolist() == [0.5, -0.25, 0.5, -1.0]
    discounted = step_advantages(rewards, values, rows, gamma=0.5)
    assert discounted.tolist() == [0.125, -0.5, 0.5, -1.0]


def test_steps_without_a_valid_continuation_have_no_advantage() -> None:
    valid = torch.tensor([[True, True], [False, False], [True, False], [True, True]])
    returns = torch.tensor([[1.0, 0.0], [1.0, 1.0], [1.0, float("nan")], [0.0, 0.0]])
    values = monte_carlo_values(returns, valid)
    assert values.isnan().tolist() == [False, True, False, False]
    assert values[2].item() == 1.0
    found = step_advantages(torch.zeros(4), values, torch.tensor([0, 0, 0, 0]))
    assert found.isnan().tolist() == [True, True, False, False]
    assert found[2:].tolist() == [-1.0, 0.0]


def test_step_advantages_are_those_of_plain_python_and_sum_to_the_return_less_the_baseline() -> None:
    torch.manual_seed(5)
    returns_SG = torch.randn(20, 3, dtype=torch.float64)
    rewards = torch.randn(20, dtype=torch.float64)
    rows = torch.randint(0, 5, (20,)).sort().values
    values = [sum(own) / 3 for own in returns_SG.tolist()]
    expected = []
    for k in range(20):
        after = values[k + 1] if k < 19 and rows[k + 1] == rows[k] else 0.0
        expected.append(float(rewards[k]) + 0.9 * after - values[k])
    found = step_advantages(rewards, monte_carlo_values(returns_SG), rows, gamma=0.9)
    assert found.tolist() == pytest.approx(expected, abs=1e-12)
    gae_K = gae(rewards, monte_carlo_values(returns_SG), rows, 5, gamma=0.9, lam=0.0)
    torch.testing.assert_close(found, gae_K, rtol=0, atol=1e-12)
    undiscounted = step_advantages(rewards, monte_carlo_values(returns_SG), rows)
    for row in rows.unique().tolist():
        own = rows == row
        first = values[int(own.nonzero()[0])]
        assert undiscounted[own].sum().item() == pytest.approx(float(rewards[own].sum()) - first, abs=1e-12)


def test_a_step_after_which_more_succeed_gets_a_positive_advantage() -> None:
    rows, rewards = torch.tensor([0, 0]), torch.zeros(2)
    better = step_advantages(rewards, torch.tensor([0.2, 0.8]), rows)
    worse = step_advantages(rewards, torch.tensor([0.8, 0.2]), rows)
    assert better[0] > 0 > worse[0]


def test_wrong_shapes_are_refused(unchecked: None) -> None:
    with pytest.raises(ShapeError, match="old_values"):
        clipped_value_loss(torch.zeros(2), torch.zeros(3), torch.zeros(2), clip=0.2)
    with pytest.raises(ShapeError, match="ratios_K"):
        vtrace(torch.zeros(2), torch.zeros(2), torch.zeros(3), torch.zeros(2, dtype=torch.long), gamma=1.0)
    with pytest.raises(ShapeError, match="valid_SG"):
        monte_carlo_values(torch.zeros(2, 2), torch.ones(2, 1, dtype=torch.bool))
    with pytest.raises(ShapeError, match="values_S"):
        step_advantages(torch.zeros(2), torch.zeros(3), torch.zeros(2, dtype=torch.long))
