import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oat.errors import ShapeError
from oat.functional.logprobs import token_entropy, token_logps
from oat.functional.preference import (
    bnf_loss,
    bnf_scores,
    bradley_terry,
    dpo_loss,
    dpo_margin,
    hinge_loss,
    ipo_loss,
    length_margin,
    positive_margin,
    robust_dpo_loss,
    simpo_margin,
)


def slow_log_sigmoid(x):
    return -math.log1p(math.exp(-x)) if x > 0 else x - math.log1p(math.exp(x))


def float64(*values):
    return torch.tensor(values, dtype=torch.float64)


def test_margin_by_hand():
    # (-10 - -14) - (-11 - -13) = 4 - 2 = 2; the policy moved the other way in the second pair: (-5 - -4) -
    # (-4 - -5) = -2.
    margin = dpo_margin(
        float64(-10.0, -5.0), float64(-14.0, -4.0), float64(-11.0, -4.0), float64(-13.0, -5.0)
    )
    assert margin.tolist() == [2.0, -2.0]


@pytest.mark.inventory(3)
def test_loss_by_hand():
    # beta h = log 3: sigmoid = 3/4, so -log(3/4) = log(4/3) and -log(1/4) = log 4. With smoothing 1/4: 3/4
    #     log(4/3) + 1/4 log 4.
    margin = float64(math.log(3.0) / 0.1, -math.log(3.0) / 0.1, 0.0)
    torch.testing.assert_close(dpo_loss(margin, beta=0.1), float64(math.log(4 / 3), math.log(4), math.log(2)))
    smoothed = [
        0.75 * math.log(4 / 3) + 0.25 * math.log(4),
        0.75 * math.log(4) + 0.25 * math.log(4 / 3),
        math.log(2),
    ]
    torch.testing.assert_close(dpo_loss(margin, beta=0.1, label_smoothing=0.25), float64(*smoothed))


@pytest.mark.inventory(4)
def test_labels_that_are_wrong_half_the_time_say_nothing():
    margin = float64(0.0, 0.7, 3.0, 12.0)
    torch.testing.assert_close(
        dpo_loss(margin, beta=0.4, label_smoothing=0.5), dpo_loss(-margin, beta=0.4, label_smoothing=0.5)
    )


def test_robust_loss_by_hand():
    # beta h = log 3 and flips of 1/4: (3/4 log(4/3) - 1/4 log 4) / (1 - 1/2).
    margin = float64(math.log(3.0) / 0.1)
    expected = float64(1.5 * math.log(4 / 3) - 0.5 * math.log(4))
    torch.testing.assert_close(robust_dpo_loss(margin, beta=0.1, label_smoothing=0.25), expected)


def test_the_robust_loss_of_flipped_labels_is_on_average_that_of_the_right_ones():
    margin, flips = float64(-5.0, 0.0, 0.3, 8.0), 0.2
    right, flipped = (robust_dpo_loss(sign * margin, beta=0.7, label_smoothing=flips) for sign in (1, -1))
    torch.testing.assert_close((1 - flips) * right + flips * flipped, dpo_loss(margin, beta=0.7))


@pytest.mark.inventory(6)
def test_length_margin_by_hand():
    # Five tokens longer at 0.02 a token: beta h rises by 0.1, from 0.1 * 1 to 0.2. Three shorter: it falls by
    #     0.06.
    margin = length_margin(float64(1.0, 1.0), float64(15.0, 7.0), float64(10.0, 10.0), alpha=0.02, beta=0.1)
    torch.testing.assert_close(0.1 * margin, float64(0.2, 0.04))


@pytest.mark.inventory(5)
def test_positive_margin_by_hand():
    # The chosen fell by 1 nat: 2 - 3 * 1. It rose, or stayed: as in DPO.
    margin = positive_margin(
        float64(2.0, 2.0, 2.0), float64(-10.0, -8.0, -9.0), float64(-9.0, -9.0, -9.0), weight=3.0
    )
    assert margin.tolist() == [-1.0, 2.0, 2.0]
    plain = dpo_loss(float64(2.0, 2.0, 2.0), beta=0.1)
    assert (dpo_loss(margin, beta=0.1) > plain).tolist() == [True, False, False]


