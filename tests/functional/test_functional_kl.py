import math

import jaxtyping
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oat.errors import ShapeError
from oat.functional.kl import KL_ESTIMATORS, adapted_coef, importance_weighted, kl_k1, kl_k2, kl_k3

ESTIMATORS = [kl_k1, kl_k2, kl_k3]
LOG2 = math.log(2.0)


def test_hand_worked():
    # d = 0, log 2, -log 2: k1 = d; k2 = d^2 / 2; k3 = e^-d - 1 + d = 0, 1/2 - 1 + log 2, 2 - 1 - log 2.
    logps = torch.tensor([-1.0, -1.0, -1.0 - LOG2], dtype=torch.float64)
    reference = torch.tensor([-1.0, -1.0 - LOG2, -1.0], dtype=torch.float64)
    torch.testing.assert_close(kl_k1(logps, reference), torch.tensor([0.0, LOG2, -LOG2], dtype=torch.float64))
    torch.testing.assert_close(
        kl_k2(logps, reference), torch.tensor([0.0, LOG2**2 / 2, LOG2**2 / 2], dtype=torch.float64)
    )
    torch.testing.assert_close(
        kl_k3(logps, reference), torch.tensor([0.0, LOG2 - 0.5, 1.0 - LOG2], dtype=torch.float64)
    )


def test_expectation_is_the_divergence():
    # Over all tokens, weighted by the policy: k1 and k3 give sum p log(p / q) exactly, here for p = (1/2,
    # 1/4, 1/4), q = (1/4, 1/4, 1/2): 1/2 log 2 + 0 - 1/4 log 2 = log(2) / 4.
    policy, reference = torch.tensor([0.5, 0.25, 0.25]), torch.tensor([0.25, 0.25, 0.5])
    for estimator in (kl_k1, kl_k3):
        assert (policy * estimator(policy.log(), reference.log())).sum().item() == pytest.approx(
            LOG2 / 4, abs=1e-7
        )


