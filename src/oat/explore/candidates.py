"""The samples of a group that a comparison may be about."""

import numpy as np

from oat.types import Group, Trajectory


def is_same(first: Trajectory, second: Trajectory, *, reads_text: bool) -> bool:
    """Return True if an oracle cannot tell two responses apart. Sampled responses count as equal if they have
    the same text (if `reads_text` is False: the same tokens). Recorded responses count as equal if they have
    the same tokens.

    Args:
        reads_text: True if the oracle reads texts. False if the values are recorded in the data, or are the
            rewards of episodes.
    """
    if reads_text and "recorded" not in (first.slot, second.slot):
        return first.text == second.text
    return np.array_equal(first.ids, second.ids)


def candidates_of(group: Group, *, reads_text: bool) -> np.ndarray:
    """Return `Round.candidates` of one group: (G,) bool.

    Args:
        reads_text: as in `is_same`.
    """
    found_G = np.zeros(len(group.trajectories), dtype=bool)
    seen: set[str | bytes] = set()
    for place, trajectory in enumerate(group.trajectories):
        by_text = reads_text and trajectory.slot != "recorded"
        name = trajectory.text if by_text else trajectory.ids.tobytes()
        is_whole = trajectory.finish_reason != "aborted" and trajectory.num_trained > 0
        if is_whole and name not in seen:
            seen.add(name)
            found_G[place] = True
    return found_G
