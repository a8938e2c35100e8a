import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oat.errors import ShapeError
from oat.functional.policy import clipped_policy_loss, log_ratio

RATIOS = [0.5, 1.0, 1.5]


def slow_term(logp, old_logp, advantage, clip_low, clip_high, max_log_ratio=20.0):
    ratio = math.exp(max(-max_log_ratio, min(max_log_ratio, logp - old_logp)))
    bounded = max(1.0 - clip_low, min(1.0 + clip_high, ratio))
    return -min(ratio * advantage, bounded * advantage), float(bounded * advantage < ratio * advantage)


def test_hand_worked():
    # clip to [0.8, 1.3]. A = 2: ratios 0.5, 1, 1.5 give -min(1, 1.6) = -1, -2, -min(3, 2.6) = -2.6.
    # A = -2: -min(-1, -1.6) = 1.6, 2, -min(-3, -2.6) = 3. Clipped where the bound made the loss larger.
    logps = torch.tensor(RATIOS * 2, dtype=torch.float64).log() - 1.0
    advantages = torch.tensor([2.0] * 3 + [-2.0] * 3, dtype=torch.float64)
    terms, clipped = clipped_policy_loss(
        logps, torch.full_like(logps, -1.0), advantages, clip_low=0.2, clip_high=0.3
    )
    torch.testing.assert_close(terms, torch.tensor([-1.0, -2.0, -2.6, 1.6, 2.0, 3.0], dtype=torch.float64))
    assert clipped.tolist() == [0, 0, 1, 1, 0, 0]


@settings(derandomize=True, deadline=None, max_examples=50)
@given(
    st.lists(st.tuples(st.floats(-60, 0), st.floats(-60, 0), st.floats(-5, 5)), max_size=6),
    st.sampled_from([(0.2, 0.2), (0.2, 0.28), (0.0, 0.5), (1.0, 10.0)]),
)
def test_equals_slow_version(tokens, clips):
    columns = [torch.tensor([token[i] for token in tokens], dtype=torch.float64) for i in range(3)]
    terms, clipped = clipped_policy_loss(*columns, clip_low=clips[0], clip_high=clips[1])
    slow = [slow_term(*token, *clips) for token in tokens]
    torch.testing.assert_close(
        terms, torch.tensor([term for term, _ in slow], dtype=torch.float64), rtol=1e-9, atol=1e-9
    )
    inside = [
        i
        for i, (a, b, _) in enumerate(tokens)
        if min(abs(math.exp(a - b) - bound) for bound in (1 - clips[0], 1 + clips[1])) > 1e-9
    ]
    assert [clipped[i].item() for i in inside] == [slow[i][1] for i in inside]


def test_gradient():
    # None of these stands on a bound, where the loss has a kink.
    logps = torch.tensor([-0.5, -1.0, -1.4, -0.5, -2.0, -1.05], dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([1.0, 2.0, 1.5, -1.0, -2.0, -0.5], dtype=torch.float64)
    old_logps = torch.full((6,), -1.0, dtype=torch.float64)
    assert torch.autograd.gradcheck(
        lambda x: clipped_policy_loss(x, old_logps, advantages, clip_low=0.2, clip_high=0.2)[0], logps
    )
    assert torch.autograd.gradcheck(lambda x: log_ratio(x, old_logps), logps)


def test_gradient_where_policy_and_old_agree_is_minus_the_advantage():
    # At ratio 1 both branches are equal: d/dlogp (-r A) = -A, all of it.
    logps = torch.tensor([-1.0, -2.0], requires_grad=True)
    clipped_policy_loss(logps, logps.detach(), torch.tensor([3.0, -0.5]), clip_low=0.2, clip_high=0.2)[
        0
    ].sum().backward()
    assert logps.grad.tolist() == [-3.0, 0.5]


def test_sign_of_the_gradient_on_two_tokens():
    # Descent raises the good token and lowers the bad one; a clipped token gets no gradient.
    logps = torch.tensor([-1.0, -1.0, 0.0, -3.0], requires_grad=True)
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0])
    terms, clipped = clipped_policy_loss(
        logps, torch.full((4,), -1.0), advantages, clip_low=0.2, clip_high=0.2
    )
    terms.sum().backward()
    assert (-logps.grad).sign().tolist() == [1.0, -1.0, 0.0, 0.0]
    assert clipped.tolist() == [0, 0, 1, 1]
    assert not clipped.requires_grad


def test_permutation_and_shape():
    generator = torch.Generator().manual_seed(0)
    columns = torch.randn(3, 12, generator=generator)
    order = torch.randperm(12, generator=generator)
    whole = clipped_policy_loss(*columns, clip_low=0.1, clip_high=0.3)
    permuted = clipped_policy_loss(*columns[:, order], clip_low=0.1, clip_high=0.3)
    matrix = clipped_policy_loss(*columns.view(3, 3, 4), clip_low=0.1, clip_high=0.3)
    for i in range(2):
        assert torch.equal(whole[i][order], permuted[i])
        assert torch.equal(whole[i], matrix[i].view(-1))


def test_extremes():
    logps = torch.tensor([0.0, -1e4, -1e4], requires_grad=True)
    old_logps = torch.tensor([-1e4, 0.0, -1e4])
    assert log_ratio(logps, old_logps).tolist() == [20.0, -20.0, 0.0]
    assert log_ratio(logps, old_logps, max_log_ratio=3.0).tolist() == [3.0, -3.0, 0.0]
    terms, _ = clipped_policy_loss(
        logps, old_logps, torch.tensor([-1.0, -1.0, -1.0]), clip_low=0.2, clip_high=0.2
    )
    assert terms.tolist() == pytest.approx([math.exp(20), 0.8, 1.0])
    terms.sum().backward()
    assert logps.grad.tolist() == [0.0, 0.0, 1.0]
    empty = torch.zeros(0)
    assert [part.shape for part in clipped_policy_loss(empty, empty, empty, clip_low=0.2, clip_high=0.2)] == [
        (0,),
        (0,),
    ]


def test_shapes(unchecked):
    two, one = torch.zeros(2), torch.zeros(1)
    with pytest.raises(ShapeError, match="nothing is broadcast"):
        log_ratio(two, one)
    for arguments in ((two, one, two), (two, two, one), (one, two, two)):
        with pytest.raises(ShapeError, match="nothing is broadcast"):
            clipped_policy_loss(*arguments, clip_low=0.2, clip_high=0.2)
