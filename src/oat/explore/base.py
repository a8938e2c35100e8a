"""The explorer's protocol. An explorer chooses the sampled responses that are worth asking about. Its methods
are pure: the results depend only on the arguments."""

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from oat.types import Group, Key, Plan, Question

Scores = Mapping[str, Sequence[np.ndarray]]
"""The scores that an explorer reads, by name: for each name, one array per group. If the name is a slot, the
array is (G,), the log-probability of each sample in nats. `Actor.score` describes the other arrays."""


class Explorer(Protocol):
    needs: frozenset[str]
    """The names that `choose` reads in `scores`. The name of a slot stands for the log-probabilities of
    samples under this slot. "ensemble" stands for two names: "ensemble" (the rewards) and "features"."""

    def widen(self, plan: Plan) -> Plan:
        """Return the algorithm's plan, changed to the numbers of prompts and samples that the explorer
        chooses from. A run may call this several times for one step."""

    def choose(
        self, groups: Sequence[Group], keys: Sequence[Key], scores: Scores, generator: np.random.Generator
    ) -> list[Question]:
        """Return the questions, at most one for each group. The collector calls this once for each round.

        The field `oracle` of a question is "" if the oracle of training shall answer it, and "none" if no
        oracle shall answer it.

        Args:
            keys: for each group, the key that a question about it must have.
            generator: the only source of randomness.
        """
