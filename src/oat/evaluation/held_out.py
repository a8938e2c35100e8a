"""Held-out pairs: recorded pairs from which nothing is learned. An evaluation measures the objective on them:
its loss, how often it prefers the chosen response, and by how much.

The loss is the objective's loss over all pairs together, under the current weights. No oracle is asked,
nothing is sampled, and training does not change. The reference's log-probabilities are computed once in a
process, and again after each change of the reference.

Records of evaluations: one file for each evaluation, with one line for each response.
"""

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from oat.algorithms.base import Objective, prepared
from oat.errors import DirectoryError, RecordError, printable
from oat.evaluation.modes import Trigger
from oat.explore.base import NoExploration
from oat.files import Standing, write_atomically
from oat.protocols import Learner
from oat.rollout.recorded import RecordedActor
from oat.seeds import Seeds
from oat.types import UNASKED, Answer, Feedback, Item, Key, Mark, Prompt, Question, Trajectory

RECORD = (
    "mode",
    "sample",
    "output",
    "reference",
    "generator",
    "value",
    "mark",
    "gold",
    "gold_mark",
    "answer",
)
"""The fields of a record, without two fields for the prompt. If the data's prompt column is `prompt`, these
two are `prompt` and `format_prompt`."""

TURNS = "turns"
"""The field that a record of an episode of several turns has besides those of `RECORD`."""


class RecordFiles:
    """Writes the files `directory/step_XXXXXXXX.jsonl`, one for each evaluation. Other programs see a file
    only when it is complete.

    Args:
        prompt_key: name of the prompt's column in the data.
        generator: name of the run.
        decode: function that returns the text of a prompt's ids.
        turns: function that returns the turns of an episode; None for an episode of one turn.
    """

    def __init__(
        self,
        directory: Path,
        *,
        prompt_key: str,
        generator: str,
        decode: Callable[[np.ndarray], str],
        turns: Callable[[Trajectory], list[dict[str, Any]] | None],
    ):
        self.directory = directory
        self.prompt_key = prompt_key
        self.generator = generator
        self.decode = decode
        self.turns = turns
        self._standing = Standing(directory)

    def record(self, prompt: Prompt, response: Trajectory, fields: Mapping[str, object]) -> dict[str, object]:
        """Return the record of one response.

        It has the prompt as the data have it, the prompt as the model read it, the response, the reference,
        the name of the run, and `fields`. That of an episode of several turns also has the turns; its
        response is the last one.
        """
        turns = self.turns(response)
        return {
            self.prompt_key: raw_prompt(prompt),
            f"format_{self.prompt_key}": self.decode(response.segments[0].ids),
            "output": response.text,
            "reference": prompt.reference,
            "generator": self.generator,
            **fields,
            **({TURNS: turns} if turns else {}),
        }

    def write(self, step: int, records: Sequence[Mapping[str, object]]) -> None:
        """Write the file of an evaluation.

        Args:
            step: number of updates before the evaluation.

        Raises:
            DirectoryError: the folder existed earlier, and was removed or replaced while this process ran.
            RecordError: the file cannot be written.
        """
        self._standing.refuse_lost(DirectoryError)
        lines = [printable(json.dumps(record, ensure_ascii=False)) for record in records]
        try:
            self.directory.mkdir(exist_ok=True)
            self._standing = Standing(self.directory)
            write_atomically(self.directory / f"step_{step:08d}.jsonl", "\n".join(lines) + "\n")
        except OSError as error:
            raise RecordError(
                f"{error.filename}: the records cannot be written ({error.strerror}); make room, or mend "
                "what is wrong there"
            ) from error


def raw_prompt(prompt: Prompt) -> str | list[dict[str, Any]]:
    """Return a prompt as text if it is a single user message without further fields; else as messages."""
    if len(prompt.messages) == 1 and prompt.messages[0].role == "user" and not prompt.messages[0].fields:
        return prompt.messages[0].content
    return [message.plain for message in prompt.messages]


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