@pytest.mark.inventory(8)
def test_ipo_by_hand():
    # 1 / (2 * 1/4) = 2: (2 - 2)^2, (-1 - 2)^2, (5 - 2)^2.
    assert ipo_loss(float64(2.0, -1.0, 5.0), beta=0.25).tolist() == [0.0, 9.0, 9.0]


@pytest.mark.inventory(9)
def test_hinge_by_hand():
    assert hinge_loss(float64(1.0, -2.0, 2.0, 40.0), beta=0.5).tolist() == [0.5, 2.0, 0.0, 0.0]


@pytest.mark.inventory(10, 11)
def test_simpo_by_hand():
    # Means -1 and -2.5 a token, target margin 0.5 over beta: h = 1. At beta 2, log(1 + e^-2); by the hinge 0,
    # and 1 where h = 0.
    margin = simpo_margin(float64(-1.0, -2.0), float64(-2.5, -2.5), gamma_beta_ratio=0.5)
    assert margin.tolist() == [1.0, 0.0]
    torch.testing.assert_close(dpo_loss(margin, beta=2.0), float64(math.log(1 + math.exp(-2)), math.log(2)))
    assert hinge_loss(margin, beta=2.0).tolist() == [0.0, 1.0]
    assert simpo_margin(float64(-1.0), float64(-2.5), gamma_beta_ratio=0.75).item() == 0.75


# p and q of the sampled token, of two: the other has 1 - p. p = 1/4, q = 1/2: tau = 1/2, omega = (1/2) /
# (3/4) = 2/3, rest = 3/4 log(3/4); score = 1/2 log(1/4) + 1/2 log(3/4), slope 1/2 - 2/3 * 1/4 = 1/3. p = 1/2,
# q = 1/4: tau = 1, omega = 0: score = log(1/2), slope 1. The 1e-6 in the targets moves neither by more than a
# hundred-thousandth.
BNF_CASES = [
    (1 / 4, 1 / 2, 0.5 * math.log(1 / 4) + 0.5 * math.log(3 / 4), 1 / 3),
    (1 / 2, 1 / 4, math.log(1 / 2), 1.0),
]


@pytest.mark.parametrize(("p", "q", "score", "slope"), BNF_CASES)
def test_bnf_scores_by_hand(p, q, score, slope):
    logp = float64(math.log(p)).requires_grad_()
    entropy = -p * math.log(p) - (1 - p) * math.log(1 - p)
    found = bnf_scores(logp, float64(math.log(q)), float64(entropy))
    assert found.item() == pytest.approx(score, rel=1e-5)
    found.sum().backward()
    assert logp.grad.item() == pytest.approx(slope, rel=1e-5)
    # The slope below the reference, as the docstring has it.
    assert slope == pytest.approx(min(1.0, p / q * (1 - q) / (1 - p)))


@pytest.mark.inventory(12)
def test_bnf_loss_by_hand():
    # Scores -6 over 3 tokens and -4 over 2: by the shorter length 6/2 - 4/2 = 1; each by its own 6/3 - 4/2 =
    #     0. The second pair changes nothing.
    sums = float64(-6.0, -100.0), float64(-4.0, 7.0), float64(3.0, 1.0), float64(2.0, 1.0)
    assert bnf_loss(*sums)[0].item() == bnf_loss(*(column[:1] for column in sums)).item() == 1.0
    assert bnf_loss(*sums, own_length=True)[0].item() == 0.0
    assert bnf_loss(float64(-3.0), float64(0.0), float64(2.0), float64(0.0)).item() == 3.0


