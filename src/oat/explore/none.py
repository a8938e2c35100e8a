"""The explorer that asks about every group."""

from collections.abc import Sequence

import numpy as np

from oat.errors import ConfigError
from oat.explore.base import Scores
from oat.types import UNASKED, Group, Key, Kind, Plan, Question, Trajectory


class NoExploration:
    """An explorer that asks one question about every group: to score all responses, or to compare the two.

    If the two responses of a comparison are equal, the question goes to the oracle "none" and costs nothing.
    Sampled responses count as equal if they have the same text (if `reads_text` is False: the same tokens).
    Recorded responses count as equal if they have the same tokens.

    Args:
        reads_text: True if the oracle reads texts. False if the values are recorded in the data, or are the
            rewards of episodes.
    """

    needs: frozenset[str] = frozenset()

    def __init__(self, kind: Kind, *, reads_text: bool = True):
        self.kind: Kind = kind
        self.reads_text = reads_text

    def widen(self, plan: Plan) -> Plan:
        return plan

    def choose(
        self, groups: Sequence[Group], keys: Sequence[Key], scores: Scores, generator: np.random.Generator
    ) -> list[Question]:
        """Return one question for each group, about all of its samples in their order.

        Raises:
            ConfigError: the kind of question is "compare", and a group does not have two samples.
        """
        return [self._ask(group, key) for group, key in zip(groups, keys, strict=True)]

    def _ask(self, group: Group, key: Key) -> Question:
        size = len(group.trajectories)
        if self.kind == "compare" and size != 2:
            raise ConfigError(
                f"a comparison without an explorer needs 2 samples a prompt, not {size}; set 2 samples, "
                "or choose an explorer"
            )
        unaskable = self.kind == "compare" and self._is_same(*group.trajectories)
        return Question.about(group, key, self.kind, tuple(range(size)), oracle=UNASKED if unaskable else "")

    def _is_same(self, first: Trajectory, second: Trajectory) -> bool:
        if self.reads_text and "recorded" not in (first.slot, second.slot):
            return first.text == second.text
        return np.array_equal(first.ids, second.ids)
