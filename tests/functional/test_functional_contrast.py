"""Other losses of pairs, and the losses of single responses: numbers by hand, slow versions, gradients,
signs, extremes."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oat.errors import ShapeError
from oat.functional.contrast import (
    apo_down_loss,
    apo_zero_loss,
    cpo_loss,
    discopop_loss,
    exo_loss,
    kto_loss,
    nca_loss,
    orpo_loss,
    rank_matches,
    sppo_hard_loss,
)

LOG3 = math.log(3)


def float64(*values):
    return torch.tensor(values, dtype=torch.float64)


def test_exo_by_hand():
    # sigmoid(log 3) = 3/4: the label smoothed to (3/4, 1/4) itself; at h = 0, 1/2 log(2/3) + 1/2 log 2.
    torch.testing.assert_close(
        exo_loss(float64(2 * LOG3, 0.0), beta=0.5, label_smoothing=0.25), float64(0.0, 0.5 * math.log(4 / 3))
    )


def test_nca_by_hand():
    # r = log 3 and -log 3: -log(3/4) - 1/2 log(1/4) - 1/2 log(3/4).
    found = nca_loss(float64(2 * LOG3, 0.0), float64(-2 * LOG3, 0.0), beta=0.5)
    torch.testing.assert_close(found, float64(1.5 * math.log(4 / 3) + 0.5 * math.log(4), 2 * math.log(2)))


def test_apo_by_hand():
    # r = (log 3, -log 3): 1/4 + 1/4; both 0: 1/2 + 1/2.
    torch.testing.assert_close(
        apo_zero_loss(float64(2 * LOG3, 0.0), float64(-2 * LOG3, 0.0), beta=0.5), float64(0.5, 1.0)
    )
    # r = (log 3, 0): 3/4 + 1/4; (0, -log 3): 1/2 + 1/4; (-log 3, -2 log 3): 1/4 + 1/4.
    found = apo_down_loss(float64(2 * LOG3, 0.0, -2 * LOG3), float64(0.0, -2 * LOG3, -4 * LOG3), beta=0.5)
    torch.testing.assert_close(found, float64(1.0, 0.75, 0.5))


def test_sppo_by_hand():
    # Targets 2 and -2 at beta 1/4: (1 - 2)^2 + (-3 + 2)^2; met exactly; missed by 2 each.
    assert sppo_hard_loss(float64(1.0, 2.0, 0.0), float64(-3.0, -2.0, 0.0), beta=0.25).tolist() == [
        2.0,
        0.0,
        8.0,
    ]


def test_discopop_by_hand():
    # tau 1: a mixture of 3/4 at log 3, where exp(-log 3) = 1/3; one half at 0.
    found = discopop_loss(float64(2 * LOG3, 0.0), beta=0.5, tau=1.0)
    torch.testing.assert_close(found, float64(0.25 * math.log(4 / 3) + 0.25, 0.5 * math.log(2) + 0.5))


@pytest.mark.parametrize(
    ("tau", "slope"), [(0.05, 5 * (1 - math.log(2)) - 0.75), (0.5, 0.5 * (1 - math.log(2)) - 0.75)]
)
def test_discopop_begins_against_the_preference_at_a_small_tau(tau, slope):
    # m' (1 - log 2) - 1/4 - 1/2 with m' = 1 / (4 tau): above 0 at the paper's tau.
    margin = float64(0.0).requires_grad_()
    discopop_loss(margin, beta=1.0, tau=tau).sum().backward()
    assert margin.grad.item() == pytest.approx(slope)
    assert (slope > 0) == (tau == 0.05)


def test_orpo_by_hand():
    # p = 3/4 and 1/4: odds 3 and 1/3, so the ratio is 9 and the term -log(9/10).
    found = orpo_loss(float64(math.log(0.75), math.log(0.5)), float64(math.log(0.25), math.log(0.5)))
    torch.testing.assert_close(found, float64(-math.log(0.9), math.log(2)))


def test_cpo_by_hand():
    torch.testing.assert_close(
        cpo_loss(float64(2 * LOG3 - 5, -7.0), float64(-5.0, -7.0), beta=0.5),
        float64(-math.log(0.75), math.log(2)),
    )


def test_kto_by_hand():
    # beta (ratio - z) = log 3: a desirable response is 1/4 from certain, another 3/4.
    ratio, is_desirable = float64(2 * LOG3 + 1, 2 * LOG3 + 1, 1.0), torch.tensor([True, False, False])
    torch.testing.assert_close(
        kto_loss(ratio, is_desirable, float64(1.0, 1.0, 1.0), beta=0.5), float64(0.25, 0.75, 0.5)
    )


def test_ranks_by_hand():
    assert rank_matches(float64(3.0, 1.0, 2.0), float64(30.0, 10.0, 20.0)).tolist() == [0, 1, 2]
    assert rank_matches(float64(3.0, 1.0, 2.0), float64(10.0, 20.0, 30.0)).tolist() == [2, 0, 1]
    assert rank_matches(float64(0.0, 0.0), float64(5.0, 4.0)).tolist() == [1, 0], (
        "equal values keep their order"
    )
    assert rank_matches(torch.zeros(0), torch.zeros(0)).tolist() == []


@settings(derandomize=True, deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.floats(-50, 50), st.floats(-50, 50)), max_size=8))
def test_the_kth_smallest_meets_the_kth_smallest(pairs):
    """The k-th smallest value of one list is matched with the k-th smallest of the other. For a convex cost
    of the difference, this matching has the smallest sum."""
    first, second = (torch.tensor([pair[i] for pair in pairs], dtype=torch.float64) for i in range(2))
    places = rank_matches(first, second)
    assert sorted(places.tolist()) == list(range(len(pairs)))
    order = sorted(range(len(pairs)), key=lambda u: pairs[u][0])
    assert [second[places[u]].item() for u in order] == sorted(pair[1] for pair in pairs)


def slow_sigmoid(x):
    return 1 / (1 + math.exp(-x)) if x > -500 else 0.0


def slow_log_sigmoid(x):
    return -math.log1p(math.exp(-x)) if x > 0 else x - math.log1p(math.exp(x))


RATIOS = st.lists(st.tuples(st.floats(-60, 60), st.floats(-60, 60), st.booleans()), max_size=5)


@settings(derandomize=True, deadline=None, max_examples=50)
@given(RATIOS, st.floats(0.05, 3), st.floats(0.01, 0.49))
def test_equal_slow_versions(pairs, beta, smoothing):
    chosen, rejected = (torch.tensor([pair[i] for pair in pairs], dtype=torch.float64) for i in range(2))
    wanted = torch.tensor([pair[2] for pair in pairs], dtype=torch.bool)
    found = [
        exo_loss(chosen - rejected, beta=beta, label_smoothing=smoothing),
        nca_loss(chosen, rejected, beta=beta),
        apo_zero_loss(chosen, rejected, beta=beta),
        apo_down_loss(chosen, rejected, beta=beta),
        sppo_hard_loss(chosen, rejected, beta=beta),
        discopop_loss(chosen - rejected, beta=beta, tau=2 * smoothing),
        cpo_loss(chosen, rejected, beta=beta),
        kto_loss(chosen, wanted, torch.full_like(chosen, 1.5), beta=beta),
        orpo_loss(-chosen.abs() - 0.1, -rejected.abs() - 0.1),
    ]
    slow = []
    for c, r, is_wanted in pairs:
        x = beta * (c - r)
        q = slow_sigmoid(beta * (c - r))
        tau = 2 * smoothing
        exo = sum(
            p * (slow_log_sigmoid(s) - math.log(t))
            for p, s, t in ((q, x, 1 - smoothing), (slow_sigmoid(-x), -x, smoothing))
        )
        nca = -slow_log_sigmoid(beta * c) - (slow_log_sigmoid(-beta * c) + slow_log_sigmoid(-beta * r)) / 2
        zero = slow_sigmoid(-beta * c) + slow_sigmoid(beta * r)
        down = slow_sigmoid(beta * c) + slow_sigmoid(-x)
        sppo = (c - 1 / (2 * beta)) ** 2 + (r + 1 / (2 * beta)) ** 2
        mixed = slow_sigmoid(x / tau)
        discopop = -(1 - mixed) * slow_log_sigmoid(x) + math.exp(slow_log_sigmoid(x / tau) - x)
        kto = slow_sigmoid((-1 if is_wanted else 1) * beta * (c - 1.5))
        odds = [math.exp(-abs(v) - 0.1) / (1 - math.exp(-abs(v) - 0.1)) for v in (c, r)]
        slow.append(
            (
                exo,
                nca,
                zero,
                down,
                sppo,
                discopop,
                -slow_log_sigmoid(x),
                kto,
                -math.log(odds[0] / (odds[0] + odds[1])),
            )
        )
    for number, values in enumerate(found):
        torch.testing.assert_close(
            values, torch.tensor([row[number] for row in slow], dtype=torch.float64), rtol=1e-9, atol=1e-9
        )


LOSSES = {
    "exo": lambda c, r: exo_loss(c - r, beta=0.7, label_smoothing=0.1),
    "nca": lambda c, r: nca_loss(c, r, beta=0.7),
    "apo_zero": lambda c, r: apo_zero_loss(c, r, beta=0.7),
    "apo_down": lambda c, r: apo_down_loss(c, r, beta=0.7),
    "sppo_hard": lambda c, r: sppo_hard_loss(c, r, beta=0.7),
    "discopop": lambda c, r: discopop_loss(c - r, beta=0.7, tau=0.5),
    "orpo": orpo_loss,
    "cpo": lambda c, r: cpo_loss(c, r, beta=0.7),
    "kto": lambda c, r: kto_loss(
        torch.cat([c, r]),
        torch.arange(2 * len(c)) < len(c),
        torch.full_like(torch.cat([c, r]), 0.3),
        beta=0.7,
    ),
}
SLOPES = {
    "exo": (-0.25 * math.log(9) * 0.7, 0.25 * math.log(9) * 0.7),
    "nca": (-0.25 * 0.7, 0.25 * 0.7),
    "apo_zero": (-0.25 * 0.7, 0.25 * 0.7),
    "apo_down": (0.0, 0.25 * 0.7),
    "sppo_hard": (-1 / 0.7, 1 / 0.7),
    "discopop": (0.7 * (0.5 * (1 - math.log(2)) - 0.75), -0.7 * (0.5 * (1 - math.log(2)) - 0.75)),
    "cpo": (-0.5 * 0.7, 0.5 * 0.7),
}
"""Slopes by hand: the derivatives of each term in the log-ratios of the chosen and of the rejected response,
at 0."""


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_in_float64(name):
    chosen, rejected = float64(-1.0, -7.0, -0.4).requires_grad_(), float64(-2.0, -3.0, -0.1).requires_grad_()
    assert torch.autograd.gradcheck(LOSSES[name], (chosen, rejected))


@pytest.mark.parametrize("name", SLOPES)
def test_the_first_step(name):
    chosen, rejected = (torch.zeros(1, dtype=torch.float64, requires_grad=True) for _ in range(2))
    LOSSES[name](chosen, rejected).sum().backward()
    assert (chosen.grad.item(), rejected.grad.item()) == pytest.approx(SLOPES[name])


def test_the_first_step_of_kto_and_orpo():
    ratio = float64(1.0, 1.0).requires_grad_()
    kto_loss(ratio, torch.tensor([True, False]), float64(1.0, 1.0), beta=2.0).sum().backward()
    assert ratio.grad.tolist() == [-0.5, 0.5], "beta / 4 at the baseline"
    # log odds = a - log(1 - e^a) rises by 1 / (1 - p) = 2 at p = 1/2, and the log-sigmoid by 1/2 of that.
    logps = float64(math.log(0.5)), float64(math.log(0.5))
    gradients = torch.autograd.grad(orpo_loss(*(logp.requires_grad_() for logp in logps)).sum(), logps)
    assert [gradient.item() for gradient in gradients] == pytest.approx([-1.0, 1.0])


@pytest.mark.parametrize("name", LOSSES)
def test_extremes(name):
    """Log-ratios and log-probabilities have sizes up to 1e4, and some responses are certain. Every term and
    gradient of the losses is finite."""
    ends = (-1e4, -200.0, -1e-9, 0.0) if name == "orpo" else (-1e4, -200.0, 0.0, 200.0, 1e4)
    chosen, rejected = (
        values.flatten().requires_grad_()
        for values in torch.meshgrid(torch.tensor(ends), torch.tensor(ends), indexing="ij")
    )
    terms = LOSSES[name](chosen, rejected)
    gradients = torch.autograd.grad(terms.sum(), (chosen, rejected))
    assert all(values.isfinite().all() for values in (terms, *gradients))
    assert all(len(values) == len(ends) ** 2 for values in gradients)


def test_discopop_at_a_margin_far_below_zero():
    # Where TRL's product of an overflown exponential and a zero is no number.
    margin = torch.tensor([-100.0, -1e4], requires_grad=True)
    terms = discopop_loss(margin, beta=1.0, tau=0.05)
    terms.sum().backward()
    assert terms.tolist() == [100.0, 1e4]
    assert margin.grad.tolist() == [-1.0, -1.0]


def test_empty():
    empty = torch.zeros(0)
    assert all(LOSSES[name](empty, empty).shape == (0,) for name in LOSSES)


def test_shapes(unchecked):
    functions = [
        *(
            lambda a, b, loss=loss: loss(a, b, beta=1.0)
            for loss in (nca_loss, apo_zero_loss, apo_down_loss, sppo_hard_loss, cpo_loss)
        ),
        orpo_loss,
        rank_matches,
        lambda a, b: kto_loss(a, b > 0, a, beta=1.0),
    ]
    for function in functions:
        with pytest.raises(ShapeError, match="shapes disagree"):
            function(torch.zeros(2), torch.zeros(1))