def frozen_bnf(logits, at, ids, reference):
    """Return scores written out over the whole vocabulary. Every stopped gradient is a constant, taken at the
    logits `at`."""
    scores = []
    for row, frozen, token, q in zip(
        logits.log_softmax(-1), at.softmax(-1), ids.tolist(), reference.exp(), strict=True
    ):
        p = frozen[token]
        tau = torch.clamp(p / (q + 1e-6), max=1)
        omega = (1 - tau + 1e-6) / (1 - p + 1e-6)
        others = sum(frozen[v] * row[v] for v in range(len(row)) if v != token)
        scores.append(tau * row[token] + omega * others)
    return torch.stack(scores)


@pytest.mark.fault("R22")
@pytest.mark.inventory(12)
def test_bnf_equals_its_whole_matrix_with_frozen_targets():
    generator = torch.Generator().manual_seed(0)
    at = 2 * torch.randn(6, 5, generator=generator, dtype=torch.float64)
    ids, reference = (
        torch.randint(0, 5, (6,), generator=generator),
        -6 * torch.rand(6, generator=generator, dtype=torch.float64),
    )
    logits = at.clone().requires_grad_()
    found = bnf_scores(token_logps(logits, ids), reference, token_entropy(logits))
    torch.testing.assert_close(found, frozen_bnf(at, at, ids, reference))
    found.sum().backward()
    differences = torch.zeros_like(at)
    for row in range(6):
        for v in range(5):
            step = torch.zeros_like(at)
            step[row, v] = 1e-5
            differences[row, v] = (
                frozen_bnf(at + step, at, ids, reference) - frozen_bnf(at - step, at, ids, reference)
            ).sum() / 2e-5
    torch.testing.assert_close(logits.grad, differences, rtol=1e-7, atol=1e-9)
    assert ((token_logps(at, ids) < reference).any(), (token_logps(at, ids) > reference).any()) == (
        True,
        True,
    )


def test_bradley_terry_by_hand():
    # Odds e^(d / scale): d = log 3 at scale 1 is 3 to 1; d = 2 log 3 at scale 2 the same.
    torch.testing.assert_close(
        bradley_terry(float64(math.log(3), 0.0, -math.log(3))), float64(0.75, 0.5, 0.25)
    )
    torch.testing.assert_close(bradley_terry(float64(2 * math.log(3)), scale=2.0), float64(0.75))
    assert bradley_terry(torch.zeros(2, 3)).shape == (2, 3)


@settings(derandomize=True, deadline=None, max_examples=50)
@given(st.lists(st.tuples(*[st.floats(-200, 0)] * 4), max_size=5), st.floats(0.01, 5), st.floats(0, 0.49))
def test_equals_slow_version(pairs, beta, label_smoothing):
    columns = [torch.tensor([pair[i] for pair in pairs], dtype=torch.float64) for i in range(4)]
    margin = dpo_margin(*columns)
    slow = [pair[0] - pair[1] - pair[2] + pair[3] for pair in pairs]
    torch.testing.assert_close(margin, torch.tensor(slow, dtype=torch.float64), rtol=1e-9, atol=1e-9)
    losses = [
        -(1 - label_smoothing) * slow_log_sigmoid(beta * h) - label_smoothing * slow_log_sigmoid(-beta * h)
        for h in slow
    ]
    expected = torch.tensor(losses, dtype=torch.float64)
    torch.testing.assert_close(
        dpo_loss(margin, beta=beta, label_smoothing=label_smoothing), expected, rtol=1e-9, atol=1e-9
    )
    probabilities = torch.tensor([math.exp(slow_log_sigmoid(h / beta)) for h in slow], dtype=torch.float64)
    torch.testing.assert_close(bradley_terry(margin, scale=beta), probabilities, rtol=1e-9, atol=1e-12)


PAIRS = st.lists(st.tuples(*[st.floats(-200, 0)] * 4, st.integers(1, 99), st.integers(1, 99)), max_size=5)


