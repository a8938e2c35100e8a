"""The explorer's protocol. An explorer chooses the sampled responses that are worth asking about. Its methods
are pure: the results depend only on the arguments."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from oat.types import Group, Key, Plan, Question

Scores = Mapping[str, Sequence[np.ndarray]]
"""The scores that an explorer reads, by name: for each name, one array per group. If the name is a slot, the
array is (G,), the log-probability of each sample in nats. `Actor.score` describes the other arrays. The
groups may have different sizes G."""


@dataclass(frozen=True, eq=False)
class Round:
    """What an explorer chooses from.

    Attributes:
        groups: one for each prompt of the round.
        keys: for each group, the key that a question about it must have.
        scores: by the names that the explorer needs.
        candidates: for each group, (G,) bool, True for the samples that a comparison may be about: those with
            a trained token, whose episode was not aborted, and which differ from every sample before them.
        pairs: number of compared pairs for which the steps before this one took an oracle's paid answer.
            Burn-in periods and schedules may count them, or the steps (`step`).
        generator: the only source of randomness.
    """

    groups: Sequence[Group]
    keys: Sequence[Key]
    scores: Scores
    candidates: Sequence[np.ndarray]
    pairs: int
    generator: np.random.Generator

    @property
    def step(self) -> int:
        """Number of the step that samples the round."""
        return self.keys[0].step if self.keys else 0


class Explorer(Protocol):
    needs: frozenset[str]
    """The names that `choose` reads in `Round.scores`. The name of a slot stands for the log-probabilities of
    samples under this slot. "ensemble" stands for two names: "ensemble" (the rewards) and "features".
    "features" alone needs no ensemble."""

    def widen(self, plan: Plan) -> Plan:
        """Return the algorithm's plan, changed to the numbers of prompts and samples that the explorer
        chooses from. A run may call this several times for one step."""

    def choose(self, round: Round) -> list[Question]:
        """Return the questions, at most one for each group. The collector calls this once for each round.

        The field `oracle` of a question is "" if the oracle of training shall answer it, "none" if no oracle
        shall answer it, and "ensemble" if the ensemble's belief is its answer.

        The field `notes` of a question may have numbers, by name. A step reports, for each name, the mean
        over its questions, as `explorer/NAME` for the names of `oat.metrics`, and as `user/explorer/NAME` for
        any other.
        """
