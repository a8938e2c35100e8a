"""The explorer's protocol: which of the sampled responses are worth asking about. An explorer is pure: what
it does is a function of its arguments."""

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from oat.types import Group, Key, Plan, Question

Scores = Mapping[str, Sequence[np.ndarray]]
"""By name of what was needed, one array a group: for a slot, (G,) sequence log-probabilities."""


class Explorer(Protocol):
    needs: frozenset[str]
    """What `choose` reads in its scores: slots whose sequence log-probabilities it wants."""

    def widen(self, plan: Plan) -> Plan:
        """The plan with the prompts and samples that the explorer chooses among."""

    def choose(
        self, groups: Sequence[Group], keys: Sequence[Key], scores: Scores, generator: np.random.Generator
    ) -> list[Question]:
        """One question for each group it asks about; an unaskable one goes to the oracle "none"."""