@settings(derandomize=True, deadline=None, max_examples=50)
@given(PAIRS, st.floats(0.01, 5), st.floats(0, 3), st.floats(0, 0.49))
def test_other_losses_equal_slow_versions(pairs, beta, weight, flips):
    policy_chosen, policy_rejected, reference_chosen, _, chosen_length, rejected_length = (
        torch.tensor([pair[i] for pair in pairs], dtype=torch.float64) for i in range(6)
    )
    margin = policy_chosen - policy_rejected
    found = [
        length_margin(margin, chosen_length, rejected_length, alpha=weight, beta=beta),
        positive_margin(margin, policy_chosen, reference_chosen, weight=weight),
        simpo_margin(policy_chosen, policy_rejected, gamma_beta_ratio=weight),
        ipo_loss(margin, beta=beta),
        hinge_loss(margin, beta=beta),
        robust_dpo_loss(margin, beta=beta, label_smoothing=flips),
        bnf_loss(policy_chosen, policy_rejected, chosen_length, rejected_length),
        bnf_loss(policy_chosen, policy_rejected, chosen_length, rejected_length, own_length=True),
    ]
    slow = []
    for a, b, c, _, n, m in pairs:
        h = a - b
        robust = ((1 - flips) * slow_log_sigmoid(beta * h) - flips * slow_log_sigmoid(-beta * h)) / (
            2 * flips - 1
        )
        hinge = 1 - beta * h if beta * h < 1 else 0.0
        positive = h if a >= c else h - weight * (c - a)
        shorter = n if n < m else m
        row = (
            h + weight * (n - m) / beta,
            positive,
            h - weight,
            (h - 0.5 / beta) ** 2,
            hinge,
            robust,
            (b - a) / shorter,
            b / m - a / n,
        )
        slow.append(row)
    for number, values in enumerate(found):
        torch.testing.assert_close(
            values, torch.tensor([row[number] for row in slow], dtype=torch.float64), rtol=1e-9, atol=1e-9
        )


def test_gradients_of_other_losses():
    chosen = float64(-1.0, -7.0).requires_grad_()
    rejected = float64(-2.0, -3.0).requires_grad_()
    reference = float64(-0.5, -8.0)
    lengths = float64(4.0, 6.0), float64(5.0, 2.0)
    for loss in (
        lambda c, r: dpo_loss(length_margin(c - r, *lengths, alpha=0.3, beta=0.7), beta=0.7),
        lambda c, r: dpo_loss(positive_margin(c - r, c, reference, weight=2.0), beta=0.7),
        lambda c, r: robust_dpo_loss(c - r, beta=0.7, label_smoothing=0.2),
        lambda c, r: ipo_loss(c - r, beta=0.7),
        lambda c, r: hinge_loss(c - r, beta=0.7),
        lambda c, r: dpo_loss(simpo_margin(c, r, gamma_beta_ratio=0.5), beta=0.7, label_smoothing=0.1),
        lambda c, r: hinge_loss(simpo_margin(c, r, gamma_beta_ratio=0.5), beta=0.7),
        lambda c, r: bnf_loss(c, r, *lengths),
        lambda c, r: bnf_loss(c, r, *lengths, own_length=True),
    ):
        assert torch.autograd.gradcheck(loss, (chosen, rejected))


def test_gradients():
    columns = [
        float64(-1.0, -7.0).requires_grad_(),
        float64(-2.0, -3.0).requires_grad_(),
        float64(-1.5, -6.0),
        float64(-2.5, -4.0),
    ]
    assert torch.autograd.gradcheck(
        lambda *c: dpo_loss(dpo_margin(*c), beta=0.7, label_smoothing=0.1), columns
    )
    assert torch.autograd.gradcheck(lambda d: bradley_terry(d, scale=0.5), (columns[0],))


@pytest.mark.inventory(3)
def test_sign_of_the_gradient_on_two_tokens():
    # One token each: descent raises the chosen and lowers the rejected one, by beta sigmoid(-beta h) = 1/2 at
    #     h = 0 and beta = 1.
    chosen, rejected = (torch.tensor([-1.0], requires_grad=True) for _ in range(2))
    dpo_loss(
        dpo_margin(chosen, rejected, torch.tensor([-1.0]), torch.tensor([-1.0])), beta=1.0
    ).sum().backward()
    assert (chosen.grad.item(), rejected.grad.item()) == (-0.5, 0.5)


