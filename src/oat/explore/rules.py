"""Rules that need no ensemble."""

from collections.abc import Sequence

import numpy as np

from oat.errors import ConfigError
from oat.explore.base import Scores
from oat.types import UNASKED, Group, Key, Kind, Plan, Question


class NoExploration:
    """Asks about what was sampled: every sample's score, or which of the two samples is better.

    Two samples with the same text have no better one; that question goes to the oracle "none" and costs nothing.
    """

    needs: frozenset[str] = frozenset()

    def __init__(self, kind: Kind):
        self.kind: Kind = kind

    def widen(self, plan: Plan) -> Plan:
        return plan

    def choose(self, groups: Sequence[Group], keys: Sequence[Key], scores: Scores, generator: np.random.Generator) -> list[Question]:
        """One question a group, about all of its samples, in their order.

        Raises:
            ConfigError: a comparison of more or fewer than two samples.
        """
        return [self._ask(group, key) for group, key in zip(groups, keys, strict=True)]

    def _ask(self, group: Group, key: Key) -> Question:
        texts = tuple(trajectory.text for trajectory in group.trajectories)
        if self.kind == "compare" and len(texts) != 2:
            raise ConfigError(f"a comparison without an explorer needs 2 samples a prompt, not {len(texts)}; set 2 samples, or choose an explorer")
        unaskable = self.kind == "compare" and texts[0] == texts[1]
        return Question.about(group, key, self.kind, tuple(range(len(texts))), oracle=UNASKED if unaskable else "")
