"""`is_usable` says of each answered question whether the algorithm learns from it, for every algorithm."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from oat.learner.learner import Learner
from oat.learner.optimiser import OptimiserSettings
from oat.plugins.registry import ALGORITHMS
from oat.seeds import Seeds
from oat.testing.made_up import made_up_feedback, tiny_model
from oat.types import Feedback, Item

OPTIONS: dict[str, dict[str, Any]] = {
    "dr_grpo": {"max_length": 8},
    "sft": {"threshold": 0.0},
    "reinforce_pp": {"whiten": False},
    "xpo": {"alpha": 0.0},
}
"""Options without which an algorithm cannot be made, would read no answers, learns from a group only beside
other groups, or learns from pairs without a winner too (the optimism term of XPO)."""


def made(name: str, **options: Any) -> Any:
    cls: Any = ALGORITHMS[name]
    return cls(cls.Config(prompts=8, **OPTIONS.get(name, {}), **options))


def learns(objective: Any, feedback: Feedback) -> bool:
    """Return True if an update on this feedback changes a weight."""
    learner = Learner(
        {name: tiny_model(name) for name in sorted(objective.requires.models)},
        {name: OptimiserSettings(1e-2) for name in objective.wants},
        micro_batch_size=None,
        seeds=Seeds(0),
    )
    weights = [p for part in learner.trained.values() for p in part.model.trainable().values()]
    before = [weight.detach().clone() for weight in weights]
    learner.update(objective, objective.prepare(feedback, learner.forward, np.random.default_rng(0)))
    return not all(torch.equal(*pair) for pair in zip(before, weights, strict=True))


def flat(feedback: Feedback) -> list[Item]:
    """Return the first of the questions that have scores, with equal scores."""
    scored = [item for item in feedback.items if item.question.kind == "score"]
    return [
        replace(item, answer=replace(item.answer, values=(0.5,) * len(item.answer.values)))
        for item in scored[:1]
    ]


@pytest.mark.sample(
    "dpo", "kto", "aot", "sft", "grpo", "rloo", "gspo", "dr_grpo", "reward_model", "ppo", "xpo", seconds=1.8
)
@pytest.mark.parametrize("name", sorted(name for name, cls in ALGORITHMS.items() if cls.learns))
def test_an_algorithm_learns_from_usable_questions_and_from_no_others(name: str) -> None:
    objective = made(name)
    feedback = made_up_feedback(objective.requires.feedback, objective.plan(1), 1, "some")
    feedback = replace(feedback, items=(*feedback.items, *flat(feedback)))
    found = {objective.is_usable(item) for item in feedback.items}
    assert found == {True, False}
    for item in feedback.items:
        alone = replace(feedback, items=(item,))
        assert learns(made(name), alone) == objective.is_usable(item), item.answer
