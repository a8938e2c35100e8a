"""The sign of every loss: a step down the gradient makes better responses more probable, or scored higher,
than worse ones. With the sign flipped it does the opposite. Each algorithm is tested with its settings."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from cases import CASES, Case
from fixtures import make_group, make_questions

from oat.algorithms.base import Objective
from oat.config.load import convert
from oat.learner.batching import view_of
from oat.learner.reduction import Reduction
from oat.plugins.loading import load_symbol
from oat.plugins.registry import ALGORITHMS
from oat.types import Answer, Feedback, Item, Kind, Trajectory

FLIPPED = Path(__file__).parent / "flipped.py"
TEXTS = [("aaa", "b"), ("bb", "aaaa"), ("a", "bbb"), ("bbbb", "aa")]
"""Responses to four prompts, with one token per letter. Those of letters a are the better ones."""


def item(number: int, kind: Kind) -> Item:
    group = make_group(number, *TEXTS[number])
    (question,) = make_questions([group], kind, 0, oracle="o")
    scores = tuple(float("a" in text) for text in TEXTS[number])
    if kind == "score":
        return Item(group, question, Answer(question.key, scores, ("ok", "ok"), 2), None)
    return Item(group, question, Answer(question.key, scores[:1], ("ok",), 2), int(scores[1]))


def forward(model: str, rows: Sequence[Trajectory], wants: set[str]) -> Mapping[str, torch.Tensor]:
    """Return the recorded log-probabilities for any model, so that policy and reference agree."""
    logps_K = torch.from_numpy(np.concatenate([row.recorded("raw_logps") for row in rows])).double()
    scores_N = torch.zeros(len(rows), dtype=torch.float64)
    entropy_K = torch.full_like(logps_K, 0.5)
    found = {"raw": logps_K, "sampled": logps_K, "entropy": entropy_K, "score": scores_N}
    found |= {"value": torch.zeros_like(logps_K), "value_after": torch.zeros_like(logps_K)}
    return {name: found[name].clone() for name in wants}


def slope(cls: type[Objective], options: Mapping[str, Any]) -> float:
    """Return the derivative of the total loss when all better responses become more probable, or scored
    higher, and all worse ones less."""
    known = {field.name for field in fields(cls.Config)}  # type: ignore[attr-defined]
    config_class: Any = cls.Config  # type: ignore[attr-defined]
    given = {name: value for name, value in options.items() if name in known}
    objective: Any = cls(convert(config_class, given, ("algorithm",), {}))  # type: ignore[call-arg]
    items = tuple(item(number, objective.requires.feedback) for number in range(len(TEXTS)))
    batch = objective.prepare(Feedback(0, items, 8), forward, np.random.default_rng(0))
    view, reduction = view_of(batch), Reduction(batch)
    of_models = {
        model: {name: values.requires_grad_() for name, values in forward(model, batch.rows, wants).items()}
        for model, wants in objective.wants.items()
    }
    outputs = of_models["policy" if "policy" in of_models else "reward"]
    losses = objective.losses(of_models, view).values()
    sum(loss.coef * reduction(loss, view, view.group_of_N, first=True) for loss in losses).backward()  # type: ignore[union-attr]
    better_N = torch.tensor([1.0 if "a" in row.text else -1.0 for row in batch.rows], dtype=torch.float64)
    along = {"score": better_N}
    return sum(
        float((values.grad * along.get(name, better_N[view.row_of_K])).sum())
        for name, values in outputs.items()
        if values.grad is not None and name != "entropy"
    )


REWARD_MODEL = Case("reward_model", "FlippedRewardModelling", "centring: 0.01")


@pytest.mark.parametrize("case", [*CASES.values(), REWARD_MODEL], ids=[*CASES, "reward_model"])
def test_descent_prefers_better_responses_and_a_flipped_sign_worse_ones(case: Case) -> None:
    options = {"prompts": 4, "samples": 2, **yaml.safe_load(f"{{{case.options}}}")}
    assert slope(ALGORITHMS[case.name], options) < -1e-3
    assert slope(load_symbol(f"{FLIPPED}:{case.flipped}"), options) > 1e-3


def test_every_algorithm_has_a_case() -> None:
    """XPO is DPO with one more term, which tests/protocol/test_xpo.py computes. `frozen` has no loss."""
    assert {case.name for case in CASES.values()} | {"reward_model", "xpo", "frozen"} == set(ALGORITHMS)
