"""Inputs for the check of an algorithm: made-up feedback and tiny models."""

import copy
import functools
from dataclasses import replace
from typing import Literal, cast

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from oat.learner.models import Critic, LanguageModel, Model, RewardModel
from oat.models.causal_lm import CausalLM
from oat.models.ensemble import Ensemble
from oat.testing.samples import END_ID, VOCABULARY, make_group
from oat.types import Answer, Feedback, Group, Item, Key, Mark, Plan, Question, Trajectory

Answered = Literal["all", "some", "none"]

MODELS = ("policy", "reference", "critic", "ensemble", "reward")
"""Names of the models that a run may have."""

_FEATURES = 8
_MARKS: dict[Answered, tuple[Mark, ...]] = {
    "all": ("ok",),
    "some": ("ok", "tie", "abstain", "failed"),
    "none": ("failed",),
}


def made_up_feedback(kind: str, plan: Plan, step: int, answered: Answered) -> Feedback:
    """Return made-up answers to questions about made-up responses. The recorded log-probabilities come from a
    tiny policy.

    Args:
        kind: the kind of questions, "compare" or "score".
        answered: "all": every answer has a value. "none": all answers failed. "some": there are values,
            abstentions, failures and (about pairs) ties; the responses come from the previous version of the
            weights; and all responses to the second prompt are equal.
    """
    return copy.deepcopy(_feedback(kind, plan.questions, tuple(plan.samples.items()), step, answered))


@functools.lru_cache(maxsize=32)
def _feedback(
    kind: str, questions: int, samples: tuple[tuple[str, int], ...], step: int, answered: Answered
) -> Feedback:
    generator = np.random.default_rng([step, len(answered)])
    policy = cast(LanguageModel, tiny_model("policy"))
    items = []
    for number in range(questions):
        version, text = (step - 1, "same" if number == 1 else None) if answered == "some" else (step, None)
        made = make_group(number, dict(samples), generator, version=version, text=text)
        group = replace(made, trajectories=tuple(_recorded(row, policy) for row in made.trajectories))
        marks = _MARKS[answered]
        items.append(_item(kind, group, step, marks[number % len(marks)], generator))
    return Feedback(step, tuple(items), queries=sum(item.answer.queries for item in items))


def tiny_model(name: str) -> Model:
    """Return a tiny model with random weights. The weights depend only on `name`."""
    return copy.deepcopy(_model(name))


@functools.cache
def _model(name: str) -> Model:
    if name == "ensemble":
        return Ensemble(
            features=_FEATURES, members=3, hidden=8, activation="relu", generator=np.random.default_rng(5)
        )
    shape = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "max_position_embeddings": 32,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(MODELS.index(name))
        lm = CausalLM(
            LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, eos_token_id=END_ID, **shape)).eval()
        )
    if name == "reward":
        return RewardModel(lm, np.random.default_rng(5), trailing=np.zeros(0, np.int32))
    return (
        Critic(lm, np.random.default_rng(5)) if name == "critic" else LanguageModel(lm, num_tokens=VOCABULARY)
    )


def _item(kind: str, group: Group, step: int, mark: Mark, generator: np.random.Generator) -> Item:
    """Return a question about a group, with a made-up answer."""
    key, size = Key("train", step, 0, group.prompt.occurrence), len(group.trajectories)
    if kind == "compare":
        features = generator.normal(size=(2, _FEATURES)).astype(np.float32)
        question = replace(Question.about(group, key, "compare", (0, 1)), oracle="made-up", features=features)
        p = float(generator.random())
        return Item(
            group,
            question,
            Answer(key, (p,), (mark,), queries=1, by="made-up"),
            int(p < 0.5) if mark == "ok" else None,
        )
    question = replace(Question.about(group, key, "score", tuple(range(size))), oracle="made-up")
    marks: tuple[Mark, ...] = tuple(
        "ok" if mark == "tie" or (mark == "abstain" and place > 0) else mark for place in range(size)
    )
    values = tuple(float(value) for value in generator.normal(size=size))
    return Item(group, question, Answer(key, values, marks, queries=size, by="made-up"), None)


@torch.no_grad()
def _recorded(row: Trajectory, policy: LanguageModel) -> Trajectory:
    """Return the trajectory with the log-probabilities of `policy` as the recorded ones."""
    logps = policy.outputs([row], {}, {"raw"})["raw"].numpy()
    return replace(
        row, segments=(row.segments[0], replace(row.segments[1], raw_logps=logps, sampled_logps=logps))
    )
