"""The modes of an evaluation: which responses to the held-out prompts it measures.

Decides at which steps evaluations are due.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from oat.types import Feedback, Group, Sampling


@dataclass(frozen=True)
class Mode:
    """A way to sample responses to the held-out prompts, or a set of existing responses.

    Attributes:
        name: "sampled", "greedy", "best" or "online"; a part of the mode's metric names.
        samples: number of responses to each prompt that are evaluated.
        sampling: settings of sampling; None: the responses are `groups`.
        groups: the existing responses; empty if responses are sampled.
        best_of: number of sampled responses, of which the ensemble's best one is evaluated; 0: all sampled
            responses are evaluated.
    """

    name: str
    samples: int
    sampling: Sampling | None
    groups: Sequence[Group] = ()
    best_of: int = 0


def best_of(groups: Sequence[Group], rewards: Sequence[np.ndarray], count: int = 1) -> list[Group]:
    """Return the groups, each with only the responses of the highest mean reward: the best one of each of
    `count` equal parts, in order.

    Args:
        rewards: for each group, the rewards that an ensemble's members give its responses, (M, G). G is a
            multiple of `count`.
    """
    return [
        replace(group, trajectories=tuple(group.trajectories[place] for place in _best(rewards_MG, count)))
        for group, rewards_MG in zip(groups, rewards, strict=True)
    ]


def _best(rewards_MG: np.ndarray, count: int) -> np.ndarray:
    """Return the indices of the responses of the highest mean reward, one for each of `count` equal parts,
    (count,)."""
    parts = rewards_MG.mean(axis=0).reshape(count, -1)
    return parts.argmax(axis=1) + np.arange(count) * parts.shape[1]


def learned_from(feedback: Feedback) -> list[Mode]:
    """Return a list of one `Mode`, "online", with the responses that a step's questions were about. Each
    group is cut to the size of the smallest group. Branches are left out. The list is empty if the step took
    no feedback."""
    rows_of = [[item.group.trajectories[pick] for pick in item.question.picks] for item in feedback.asked]
    responses = [[row for row in rows if not row.branched_at] for rows in rows_of]
    size = min(map(len, responses), default=0)
    groups = [
        Group(replace(item.group.prompt, occurrence=place), tuple(own[:size]))
        for place, (item, own) in enumerate(zip(feedback.asked, responses, strict=True))
    ]
    return [Mode("online", size, None, groups)] if size else []


class Trigger:
    """Decides when an evaluation is due. All of these must have happened since the last evaluation began:

    * The number of steps has reached or passed a multiple of `every`.
    * Training has made at least `every_queries` queries.
    * The run has run for at least `every_hours` hours. The time of its earlier processes counts too.

    Only the third condition depends on a clock. If `every_hours` is 0, it always holds.
    """

    def __init__(self, every: int, every_queries: int = 0, every_hours: float = 0.0):
        self.every = every
        self.every_queries = every_queries
        self.every_hours = every_hours
        self.step = self.queries = 0
        self.seconds = 0.0
        self.before = 0.0
        self.began = time.monotonic()

    def due(self, step: int, queries: int) -> bool:
        """Return True if an evaluation is due after `step` updates and `queries` queries of training."""
        is_pending = step // self.every > self.step // self.every
        return (
            is_pending
            and queries - self.queries >= self.every_queries
            and self._now() - self.seconds >= 3600 * self.every_hours
        )

    def begin(self, step: int, queries: int) -> None:
        self.step = step
        self.queries = queries
        self.seconds = self._now()

    @property
    def state(self) -> dict[str, Any]:
        """The numbers of updates and of training queries when the last evaluation began, and two running
        times of the run in seconds: until that evaluation began, and until now."""
        return {"step": self.step, "queries": self.queries, "seconds": [self.seconds, self._now()]}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.step = state["step"]
        self.queries = state["queries"]
        self.seconds, self.before = state["seconds"]
        self.began = time.monotonic()

    def _now(self) -> float:
        return self.before + time.monotonic() - self.began