def two_token_losses():
    """Return losses of pairs of one token each, as functions of log-probabilities, with beta 1. Some come
    with slopes by hand: the derivatives in the chosen and the rejected log-probability at margin 0."""
    one = torch.ones(1)
    entropy = torch.full((1,), math.log(2))
    return {
        "robust": (
            lambda c, r, q: robust_dpo_loss(dpo_margin(c, r, q, q), beta=1.0, label_smoothing=0.25),
            (-1.0, 1.0),
        ),
        "length": (
            lambda c, r, q: dpo_loss(
                length_margin(dpo_margin(c, r, q, q), one, one, alpha=3.0, beta=1.0), beta=1.0
            ),
            (-0.5, 0.5),
        ),
        "positive": (
            lambda c, r, q: dpo_loss(positive_margin(dpo_margin(c, r, q, q), c, q - 1, weight=3.0), beta=1.0),
            (-0.5, 0.5),
        ),
        "ipo": (lambda c, r, q: ipo_loss(dpo_margin(c, r, q, q), beta=1.0), (-1.0, 1.0)),
        "slic": (lambda c, r, q: hinge_loss(dpo_margin(c, r, q, q), beta=1.0), (-1.0, 1.0)),
        "simpo": (lambda c, r, q: dpo_loss(simpo_margin(c, r, gamma_beta_ratio=0.0), beta=1.0), (-0.5, 0.5)),
        "bnf": (
            lambda c, r, q: bnf_loss(bnf_scores(c, q, entropy), bnf_scores(r, q, entropy), one, one),
            (-1.0, 1.0),
        ),
    }


@pytest.mark.parametrize("name", two_token_losses())
def test_every_gradient_raises_the_chosen_and_lowers_the_rejected_token(name):
    loss, expected = two_token_losses()[name]
    chosen, rejected = (torch.tensor([math.log(0.5)], requires_grad=True) for _ in range(2))
    loss(chosen, rejected, torch.tensor([math.log(0.5)])).sum().backward()
    assert (chosen.grad.item(), rejected.grad.item()) == pytest.approx(expected, rel=1e-5)


def test_a_chosen_response_that_fell_is_pulled_back_harder():
    # 1 nat below the reference: h = -1 - 2 * 1 = -3, slope - sigmoid(3) (1 + 2) where DPO's is - sigmoid(1).
    chosen = float64(-2.0).requires_grad_()
    margin = dpo_margin(chosen, float64(-1.0), float64(-1.0), float64(-1.0))
    dpo_loss(positive_margin(margin, chosen, float64(-1.0), weight=2.0), beta=1.0).sum().backward()
    assert chosen.grad.item() == pytest.approx(-3 / (1 + math.exp(-3)))


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
    torch.testing.assert_close(
        dpo_margin(columns[0] - 3, columns[1] - 3, columns[2] - 8, columns[3] - 8), margin
    )
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


def test_extremes_of_other_losses():
    """With log-probabilities down to -1e4, every loss and gradient is finite and has the expected size."""
    far, near = torch.tensor([-1e4], requires_grad=True), torch.tensor([-1.0], requires_grad=True)
    one = torch.ones(1)
    for chosen, rejected in ((far, near), (near, far)):
        terms = [
            dpo_loss(length_margin(chosen - rejected, one, 1e4 * one, alpha=1.0, beta=0.1), beta=0.1),
            dpo_loss(positive_margin(chosen - rejected, chosen, -one, weight=50.0), beta=0.1),
            robust_dpo_loss(chosen - rejected, beta=0.1, label_smoothing=0.4),
            ipo_loss(chosen - rejected, beta=0.1),
            hinge_loss(simpo_margin(chosen, rejected, gamma_beta_ratio=0.5), beta=0.1),
        ]
        gradients = torch.autograd.grad(torch.cat(terms).sum(), (chosen, rejected))
        assert all(torch.isfinite(values).all() for values in (*terms, *gradients))
    assert ipo_loss(torch.tensor([-1e4]), beta=0.5).item() == pytest.approx(10_001.0**2)
    assert hinge_loss(torch.tensor([-1e4]), beta=1.0).item() == 10_001.0


