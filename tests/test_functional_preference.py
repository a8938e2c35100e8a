import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oat.errors import ShapeError
from oat.functional.preference import bradley_terry, dpo_loss, dpo_margin


def slow_log_sigmoid(x):
    return -math.log1p(math.exp(-x)) if x > 0 else x - math.log1p(math.exp(x))


def float64(*values):
    return torch.tensor(values, dtype=torch.float64)


def test_margin_by_hand():
    # (-10 - -14) - (-11 - -13) = 4 - 2 = 2; the policy moved the other way in the second pair: (-5 - -4) - (-4 - -5) = -2.
    margin = dpo_margin(float64(-10.0, -5.0), float64(-14.0, -4.0), float64(-11.0, -4.0), float64(-13.0, -5.0))
    assert margin.tolist() == [2.0, -2.0]


def test_loss_by_hand():
    # beta h = log 3: sigmoid = 3/4, so -log(3/4) = log(4/3) and -log(1/4) = log 4. With smoothing 1/4: 3/4 log(4/3) + 1/4 log 4.
    margin = float64(math.log(3.0) / 0.1, -math.log(3.0) / 0.1, 0.0)
    torch.testing.assert_close(dpo_loss(margin, beta=0.1), float64(math.log(4 / 3), math.log(4), math.log(2)))
    smoothed = [0.75 * math.log(4 / 3) + 0.25 * math.log(4), 0.75 * math.log(4) + 0.25 * math.log(4 / 3), math.log(2)]
    torch.testing.assert_close(dpo_loss(margin, beta=0.1, label_smoothing=0.25), float64(*smoothed))


def test_bradley_terry_by_hand():
    # Odds e^(d / scale): d = log 3 at scale 1 is 3 to 1; d = 2 log 3 at scale 2 the same.
    torch.testing.assert_close(bradley_terry(float64(math.log(3), 0.0, -math.log(3))), float64(0.75, 0.5, 0.25))
    torch.testing.assert_close(bradley_terry(float64(2 * math.log(3)), scale=2.0), float64(0.75))
    assert bradley_terry(torch.zeros(2, 3)).shape == (2, 3)


@settings(derandomize=True, deadline=None, max_examples=50)
@given(st.lists(st.tuples(*[st.floats(-200, 0)] * 4), max_size=5), st.floats(0.01, 5), st.floats(0, 0.49))
def test_equals_slow_version(pairs, beta, label_smoothing):
    columns = [torch.tensor([pair[i] for pair in pairs], dtype=torch.float64) for i in range(4)]
    margin = dpo_margin(*columns)
    slow = [pair[0] - pair[1] - pair[2] + pair[3] for pair in pairs]
    torch.testing.assert_close(margin, torch.tensor(slow, dtype=torch.float64), rtol=1e-9, atol=1e-9)
    losses = [-(1 - label_smoothing) * slow_log_sigmoid(beta * h) - label_smoothing * slow_log_sigmoid(-beta * h) for h in slow]
    expected = torch.tensor(losses, dtype=torch.float64)
    torch.testing.assert_close(dpo_loss(margin, beta=beta, label_smoothing=label_smoothing), expected, rtol=1e-9, atol=1e-9)
    probabilities = torch.tensor([math.exp(slow_log_sigmoid(h / beta)) for h in slow], dtype=torch.float64)
    torch.testing.assert_close(bradley_terry(margin, scale=beta), probabilities, rtol=1e-9, atol=1e-12)


def test_gradients():
    columns = [float64(-1.0, -7.0).requires_grad_(), float64(-2.0, -3.0).requires_grad_(), float64(-1.5, -6.0), float64(-2.5, -4.0)]
    assert torch.autograd.gradcheck(lambda *c: dpo_loss(dpo_margin(*c), beta=0.7, label_smoothing=0.1), columns)
    assert torch.autograd.gradcheck(lambda d: bradley_terry(d, scale=0.5), (columns[0],))


def test_sign_of_the_gradient_on_two_tokens():
    # One token each: descent raises the chosen and lowers the rejected one, by beta sigmoid(-beta h) = 1/2 at h = 0 and beta = 1.
    chosen, rejected = (torch.tensor([-1.0], requires_grad=True) for _ in range(2))
    dpo_loss(dpo_margin(chosen, rejected, torch.tensor([-1.0]), torch.tensor([-1.0])), beta=1.0).sum().backward()
    assert (chosen.grad.item(), rejected.grad.item()) == (-0.5, 0.5)


def test_smoothed_loss_is_least_at_the_smoothed_probability():
    # The minimum lies where sigmoid(beta h) = 1 - smoothing.
    margin = float64(math.log(0.9 / 0.1)).requires_grad_()
    dpo_loss(margin, beta=1.0, label_smoothing=0.1).sum().backward()
    assert margin.grad.item() == pytest.approx(0.0, abs=1e-12)


def test_invariances():
    generator = torch.Generator().manual_seed(0)
    columns = -20 * torch.rand(4, 9, generator=generator, dtype=torch.float64)
    margin, order = dpo_margin(*columns), torch.randperm(9, generator=generator)
    assert torch.equal(margin[order], dpo_margin(*columns[:, order]))
    torch.testing.assert_close(dpo_margin(columns[0] - 3, columns[1] - 3, columns[2] - 8, columns[3] - 8), margin)
    torch.testing.assert_close(dpo_margin(columns[1], columns[0], columns[3], columns[2]), -margin)
    torch.testing.assert_close(bradley_terry(margin) + bradley_terry(-margin), torch.ones_like(margin))
    torch.testing.assert_close(dpo_loss(margin, beta=0.3), -bradley_terry(0.3 * margin).log())


def test_extremes():
    margin = torch.tensor([1e4, -1e4], requires_grad=True)
    loss = dpo_loss(margin, beta=1.0)
    assert loss.tolist() == [0.0, 1e4]
    loss.sum().backward()
    assert margin.grad.tolist() == [0.0, -1.0]
    assert dpo_loss(torch.tensor([1e4]), beta=1.0, label_smoothing=0.25).item() == 2500.0
    assert bradley_terry(torch.tensor([1e4, -1e4])).tolist() == [1.0, 0.0]
    empty = torch.zeros(0)
    assert dpo_loss(dpo_margin(empty, empty, empty, empty), beta=0.1).shape == (0,)


def test_shapes(unchecked):
    columns = [torch.zeros(2)] * 4
    for i in range(4):
        with pytest.raises(ShapeError, match="shapes disagree"):
            dpo_margin(*(torch.zeros(1) if i == j else column for j, column in enumerate(columns)))
