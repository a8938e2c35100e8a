"""The explorer's protocol. An explorer chooses the sampled responses that are worth asking about. Its methods
are pure: the results depend only on the arguments."""

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from oat.types import Group, Key, Plan, Question

Scores = Mapping[str, Sequence[np.ndarray]]
"""The arrays that an explorer needs, by name, one for each group, as `Actor.score` returns them. For a slot
it is (G,), the log-probability of each sample."""


class Explorer(Protocol):
    needs: frozenset[str]
    """The names that `choose` reads in its scores: slots, for the log-probabilities of samples, or
    "ensemble", for its rewards and features."""

    def widen(self, plan: Plan) -> Plan:
        """Return the algorithm's plan with the prompts and samples that the explorer chooses among. A run
        calls this for each step, as often as it needs the plan."""

    def choose(
        self, groups: Sequence[Group], keys: Sequence[Key], scores: Scores, generator: np.random.Generator
    ) -> list[Question]:
        """Return one question for each group that the explorer asks about. The collector calls this once for
        each round.

        The oracle of a question is "none" if no oracle shall answer it, and "" if the oracle of training
        shall answer it.

        Args:
            keys: for each group, the key that a question about it must have.
            generator: the only source of randomness.
        """
