"""Helpers for tests of updates: the learner and the objective of every algorithm, as `oat train` makes them,
and answers about given token ids."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fixtures import World

from oat.assemble.run import build
from oat.config.load import load_config
from oat.loop import Run
from oat.plugins.registry import ALGORITHMS
from oat.resolve.resolve import resolve
from oat.types import (
    Answer,
    Batch,
    Feedback,
    Group,
    Item,
    Key,
    Mark,
    Message,
    Prompt,
    Question,
    Segment,
    Trajectory,
)

OPTIONS: dict[str, dict[str, Any]] = {
    "dpo": {"samples": 2, "length_alpha": 0.05, "positive_lambda": 0.5, "sft_weight": 0.1},
    "robust_dpo": {"samples": 2, "label_smoothing": 0.1},
    "ipo": {"samples": 2},
    "slic": {"samples": 2},
    "simpo": {"samples": 2},
    "bnf": {"samples": 2},
    "exo": {"samples": 2},
    "nca": {"samples": 2},
    "apo_zero": {"samples": 2},
    "apo_down": {"samples": 2},
    "sppo_hard": {"samples": 2},
    "discopop": {"samples": 2},
    "aot": {"samples": 2},
    "orpo": {"samples": 2},
    "cpo": {"samples": 2},
    "xpo": {"samples": 2, "alpha": 0.01},
    "kto": {"samples": 2},
    "sft": {"samples": 2, "threshold": -9.0},
    "grpo": {"samples": 2, "kl_coef": 0.1},
    "dr_grpo": {"samples": 2},
    "rloo": {"samples": 2},
    "reinforce_pp": {"samples": 2, "kl_reward_coef": 0.1},
    "gspo": {"samples": 2},
    "cispo": {"samples": 2},
    "cpgd": {"samples": 2},
    "sapo": {"samples": 2},
    "luspo": {"samples": 2},
    "vespo": {"samples": 2},
    "ppo": {"samples": 2, "end": "final_state", "response_length": 4},
    "reward_model": {"samples": 2, "centring": 0.01},
}
assert OPTIONS.keys() == ALGORITHMS.keys() - {"frozen"}  # it makes no batch


def settings_of(algorithm: str, changes: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return changes to the tiny world's configuration that select an algorithm with its options."""
    unread = {"evaluation": None} if algorithm == "reward_model" else {}  # its policy stays as it is
    own = {
        "algorithm": {"name": algorithm, "prompts": 4, **OPTIONS[algorithm]},
        "engine": {"name": "torch", "threads": 1},
    }
    return {**own, **unread, **(changes or {})}


def run_of(world: World, algorithm: str, folder: Path) -> Run:
    return build(resolve(*load_config(world.config(algorithm, folder, settings_of(algorithm)))))


def feedback_of(run: Run, items: Sequence[Item]) -> Feedback:
    return Feedback(0, tuple(items), len(items))


def prepared(run: Run, items: Sequence[Item]) -> Batch:
    """Return the batch that the run's algorithm makes of these answers."""
    return run.objectives[0].prepare(feedback_of(run, items), run.learner.forward, np.random.default_rng(0))


def item(
    run: Run,
    number: int,
    responses: Sequence[Sequence[int]],
    values: Sequence[float],
    mark: Mark = "ok",
    *,
    is_trained: bool = True,
) -> Item:
    """Return an answered question about responses of these ids to prompt `number`. A comparison follows from
    the two values."""
    rows = tuple(trajectory(ids, is_trained) for ids in responses)
    group = Group(Prompt(number + 1, number, (Message("user", f"{number}+1="),)), rows)
    kind = run.objectives[0].requires.feedback
    question = Question.about(group, Key("train", 0, 0, number), kind, tuple(range(len(rows))), "o")
    if kind == "score":
        return Item(
            group, question, Answer(question.key, tuple(values), (mark,) * len(rows), len(rows)), None
        )
    is_decided = mark == "ok" and values[0] != values[1]
    marks: tuple[Mark, ...] = ("tie" if mark == "ok" and not is_decided else mark,)
    probability = float(values[0] > values[1]) if is_decided else 0.5
    return Item(
        group,
        question,
        Answer(question.key, (probability,), marks, 2),
        int(values[0] < values[1]) if is_decided else None,
    )


def usual(run: Run) -> list[Item]:
    """Return four answered questions. Each is about two responses, of one to six tokens."""
    return [
        item(run, number, [range(2, 4 + number), range(9, 12 - number % 3)], (number % 2, 0.5))
        for number in range(4)
    ]


def tensors_of(run: Run) -> dict[str, Any]:
    """Return a copy of the state that learning changes: weights, moments and counters."""
    return {
        name: value.clone() if isinstance(value, torch.Tensor) else value
        for name, value in run.parts["learner"].state.items()
    }


def is_unmoved(run: Run, before: Mapping[str, Any]) -> bool:
    """Return True if weights, moments and counts of optimiser steps are bitwise unchanged."""
    now = run.parts["learner"].state
    tensors = {name for name, value in before.items() if isinstance(value, torch.Tensor)}
    return (
        now.keys() == before.keys()
        and now["steps"] == before["steps"]
        and all(_same_bits(now[name], before[name]) for name in tensors)
    )


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


def trajectory(ids: Sequence[int], is_trained: bool = True) -> Trajectory:
    """Return a response of these ids to a prompt of four tokens. The recorded log-probabilities are close to
    those of a random model."""
    size, taken = len(ids), np.array(list(ids), dtype=np.int32)
    logps = (-2.8 + 0.2 * np.sin(np.arange(size))).astype(np.float32)
    context = Segment("context", np.array([3, 13, 4, 12], dtype=np.int32))
    response = Segment(
        "model", taken, np.full(size, is_trained), np.zeros(size, dtype=np.int32), logps, logps
    )
    return Trajectory("sampler", (context, response), "stop", " ".join(map(str, ids)))
