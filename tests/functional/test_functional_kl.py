import math

import jaxtyping
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oat.errors import ShapeError
from oat.functional.kl import KL_ESTIMATORS, adapted_coef, kl_k1, kl_k2, kl_k3, unbiased_kl

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


def test_shapes_of_unbiased_terms(unchecked):
    with pytest.raises(ShapeError, match=r"old_logps \(1,\)"):
        unbiased_kl("k3", torch.zeros(2), torch.zeros(2), torch.zeros(2), torch.zeros(1))


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


def enumerated(terms_of, *, old=None):
    """Return the mean, over tokens that the old policy drew, of terms that a function makes of three tokens'
    log-probabilities, and its gradient by the logits; and the gradients of KL(policy || reference) and
    KL(reference || policy)."""
    logits = torch.tensor([0.3, -1.0, 0.8], dtype=torch.float64, requires_grad=True)
    logps = logits.log_softmax(0)
    drawn = logps.exp().detach() if old is None else old
    mean = (drawn * terms_of(logps)).sum()
    forward = (logps.exp() * (logps - REFERENCE)).sum()
    backward = (REFERENCE.exp() * (REFERENCE - logps)).sum()
    gradients = [
        torch.autograd.grad(value, logits, retain_graph=True)[0] for value in (mean, forward, backward)
    ]
    return mean, forward, gradients


REFERENCE = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64).log()


def test_what_the_gradients_of_terms_estimate():
    zero = torch.zeros(3, dtype=torch.float64)
    of_k1, of_k2, of_k3 = (enumerated(lambda x, k=k: k(x, REFERENCE))[2] for k in ESTIMATORS)
    torch.testing.assert_close(of_k1[0], zero, rtol=0, atol=1e-12)
    torch.testing.assert_close(of_k2[0], of_k2[1], rtol=0, atol=1e-12)
    torch.testing.assert_close(of_k3[0], of_k3[2], rtol=0, atol=1e-12)
    assert (of_k3[0] - of_k3[1]).abs().max() > 0.01


@pytest.mark.parametrize("estimator", ["k1", "k3"])
@pytest.mark.parametrize("old", [None, [0.1, 0.6, 0.3]])
@pytest.mark.parametrize("is_one", [True, False])
def test_the_ratio_gives_the_divergence_and_its_gradient(estimator, old, is_one):
    """Also where the old policy is the policy: there the ratio is 1, but it has a gradient. The slopes of two
    tensors of log-probabilities, which are equal here, add up to that of one."""
    logits = torch.tensor([0.3, -1.0, 0.8], dtype=torch.float64)
    drawn = logits.softmax(0) if old is None else torch.tensor(old, dtype=torch.float64)
    terms = lambda x: unbiased_kl(estimator, x, REFERENCE, x if is_one else x.clone(), drawn.log())  # noqa: E731
    mean, divergence, (found, forward, _) = enumerated(terms, old=drawn)
    assert mean.item() == pytest.approx(divergence.item(), abs=1e-12)
    torch.testing.assert_close(found, forward, rtol=0, atol=1e-12)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
@pytest.mark.parametrize("bound", [0.1, 0.5])
def test_a_bound_leaves_the_mean_of_the_slopes_that_of_the_bounded_log_ratio(estimator, bound):
    """Over tokens that the old policy drew, the gradient is the mean of r clamp(d) grad log p: k1 adds r grad
    log p, of which the mean is 0."""
    drawn = torch.tensor([0.1, 0.6, 0.3], dtype=torch.float64)
    logits = torch.tensor([0.3, -1.0, 0.8], dtype=torch.float64)
    p, d = logits.softmax(0), (logits.log_softmax(0) - REFERENCE).clamp(-bound, bound)
    terms = lambda x: unbiased_kl(estimator, x, REFERENCE, x, drawn.log(), max_log_ratio=bound)  # noqa: E731
    found = enumerated(terms, old=drawn)[2][0]
    torch.testing.assert_close(found, p * d - p * (p * d).sum(), rtol=0, atol=1e-12)


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


D = [s * 10.0**n for n in range(-4, 1) for s in (-1, 1)] + [-60, -30, -25, -17, -5, -3, 3, 5, 17, 25, 60]
LOG_R = [-3.0, 0.0, 0.25, 5.0, 19.0]
PLAIN = [(name, bound, False) for name in ("k1", "k2", "k3") for bound in (None, 2.0, 10.0)]
UNBIASED = [(name, bound, True) for name in ("k1", "k3") for bound in (None, 2.0, 10.0)]


def statement(estimator, bound, is_unbiased, d, r):
    """Return the term of a token and its slope by the policy's log-probability, from Schulman's note and
    arXiv:2512.02556: grad r = r grad log p, so that r k3 has the slope r (k3(d) + 1 - e^-d) = r d."""
    b = d if bound is None else min(max(d, -bound), bound)
    value = {"k1": b, "k2": b * b / 2, "k3": math.expm1(-b) + b}[estimator]
    slope = {"k1": 1.0, "k2": b, "k3": -math.expm1(-b)}[estimator] if b == d else 0.0
    return (r * value, r * {"k1": b + 1, "k3": b}[estimator]) if is_unbiased else (value, slope)


@pytest.mark.parametrize(("estimator", "bound", "is_unbiased"), PLAIN + UNBIASED)
@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 2e-6), (torch.float64, 1e-11)])
def test_terms_and_slopes_are_those_of_the_papers(estimator, bound, is_unbiased, dtype, rtol):
    d, log_r = (x.flatten() for x in torch.meshgrid(torch.tensor(D), torch.tensor(LOG_R), indexing="ij"))
    logps = d.to(dtype).requires_grad_()
    reference, old = torch.zeros_like(logps), (logps - log_r).detach()
    if is_unbiased:
        found = unbiased_kl(estimator, logps, reference, logps, old, max_log_ratio=bound)
    else:
        found = KL_ESTIMATORS[estimator](logps, reference, max_log_ratio=bound)
    (slopes,) = torch.autograd.grad(found.sum(), logps)
    given = zip(logps.tolist(), (logps.double() - old.double()).exp().tolist(), strict=True)
    expected = torch.tensor(
        [statement(estimator, bound, is_unbiased, *pair) for pair in given], dtype=torch.float64
    ).T
    assert found.dtype == slopes.dtype == dtype
    torch.testing.assert_close(found.double(), expected[0], rtol=rtol, atol=0)
    torch.testing.assert_close(slopes.double(), expected[1], rtol=rtol, atol=0)


def test_a_ratio_beyond_its_bound_turns_no_slope():
    """r is clamped to e^20 and e^-20: the slope keeps the sign of d, and its size is r d."""
    logps = torch.tensor([25.0, 25.0, -25.0, -25.0], dtype=torch.float64, requires_grad=True)
    d = torch.tensor([3.0, -3.0, 3.0, -3.0], dtype=torch.float64)
    found = unbiased_kl("k3", logps, logps.detach() - d, logps, torch.zeros_like(d))
    (slopes,) = torch.autograd.grad(found.sum(), logps)
    torch.testing.assert_close(slopes, d * torch.tensor([20.0, 20.0, -20.0, -20.0]).double().exp())
