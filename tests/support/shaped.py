"""Helpers for tests of the way from scores to rewards: an objective, a batch, and changed feedback."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from scored_groups import feedback

from oat.algorithms.base import Objective
from oat.plugins.registry import ALGORITHMS
from oat.types import Batch, Feedback, Trajectory


def forward(model: str, rows: Sequence[Trajectory], wants: set[str]) -> Mapping[str, torch.Tensor]:
    raw_K = torch.from_numpy(np.concatenate([row.recorded("raw_logps") for row in rows]))
    return {name: raw_K for name in wants}


def made(name: str, **options: Any) -> Any:
    cls: Any = ALGORITHMS[name]
    sections = {field: value for field, value in options.items() if isinstance(value, dict)}
    kinds = {field: type(getattr(cls.Config(), field)) for field in sections}
    built = {field: kinds[field](**value) for field, value in sections.items()}
    return cls(cls.Config(prompts=1, **{"samples": 3, "advantage": "none", **options, **built}))


def prepared(objective: Objective, given: Feedback | None = None) -> Batch:
    return objective.prepare(given or feedback((1.0, 4.0, 1.0)), forward, np.random.default_rng(0))


def rewards(objective: Objective, given: Feedback | None = None) -> list[float]:
    """Return the advantages of responses. With `advantage: none` they are the rewards."""
    return prepared(objective, given).columns["advantages_N"].tolist()


def changed(given: Feedback, **changes: Any) -> Feedback:
    """Return feedback whose answers have these fields."""
    items = [replace(item, answer=replace(item.answer, **changes)) for item in given.items]
    return replace(given, items=tuple(items))


def with_rows(given: Feedback, *rows: Mapping[str, Any]) -> Feedback:
    """Return feedback of one group whose trajectories have these fields."""
    (item,) = given.items
    new = [replace(row, **changes) for row, changes in zip(item.group.trajectories, rows, strict=True)]
    return replace(given, items=(replace(item, group=replace(item.group, trajectories=tuple(new))),))


CUT = with_rows(feedback((1.0, 4.0, 1.0)), {}, {"finish_reason": "length"}, {})
"""Three responses of 1, 4 and 2 tokens; the second one was cut. Their ids count from 0."""
