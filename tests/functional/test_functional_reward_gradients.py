"""Derivatives of advantages, returns and filters with respect to rewards and values, in float64. Where a part
is stopped or constant by design, the derivative by differences is compared with its formula, and autograd's
with what is left."""

from collections.abc import Callable

import pytest
import torch

from oat.functional.advantages import (
    batch_centred,
    batch_scaled,
    best_of_group,
    clipped_advantages,
    group_advantages,
    leave_one_out,
    leave_one_out_max,
    leave_responses_out,
    length_weighted,
    standardised,
    whiten,
    whiten_biased,
    whiten_in_groups,
)
from oat.functional.returns import affine_scan, discounted_returns, gae
from oat.functional.reward_shaping import Moments, clip_filter_weights, normalised
from oat.functional.token_filters import covariances, outside_covariance_band, top_share, top_share_of_rows
from oat.functional.values import monte_carlo_values, step_advantages, vtrace

Function = Callable[..., torch.Tensor]
GROUPS = torch.tensor([0, 1, 0, 1, 1, 0, 2])
VALID = torch.tensor([True, True, True, True, False, True, True])
MASK = VALID.double()
LENGTHS = torch.tensor([3.0, 1.0, 4.0, 2.0, 5.0, 2.0, 6.0], dtype=torch.float64)
GROUPED = {"valid_N": VALID}
RESPONSES = torch.tensor([0, 0, 1, 2, 2, 3, 4])
OF_RESPONSES = torch.tensor([0, 0, 0, 0, 0, 1, 1])
"""The response of each of seven rewards, and its group."""
ROWS = torch.tensor([0, 0, 0, 1, 2, 2, 2])
"""The row of each of seven tokens."""
FACTORS = torch.tensor([0.5, 0.9, 0.0, 0.0, 0.3, 0.8, 0.0], dtype=torch.float64)
GAMMA, LAM = 0.9, 0.7


def numbers(seed: int = 0) -> torch.Tensor:
    """Return seven different numbers, none at a bound."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(7, generator=generator, dtype=torch.float64)


# In groups without spread the root of `group_norm` has no derivative, so here no group of it has one reward.
SMOOTH: dict[str, Function] = {
    "group_mean": lambda r: group_advantages(r, GROUPS, 3, normalise=False, **GROUPED),
    "group_norm": lambda r: group_advantages(r, GROUPS.clamp(max=1), 2, **GROUPED),
    "leave_one_out": lambda r: leave_one_out(r, GROUPS, 3, **GROUPED),
    "leave_responses_out": lambda r: leave_responses_out(
        r, RESPONSES, OF_RESPONSES, 2, valid_E=VALID, largest=False
    ),
    "length_weighted": lambda r: length_weighted(r, LENGTHS, GROUPS, 3, **GROUPED),
    "batch_scaled": lambda r: batch_scaled(r, GROUPS, 3, **GROUPED),
    "batch_centred": lambda r: batch_centred(r, **GROUPED),
    "standardised": standardised,
    "whiten": lambda r: whiten(r, MASK),
    "whiten, mean kept": lambda r: whiten(r, MASK, shift_mean=False),
    "whiten_biased": lambda r: whiten_biased(r, MASK),
    "whiten_in_groups": lambda r: whiten_in_groups(r, MASK, GROUPS, 3),
    "clipped_advantages": lambda r: clipped_advantages(r, limit=0.5),
    "normalised": lambda r: normalised(r, Moments(5.0, 0.3, 7.0)),
    "affine_scan": lambda r: affine_scan(r, FACTORS),
    "monte_carlo_values": lambda r: monte_carlo_values(r[:6].view(2, 3), VALID[2:].repeat(2)[:6].view(2, 3)),
}


OF_ALL = ("clipped_advantages", "normalised", "standardised")
"""Functions of all seven numbers, of which none is missing."""


@pytest.mark.parametrize("name", SMOOTH)
def test_gradients_are_those_of_differences(name: str) -> None:
    rewards = numbers().requires_grad_()
    assert torch.autograd.gradcheck(SMOOTH[name], rewards)
    found = torch.autograd.functional.jacobian(SMOOTH[name], rewards)
    assert found.abs().max() > 0.1, "there is a gradient"
    if name not in (*OF_ALL, "affine_scan", "monte_carlo_values"):
        assert found[:, ~VALID].abs().max() == found[~VALID].abs().max() == 0


def test_gradients_of_the_advantages_of_steps_are_those_of_differences() -> None:
    rewards, values = numbers(0).requires_grad_(), numbers(1).requires_grad_()
    assert torch.autograd.gradcheck(lambda r, v: step_advantages(r, v, ROWS, gamma=GAMMA), (rewards, values))


def differences(function: Function, given: torch.Tensor) -> torch.Tensor:
    """Return the derivative of each result with respect to each number, by central differences."""
    step = 1e-5
    columns = []
    for place in range(len(given)):
        up, down = given.clone(), given.clone()
        up[place] += step
        down[place] -= step
        columns.append((function(up) - function(down)) / (2 * step))
    return torch.stack(columns, 1)


def before(rate: Callable[[int, int], float]) -> torch.Tensor:
    """Return the matrix of `rate(k, m)` for the tokens m of k's row that are not before k; 0 elsewhere."""
    return torch.tensor(
        [[rate(k, m) if m >= k and ROWS[k] == ROWS[m] else 0.0 for m in range(7)] for k in range(7)],
        dtype=torch.float64,
    )


