"""The tokens at which rewards of steps and turns arrive."""

from typing import Any

import numpy as np
import pytest

from oat.algorithms.step_rewards import step_tokens, turn_tokens
from oat.errors import DataError
from oat.types import Segment, Steps, Trajectory


def context(size: int, **fields: Any) -> Segment:
    return Segment("context", np.zeros(size, dtype=np.int32), **fields)


def model(size: int, ends: list[int] | None = None, masked: tuple[int, ...] = (), **fields: Any) -> Segment:
    """Return a response of `size` tokens, of which those at `masked` are not trained."""
    mask = np.array([t not in masked for t in range(size)], dtype=bool)
    text_ends = None if ends is None else np.array(ends, dtype=np.int32)
    return Segment("model", np.zeros(size, dtype=np.int32), mask=mask, text_ends=text_ends, **fields)


def row(*segments: Segment, text: str = "") -> Trajectory:
    return Trajectory("sampler", segments, "stop", text)


def plain(places: tuple[np.ndarray, np.ndarray]) -> dict[int, float]:
    indices, rewards = places
    assert (indices.dtype, rewards.dtype) == (np.int64, np.float64)
    assert indices.tolist() == sorted(set(indices.tolist()))
    return dict(zip(indices.tolist(), rewards.tolist(), strict=True))


ENDS = [0, 2, 2, 5, 6, 6]
"""A response of six tokens. The first has half a character, the third has none, the last ends the turn."""


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ((), {}),
        (((1, 1.0),), {1: 1.0}),
        (((2, 1.0), (3, 2.0), (6, 4.0)), {1: 1.0, 3: 2.0, 4: 4.0}),
        (((3, 0.1), (4, 0.2), (5, 0.3)), {3: 0.6}),
    ],
)
def test_a_step_in_characters_arrives_at_the_token_that_completes_it(
    steps: Steps, expected: dict[int, float]
) -> None:
    trajectory = row(context(3), model(6, ENDS))
    found = plain(step_tokens(trajectory, steps, "characters"))
    assert found == pytest.approx(expected)
    assert found.keys() == expected.keys()


def test_rewards_at_one_token_are_added_up_exactly() -> None:
    steps = tuple((end, reward) for end, reward in zip((3, 4, 5), (1e16, 1.0, -1e16), strict=True))
    assert plain(step_tokens(row(context(1), model(6, ENDS)), steps, "characters")) == {3: 1.0}


def test_a_step_in_tokens_counts_from_the_end_of_the_prompt() -> None:
    trajectory = row(context(3), model(2), context(2), model(3))
    steps = ((1, 1.0), (2, 2.0), (5, 4.0), (7, 8.0))
    assert plain(step_tokens(trajectory, steps, "tokens")) == {0: 1.0, 1: 2.0, 2: 4.0, 4: 8.0}


def test_what_ends_in_a_token_that_is_not_trained_arrives_before_it_or_nowhere() -> None:
    trajectory = row(context(3), model(4, [1, 2, 3, 4], masked=(0, 2)), context(2), model(2, [1, 2]))
    steps = ((1, 1.0), (2, 2.0), (3, 4.0), (5, 8.0), (6, 16.0), (7, 32.0))
    assert plain(step_tokens(trajectory, steps, "tokens")) == {0: 6.0, 1: 24.0, 2: 32.0}


def test_characters_are_those_of_the_last_response() -> None:
    trajectory = row(context(3), model(2, [1, 9]), context(2), model(3, [1, 3, 3]))
    assert plain(step_tokens(trajectory, ((1, 1.0), (3, 2.0)), "characters")) == {2: 1.0, 3: 2.0}
    ended_by_the_environment = row(*trajectory.segments, context(2))
    assert plain(step_tokens(ended_by_the_environment, ((3, 2.0),), "characters")) == {3: 2.0}


def test_without_ends_of_the_text_all_arrives_at_the_last_token() -> None:
    trajectory = row(context(3), model(4), context(1))
    assert plain(step_tokens(trajectory, ((1, 1.0), (3, 2.5)), "characters")) == {3: 3.5}
    assert plain(step_tokens(row(context(3)), ((1, 1.0),), "characters")) == {}


@pytest.mark.parametrize("unit", ["characters", "tokens"])
@pytest.mark.parametrize("end", [0, -1, 7])
def test_an_end_outside_is_refused(unit: Any, end: int) -> None:
    with pytest.raises(DataError, match=rf"a step ends after {end} {unit} of a response that has 6"):
        step_tokens(row(context(3), model(6, ENDS)), ((end, 1.0),), unit)


def test_a_turn_arrives_at_its_last_trained_token() -> None:
    trajectory = row(
        context(3),
        model(2, reward=1.0),
        context(2),
        model(3, masked=(2,), reward=-0.5),
        context(1),
        model(0, reward=0.25),
    )
    assert plain(turn_tokens(trajectory)) == {1: 1.0, 3: -0.25}
    assert plain(turn_tokens(row(context(3), model(2)))) == {}
    assert plain(turn_tokens(row(context(3), model(2, masked=(0, 1), reward=1.0)))) == {}


def test_the_first_token_of_a_text_without_a_prompt_is_not_trained() -> None:
    trajectory = row(model(3, [1, 2, 3]))
    assert plain(step_tokens(trajectory, ((1, 1.0), (2, 2.0), (3, 4.0)), "characters")) == {0: 2.0, 1: 4.0}
