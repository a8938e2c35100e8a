"""The adaptive coefficient of an entropy bonus: by hand, and in a closed loop."""

import math

import pytest

from oat.functional.entropy import adapted_entropy_coef, applied_entropy_coef


@pytest.mark.parametrize(
    ("coef", "entropy", "expected"),
    [
        (0.01, 0.1, 0.015),
        (0.01, 0.3, 0.005),
        (0.01, 0.2, 0.015),  # at the target
        (0.003, 0.3, 0.0),  # the lower bound
        (0.038, 0.1, 0.04),  # the upper bound
        (0.01, math.nan, 0.01),
    ],
)
def test_a_step_by_hand(coef: float, entropy: float, expected: float) -> None:
    found = adapted_entropy_coef(coef, entropy, target=0.2, step=0.005, highest=0.04)
    assert found == pytest.approx(expected, abs=1e-15)


def test_bounds_may_be_others() -> None:
    assert adapted_entropy_coef(-0.01, 1.0, target=0.2, step=0.005, lowest=-0.012) == -0.012
    assert adapted_entropy_coef(0.999, 0.1, target=0.2, step=0.005) == 1.0


def test_only_a_policy_at_or_below_its_target_gets_a_bonus() -> None:
    found = [applied_entropy_coef(0.02, entropy, target=0.2) for entropy in (0.1, 0.2, 0.21, math.nan)]
    assert found == [0.02, 0.02, 0.0, 0.0]


@pytest.mark.parametrize("entropy", [0.0, 2.0])
def test_in_a_closed_loop_the_entropy_comes_to_its_target(entropy: float) -> None:
    """The entropy sinks by 0.05 a step, and rises by 10 times the coefficient. With the opposite direction of
    the step it ends elsewhere."""
    ends = []
    for sign in (1, -1):
        coef, now = 0.0, entropy
        for _ in range(400):
            now = max(0.0, now - 0.05 + 10 * applied_entropy_coef(coef, now, target=1.0))
            coef = adapted_entropy_coef(coef, now, target=1.0, step=sign * 0.001, highest=0.1)
        ends.append(now)
    assert ends[0] == pytest.approx(1.0, abs=0.1)
    assert abs(ends[1] - 1.0) > 0.25