DECAY = GAMMA * LAM
RATIOS = torch.tensor([0.5, 1.6, 0.8, 1.2, 0.4, 0.9, 2.0], dtype=torch.float64)
WEIGHTS = RATIOS.clamp(max=1)


def trace(begin: int, end: int) -> float:
    """Return the product of the V-trace factors of the tokens from `begin` to before `end`."""
    return float((DECAY * WEIGHTS[begin:end]).prod())


def of_vtrace(place: int) -> Function:
    return lambda r: vtrace(r, numbers(1), RATIOS, ROWS, gamma=GAMMA, lam=LAM)[place]


STOPPED: dict[str, tuple[Function, torch.Tensor]] = {
    "discounted_returns": (
        lambda r: discounted_returns(r, ROWS, 3, gamma=GAMMA),
        before(lambda k, m: GAMMA ** (m - k)),
    ),
    "gae, rewards": (
        lambda r: gae(r, numbers(1), ROWS, 3, gamma=GAMMA, lam=LAM),
        before(lambda k, m: DECAY ** (m - k)),
    ),
    "gae, values": (
        lambda v: gae(numbers(1), v, ROWS, 3, gamma=GAMMA, lam=LAM),
        before(lambda k, m: -1.0 if m == k else DECAY ** (m - 1 - k) * (GAMMA - DECAY)),
    ),
    "vtrace, targets": (of_vtrace(0), before(lambda k, m: trace(k, m) * float(WEIGHTS[m]))),
    "vtrace, advantages": (
        of_vtrace(1),
        before(lambda k, m: 1.0 if m == k else DECAY * trace(k + 1, m) * float(WEIGHTS[m])),
    ),
    "vtrace, weights": (of_vtrace(2), torch.zeros(7, 7, dtype=torch.float64)),
}
"""Functions whose results carry no gradient: advantages and targets are constants of an update. Each has its
derivative."""


@pytest.mark.parametrize("name", STOPPED)
def test_results_without_a_gradient_have_these_derivatives(name: str) -> None:
    function, expected = STOPPED[name]
    given = numbers().requires_grad_()
    assert not function(given).requires_grad
    torch.testing.assert_close(differences(function, given.detach()), expected, rtol=1e-8, atol=1e-8)


def test_the_largest_of_the_others_is_a_constant_of_the_gradient() -> None:
    """By differences, a reward counts 1 for itself, and -1 for those of which it is the largest other.
    Autograd gives the first part only: the baseline is stopped."""
    rewards = torch.tensor([1.0, 5.0, 2.0, 3.0, 9.0, 0.5, 4.0], dtype=torch.float64)
    # Group 0: places 0, 2, 5; group 1: 1 and 3, since 4 is missing; group 2: 6, which is alone. In the
    # second case the responses of group 0 have 1 and 5; 2; 3. Those of group 1 have 0.5; 4.
    best_other = {0: 2, 2: 0, 5: 2, 1: 3, 3: 1}
    of_responses = {0: 3, 1: 3, 2: 1, 3: 1, 5: 6, 6: 5}
    cases: list[tuple[Function, dict[int, int]]] = [
        (lambda r: leave_one_out_max(r, GROUPS, 3, **GROUPED), best_other),
        (
            lambda r: leave_responses_out(r, RESPONSES, OF_RESPONSES, 2, valid_E=VALID, largest=True),
            of_responses,
        ),
    ]
    for function, baseline in cases:
        own = torch.zeros(7, 7, dtype=torch.float64)
        whole = own.clone()
        for place, other in baseline.items():
            own[place, place] = whole[place, place] = 1.0
            whole[place, other] = -1.0
        torch.testing.assert_close(differences(function, rewards), whole, rtol=0, atol=1e-8)
        assert torch.equal(torch.autograd.functional.jacobian(function, rewards), own)


UNIFORMS = torch.tensor([0.3, 0.9, 0.1, 0.5, 0.7, 0.2, 0.6], dtype=torch.float64)
CHOICES: dict[str, Function] = {
    "best_of_group": lambda r: best_of_group(r, GROUPS, 3, **GROUPED),
    "clip_filter_weights": lambda r: clip_filter_weights(r, GROUPS, 3, valid_N=VALID, flat_weight=0.5),
    "top_share": lambda r: top_share(r, share=0.4),
    "top_share_of_rows": lambda r: top_share_of_rows(r, ROWS, 3, share=0.4),
    "outside_covariance_band": lambda r: outside_covariance_band(r, UNIFORMS, share=0.3, low=-1.0, high=1.0),
}


@pytest.mark.parametrize("name", CHOICES)
def test_choices_are_constant_between_ties(name: str) -> None:
    given = numbers().requires_grad_()
    found = CHOICES[name](given)
    assert not found.requires_grad
    assert len(found.unique()) == 2, "some are chosen, and some are not"
    assert differences(CHOICES[name], given.detach()).abs().max() == 0


def test_covariances_stop_the_gradient_of_the_log_probabilities() -> None:
    """c_t = (l_t - mean l) (A_t - mean A), so dc_t / dl_s = ([s = t] - 1/7) (A_t - mean A)."""
    logps, advantages = numbers().requires_grad_(), numbers(1)
    assert not covariances(logps, advantages).requires_grad
    centred = (advantages - advantages.mean())[:, None]
    expected = (torch.eye(7, dtype=torch.float64) - 1 / 7) * centred
    found = differences(lambda given: covariances(given, advantages), logps.detach())
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-8)
