"""The tokens at which the rewards of steps and turns arrive, for estimators that credit tokens.

An answer has one number for a response, or a reward for each of its steps (`Answer.steps`). A trajectory with
an environment has a reward for each turn (`Segment.reward`). Estimators see both in the same way: as rewards
at some of the trajectory's trained tokens, which columns of the axis K have in the same order.

A reward arrives at the token that completes what it is for, since no earlier token decides it alone:

* For a step that ends at a character, this is the first token after which so many characters of the text are
  complete (`Segment.text_ends`). For a step that ends at a token, it is that token.
* For a turn, it is the last trained token of its segment.

If that token is not trained, the reward arrives at the last trained token before it. This happens if a step
ends in a part of the response that is masked, or in what the environment says. If no trained token comes
before it, the reward arrives nowhere: no action that is learned can have caused it. (`credit.py` then counts
it to the rest of the score, which is earned at the last trained token.) Rewards that arrive at one token are
added up.

If the offsets are characters, and the trajectory does not say where its text ends after each token, all of a
response's reward arrives at its last trained token, as one number does. A trajectory lacks this if it was
recorded before the oracle gave steps, or if the last message of a recorded response is not learned.
"""

import math
from collections.abc import Sequence

import numpy as np

from oat.errors import DataError
from oat.types import Steps, StepUnit, Trajectory

Places = tuple[np.ndarray, np.ndarray]
"""The tokens at which rewards arrive, as (S,) int64 ascending indices among the K trained tokens of a
trajectory, none twice; and (S,) float64 rewards."""


def step_tokens(trajectory: Trajectory, steps: Steps, unit: StepUnit) -> Places:
    """Return the trained tokens at which the rewards of a response's steps arrive; see the head of this file.

    Args:
        steps: pairs of an end and a reward, with ascending ends.
        unit: what the ends count: characters of the trajectory's text, or tokens after its prompt.

    Raises:
        DataError: an end lies outside the response. The ledger's check of answers lets no such end pass.
    """
    ends = np.array([end for end, _ in steps], dtype=np.int64)
    rewards = [reward for _, reward in steps]
    prompt = len(trajectory.segments[0].ids) if trajectory.segments else 0
    if unit == "tokens":
        _require_inside(ends, len(trajectory.completion), "tokens")
        return _placed(trajectory, prompt + ends - 1, rewards)
    number = max((n for n, s in enumerate(trajectory.segments) if s.author == "model"), default=-1)
    text_ends = trajectory.segments[number].text_ends if number >= 0 else None
    if text_ends is None:
        return _placed(trajectory, np.full(len(ends), len(trajectory.ids) - 1), rewards)
    _require_inside(ends, int(text_ends[-1]) if len(text_ends) else 0, "characters")
    first = sum(len(segment.ids) for segment in trajectory.segments[:number])
    return _placed(trajectory, first + np.searchsorted(text_ends, ends), rewards)


def turn_tokens(trajectory: Trajectory) -> Places:
    """Return the last trained token of each turn, and the turn's reward; see the head of this file. A segment
    without a reward is no turn."""
    ends = np.cumsum([len(segment.ids) for segment in trajectory.segments])
    turns = [
        (int(end) - 1, segment.reward)
        for end, segment in zip(ends, trajectory.segments, strict=True)
        if segment.reward is not None
    ]
    places = np.array([place for place, _ in turns], dtype=np.int64)
    return _placed(trajectory, places, [reward for _, reward in turns])


def _placed(trajectory: Trajectory, tokens: np.ndarray, rewards: Sequence[float]) -> Places:
    """Return the places of rewards that arrive at these tokens of the trajectory, which need not be trained.

    Args:
        tokens: (S,) indices among all tokens, ascending.
    """
    num_trained = np.cumsum(trajectory.trained)
    found: dict[int, list[float]] = {}
    for token, reward in zip(tokens, rewards, strict=True):
        index = int(num_trained[token]) - 1
        if index >= 0:
            found.setdefault(index, []).append(reward)
    indices = np.array(list(found), dtype=np.int64)
    return indices, np.array([math.fsum(each) for each in found.values()], dtype=np.float64)


def _require_inside(ends: np.ndarray, size: int, unit: StepUnit) -> None:
    outside = [int(end) for end in ends if not 0 < end <= size]
    if outside:
        raise DataError(
            f"a step ends after {outside[0]} {unit} of a response that has {size}; give ends from 1 to {size}"
        )