@settings(derandomize=True, deadline=None, max_examples=30)
@given(st.lists(st.tuples(st.floats(-30, 0), st.floats(-30, 0)), max_size=6))
def test_equals_slow_version(pairs):
    logps, reference = (torch.tensor([pair[i] for pair in pairs], dtype=torch.float64) for i in range(2))
    differences = [a - b for a, b in pairs]
    slow = [differences, [d * d / 2 for d in differences], [math.exp(-d) - 1 + d for d in differences]]
    for estimator, expected in zip(ESTIMATORS, slow, strict=True):
        torch.testing.assert_close(
            estimator(logps, reference), torch.tensor(expected, dtype=torch.float64), rtol=1e-9, atol=1e-12
        )
    assert (kl_k3(logps, reference) >= 0).all()


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_gradient(estimator):
    logps = torch.tensor([[-0.3, -2.0], [-5.0, -0.1]], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([[-1.0, -1.9], [-3.0, -0.1]], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(estimator, (logps, reference))


def test_sign_of_the_gradient_on_two_tokens():
    # Descending on k2 or k3 lowers the token that the policy has above the reference and raises the other; k1
    # lowers both alike.
    signs = {kl_k1: [1.0, 1.0], kl_k2: [1.0, -1.0], kl_k3: [1.0, -1.0]}
    for estimator, expected in signs.items():
        logps = torch.tensor([-1.0, -3.0], requires_grad=True)
        estimator(logps, torch.tensor([-2.0, -2.0])).sum().backward()
        assert logps.grad.sign().tolist() == expected


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_permutation_and_shape(estimator):
    generator = torch.Generator().manual_seed(0)
    logps, reference = -torch.rand(2, 12, generator=generator)
    order = torch.randperm(12, generator=generator)
    assert torch.equal(estimator(logps, reference)[order], estimator(logps[order], reference[order]))
    assert torch.equal(
        estimator(logps.view(3, 4), reference.view(3, 4)).view(-1), estimator(logps, reference)
    )
    assert estimator(logps[:0], reference[:0]).shape == (0,)


def test_extremes():
    low, high = torch.tensor([-1e4]), torch.tensor([0.0])
    assert [estimator(high, low).item() for estimator in ESTIMATORS] == [1e4, 5e7, 9999.0]
    assert kl_k3(low, high).item() == math.inf  # not clamped
    near = torch.tensor([-1e-6, -1e-5])
    assert (kl_k3(near, torch.zeros(2)) >= 0).all()


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_shapes(estimator, unchecked):
    with pytest.raises(ShapeError, match=r"logps \(2,\), reference_logps \(1,\)"):
        estimator(torch.zeros(2), torch.zeros(1))


def test_shapes_of_importance_weights(unchecked):
    with pytest.raises(ShapeError, match=r"old_logps \(1,\)"):
        importance_weighted(torch.zeros(2), torch.zeros(2), torch.zeros(1))


def test_signatures_are_executable():
    with pytest.raises(jaxtyping.TypeCheckError):
        kl_k1(torch.zeros(2), torch.zeros(1))


@pytest.mark.parametrize(
    ("divergence", "factor"),
    [
        (0.11, 1.01),  # error 0.1, over 1000 of 10000 responses
        (0.09, 0.99),
        (0.1, 1.0),
        (0.5, 1.02),  # error 4, clipped at 0.2
        (0.0, 0.98),  # error -1, clipped at -0.2
        (math.inf, 1.02),
        (math.nan, 1.0),
    ],
)
def test_a_coefficient_moves_towards_its_target(divergence, factor):
    found = adapted_coef(0.5, divergence, target=0.1, samples=1000, horizon=10_000)
    assert found == pytest.approx(0.5 * factor, rel=1e-12)


def test_many_small_steps_move_a_coefficient_as_far_as_few_large_ones():
    # A thousand responses, far off the target: (1 + 0.2 / 1000)^100 = 1.0202, and 1 + 0.02 at once.
    coef = 1.0
    for _ in range(100):
        coef = adapted_coef(coef, 9.0, target=1.0, samples=10, horizon=10_000)
    assert coef == pytest.approx(1.0002**100, rel=1e-12)
    assert coef == pytest.approx(adapted_coef(1.0, 9.0, target=1.0, samples=1000, horizon=10_000), rel=1e-3)


def enumerated(estimator, *, old=None):
    """Return the gradient, by the logits of three tokens, of an estimator's mean over tokens that the old
    policy drew; and the gradients of KL(policy || reference) and KL(reference || policy)."""
    logits = torch.tensor([0.3, -1.0, 0.8], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
    logps = logits.log_softmax(0)
    drawn = logps.exp().detach() if old is None else old
    terms = estimator(logps, reference.log())
    if old is not None:
        terms = importance_weighted(terms, logps, old.log())
    forward = (logps.exp() * (logps - reference.log())).sum()
    backward = (reference * (reference.log() - logps)).sum()
    mean = (drawn * terms).sum()
    gradients = [
        torch.autograd.grad(value, logits, retain_graph=True)[0] for value in (mean, forward, backward)
    ]
    return mean, forward, gradients


def test_what_the_gradients_of_terms_estimate():
    zero = torch.zeros(3, dtype=torch.float64)
    torch.testing.assert_close(enumerated(kl_k1)[2][0], zero, rtol=0, atol=1e-12)
    of_k2, forward, _ = enumerated(kl_k2)[2]
    torch.testing.assert_close(of_k2, forward, rtol=0, atol=1e-12)
    of_k3, forward, backward = enumerated(kl_k3)[2]
    torch.testing.assert_close(of_k3, backward, rtol=0, atol=1e-12)
    assert (of_k3 - forward).abs().max() > 0.01


@pytest.mark.parametrize("estimator", [kl_k1, kl_k3])
@pytest.mark.parametrize("old", [None, [0.1, 0.6, 0.3]])
def test_importance_weights_give_the_divergence_and_its_gradient(estimator, old):
    """Also where the old policy is the policy: there the ratio is 1, but it has a gradient."""
    logits = torch.tensor([0.3, -1.0, 0.8], dtype=torch.float64)
    drawn = logits.softmax(0) if old is None else torch.tensor(old, dtype=torch.float64)
    mean, divergence, (found, forward, _) = enumerated(estimator, old=drawn)
    assert mean.item() == pytest.approx(divergence.item(), abs=1e-12)
    torch.testing.assert_close(found, forward, rtol=0, atol=1e-12)


def test_importance_weights_by_hand():
    # r = 2 and 1/2, terms 3 and 4; by the log-probability the slope is r times the term
    terms = torch.tensor([3.0, 4.0], dtype=torch.float64, requires_grad=True)
    logps = torch.tensor([-1.0 + LOG2, -1.0 - LOG2], dtype=torch.float64, requires_grad=True)
    old = torch.full((2,), -1.0, dtype=torch.float64)
    weighted = importance_weighted(terms, logps, old)
    torch.testing.assert_close(weighted, torch.tensor([6.0, 2.0], dtype=torch.float64))
    slopes = torch.autograd.grad(weighted.sum(), (terms, logps))
    torch.testing.assert_close(slopes, [torch.tensor(v, dtype=torch.float64) for v in ([2, 0.5], [6.0, 2.0])])
    assert torch.autograd.gradcheck(lambda a, b: importance_weighted(a, b, old), (terms, logps))


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_a_clamp_of_the_log_ratio(estimator):
    """Inside the clamp nothing changes; beyond it the term is that of the bound, without gradient."""
    logps = torch.tensor([-1.0, -30.0, -0.5], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-2.0, -0.5, -30.0], dtype=torch.float64)
    found = estimator(logps, reference, max_log_ratio=20.0)
    bounds = torch.tensor([1.0, -20.0, 20.0], dtype=torch.float64)
    torch.testing.assert_close(found, estimator(bounds, torch.zeros_like(bounds)))
    (slopes,) = torch.autograd.grad(found.sum(), logps)
    assert slopes[1:].tolist() == [0.0, 0.0]
    assert slopes[0] != 0


def test_the_table_of_estimators():
    assert list(KL_ESTIMATORS.items()) == [("k1", kl_k1), ("k2", kl_k2), ("k3", kl_k3)]
