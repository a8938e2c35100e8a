"""The explorer's protocol. An explorer chooses the sampled responses that are worth asking about. Its methods
are pure: the results depend only on the arguments. The simplest explorer asks about every group.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from oat.errors import ConfigError
from oat.types import UNASKED, Feedback, Group, Key, Kind, Plan, Question, Trajectory

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

        The field `notes` of a question may have numbers, by name. For a user's explorer, a step reports the
        mean over its questions of each note as `user/explorer/NAME`.
        """

    def metrics(self, feedback: Feedback) -> dict[str, float]:
        """Return metrics of the questions that a step took, from what the ledger recorded of them. A user's
        explorer need not have this method."""


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


class NoExploration:
    """An explorer that asks one question about every group: to score all responses, or to compare the two.

    If the two responses of a comparison are equal (`is_same`), the question goes to the oracle "none" and
    costs nothing.

    Args:
        reads_text: as in `is_same`.
    """

    needs: frozenset[str] = frozenset()

    def __init__(self, kind: Kind, *, reads_text: bool = True):
        self.kind: Kind = kind
        self.reads_text = reads_text

    def widen(self, plan: Plan) -> Plan:
        """Return the plan unchanged."""
        return plan

    def choose(self, round: Round) -> list[Question]:
        """Return one question for each group, about all of its samples in their order.

        Raises:
            ConfigError: the kind of question is "compare", and a group does not have two samples.
        """
        return [self.ask(group, key) for group, key in zip(round.groups, round.keys, strict=True)]

    def metrics(self, feedback: Feedback) -> dict[str, float]:
        """Return no metrics, since the questions have no notes."""
        return {}

    def ask(self, group: Group, key: Key) -> Question:
        """Return the question about one group.

        Raises:
            ConfigError: as in `choose`.
        """
        size = len(group.trajectories)
        if self.kind == "compare" and size != 2:
            raise ConfigError(
                f"a comparison without an explorer needs 2 samples a prompt, not {size}; set 2 samples, "
                "or choose an explorer"
            )
        unaskable = self.kind == "compare" and is_same(*group.trajectories, reads_text=self.reads_text)
        return Question.about(group, key, self.kind, tuple(range(size)), oracle=UNASKED if unaskable else "")
