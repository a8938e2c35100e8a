"""The adaptive coefficient of an entropy bonus: by hand, against whole numbers of steps, and in a closed
loop."""

import math
import random

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


@pytest.mark.parametrize("seed", range(4))
def test_coefficients_are_whole_numbers_of_steps(seed: int) -> None:
    """A counter that is raised and lowered by 1 between 0 and 8, times the step of 1/256, which is exact."""
    draw = random.Random(seed)
    coef, counter = 3 / 256, 3
    for _ in range(60):
        entropy = draw.choice([0.1, 0.4, 0.5, 0.6, 1.5])
        counter = sorted((0, counter + (1 if entropy <= 0.5 else -1), 8))[1]
        coef = adapted_entropy_coef(coef, entropy, target=0.5, step=1 / 256, highest=8 / 256)
        assert coef == counter / 256


def test_the_coefficient_follows_itself_and_not_the_size_of_the_entropy() -> None:
    """Its derivative is 1 by the coefficient before, and 0 at a bound; by the entropy it is 0."""
    common = {"target": 0.5, "step": 0.01, "highest": 0.1}
    for coef, slope in ((0.05, 1.0), (0.095, 0.0)):
        found = [adapted_entropy_coef(coef + d, 0.3, **common) for d in (-1e-6, 1e-6)]
        assert (found[1] - found[0]) / 2e-6 == pytest.approx(slope, abs=1e-6)
    assert len({adapted_entropy_coef(0.05, entropy, **common) for entropy in (0.0, 0.3, 0.49)}) == 1


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
