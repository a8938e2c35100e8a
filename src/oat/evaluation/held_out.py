"""Held-out pairs: recorded pairs from which nothing is learned. An evaluation measures the objective on them:
its loss, how often it prefers the chosen response, and by how much.

The loss is the objective's loss over all pairs together, under the current weights. No oracle is asked,
nothing is sampled, and training does not change. The reference's log-probabilities are computed once in a
process, and again after each change of the reference.
"""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from oat.algorithms.base import Objective, prepared
from oat.evaluation.trigger import Trigger
from oat.explore.base import NoExploration
from oat.protocols import Learner
from oat.rollout.recorded import RecordedActor
from oat.seeds import Seeds
from oat.types import UNASKED, Answer, Feedback, Item, Key, Mark, Prompt, Question, Trajectory

HELD_OUT = "eval/pairs/"
"""The prefix of all metric names of held-out pairs."""
_OF_PAIRS = "pairs/"


class HeldOutPairs:
    """Measures an objective on recorded pairs.

    Args:
        objective: the run's objective, which learns from comparisons. Each measurement uses a copy of it.
        prompts: records with both responses of a pair.
    """

    def __init__(
        self,
        objective: Objective,
        prompts: Sequence[Prompt],
        actor: RecordedActor,
        learner: Learner,
        seeds: Seeds,
    ):
        self.objective = objective
        self.prompts = prompts
        self.actor = actor
        self.learner = learner
        self.seeds = seeds
        self._feedback: Feedback | None = None
        self._reference: tuple[int, dict[int, torch.Tensor]] = (-1, {})

    def measure(self) -> dict[str, float]:
        """Return the metrics of the pairs under the learner's current weights.

        A pair is left out if its data do not say which response is better, or if its responses are equal. If
        no pair is left, the only metric is the number of pairs, 0.
        """
        objective = copy.deepcopy(self.objective)
        batch = prepared(
            objective, self._items(), self._forward, self.seeds.at("prepare", objective.name, "held_out")
        )
        count = len(set(batch.unit_of_N.tolist()))
        if not count:
            return {f"{HELD_OUT}count": 0.0}
        found = self.learner.measure(objective, batch)
        named = {
            HELD_OUT + name.removeprefix(_OF_PAIRS): value
            for name, value in found.items()
            if name.startswith(_OF_PAIRS)
        }
        named |= {
            HELD_OUT + name.removeprefix("logps/"): found[name]
            for name in ("logps/reference_gap",)
            if name in found
        }
        return {f"{HELD_OUT}count": float(count), f"{HELD_OUT}loss": found["loss/total"], **named}

    def _items(self) -> Feedback:
        if self._feedback is None:
            groups = self.actor.sample(self.prompts, {}, ())
            keys = [Key("held_out", 0, 0, prompt.occurrence) for prompt in self.prompts]
            explorer = NoExploration("compare", reads_text=False)
            questions = [explorer.ask(group, key) for group, key in zip(groups, keys, strict=True)]
            items = [
                Item(group, question, _answer(question), _label(question))
                for group, question in zip(groups, questions, strict=True)
            ]
            self._feedback = Feedback(0, tuple(item for item in items if item.label is not None), 0)
        return self._feedback

    def _forward(self, model: str, rows: Sequence[Trajectory], wants: set[str]) -> dict[str, torch.Tensor]:
        """Return `Learner.forward` of these rows. The reference's raw log-probabilities are stored for each
        row until the reference changes."""
        if model != "reference" or wants != {"raw"}:
            return self.learner.forward(model, rows, wants)
        if self._reference[0] != self.learner.version(model):
            own = [
                item.group.trajectories[pick] for item in self._items().items for pick in item.question.picks
            ]
            parts = self.learner.forward(model, own, wants)["raw"].split([row.num_trained for row in own])
            self._reference = (
                self.learner.version(model),
                {id(row): part for row, part in zip(own, parts, strict=True)},
            )
        known: Mapping[int, torch.Tensor] = self._reference[1]
        return {"raw": torch.cat([known[id(row)] for row in rows])}


class OnlyPairs:
    """The evaluation of a run that has held-out pairs but no held-out prompts. It samples nothing and asks no
    oracle."""

    slot = ""

    def __init__(self, pairs: HeldOutPairs, trigger: Trigger):
        self.measure = pairs.measure
        self.trigger = trigger

    def due(self, step: int, queries: int) -> bool:
        return self.trigger.due(step, queries)

    def run(self, step: int, queries: int = 0, feedback: Feedback | None = None) -> dict[str, float]:
        self.trigger.begin(step, queries)
        return {}

    @property
    def state(self) -> dict[str, Any]:
        return self.trigger.state

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.trigger.load_state(state)


def _label(question: Question) -> int | None:
    first, second = (value for value in question.known if value is not None)
    return None if question.oracle == UNASKED or first == second else 0 if first > second else 1


def _answer(question: Question) -> Answer:
    label = _label(question)
    mark: Mark = "tie" if label is None else "ok"
    return Answer(
        question.key, (0.5 if label is None else float(label == 0),), (mark,), queries=0, by="recorded"
    )