def test_bnf_at_the_extremes():
    """The BNF scores of certain, impossible and unchanged tokens are finite. A token that the policy has made
    impossible gets no gradient."""
    logps = torch.tensor([-1e4, 0.0, 0.0, -1e4, -1e-9, 1e-7], requires_grad=True)
    reference, entropy = torch.tensor([-1.0, -1e4, 0.0, -1e4, -1.0, -1.0]), torch.zeros(6)
    scores = bnf_scores(logps, reference, entropy)
    scores.sum().backward()
    assert torch.isfinite(scores).all()
    assert torch.isfinite(logps.grad).all()
    assert (logps.grad.abs() <= 2).all()
    assert scores[0].item() == logps.grad[0].item() == 0.0


def test_invariances_of_other_losses():
    generator = torch.Generator().manual_seed(1)
    chosen, rejected, reference = -20 * torch.rand(3, 9, generator=generator, dtype=torch.float64)
    lengths = torch.randint(1, 20, (2, 9), generator=generator).double()
    order, margin = torch.randperm(9, generator=generator), chosen - rejected
    for loss in (
        lambda i: length_margin(margin[i], lengths[0, i], lengths[1, i], alpha=0.1, beta=0.2),
        lambda i: positive_margin(margin[i], chosen[i], reference[i], weight=2.0),
        lambda i: simpo_margin(chosen[i], rejected[i], gamma_beta_ratio=0.3),
        lambda i: ipo_loss(margin[i], beta=0.2),
        lambda i: hinge_loss(margin[i], beta=0.2),
        lambda i: bnf_scores(chosen[i], reference[i], -rejected[i]),
        lambda i: bnf_loss(chosen[i], rejected[i], lengths[0, i], lengths[1, i]),
    ):
        assert torch.equal(loss(order), loss(slice(None))[order])
    torch.testing.assert_close(length_margin(margin, lengths[0], lengths[0], alpha=0.1, beta=0.2), margin)
    torch.testing.assert_close(
        positive_margin(margin, chosen - 5, reference - 5, weight=2.0),
        positive_margin(margin, chosen, reference, weight=2.0),
    )
    torch.testing.assert_close(
        bnf_loss(chosen, rejected, *lengths), -bnf_loss(rejected, chosen, *lengths.flip(0))
    )
    torch.testing.assert_close(
        robust_dpo_loss(margin, beta=0.3, label_smoothing=0.0), dpo_loss(margin, beta=0.3)
    )


def test_empty():
    empty = torch.zeros(0)
    for values in (
        length_margin(empty, empty, empty, alpha=1.0, beta=1.0),
        positive_margin(empty, empty, empty, weight=1.0),
        simpo_margin(empty, empty, gamma_beta_ratio=1.0),
        robust_dpo_loss(empty, beta=1.0, label_smoothing=0.1),
        ipo_loss(empty, beta=1.0),
        hinge_loss(empty, beta=1.0),
        bnf_scores(empty, empty, empty),
        bnf_loss(empty, empty, empty, empty),
    ):
        assert values.shape == (0,)


def test_shapes_of_other_losses(unchecked):
    functions = {
        lambda a, b, c: length_margin(a, b, c, alpha=1.0, beta=1.0): 3,
        lambda a, b, c: positive_margin(a, b, c, weight=1.0): 3,
        lambda a, b: simpo_margin(a, b, gamma_beta_ratio=1.0): 2,
        bnf_scores: 3,
        bnf_loss: 4,
    }
    for function, count in functions.items():
        for odd in range(count):
            with pytest.raises(ShapeError, match="shapes disagree"):
                function(*(torch.zeros(1 if i == odd else 2) for i in range(count)))


def test_shapes(unchecked):
    columns = [torch.zeros(2)] * 4
    for i in range(4):
        with pytest.raises(ShapeError, match="shapes disagree"):
            dpo_margin(*(torch.zeros(1) if i == j else column for j, column in enumerate(columns)))
