"""Runs with numbers that are not finite."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fixtures import World

POISONED = """
import math

from oat.algorithms.group import GRPO


class Poisoned(GRPO):
    def prepare(self, feedback, forward, generator):
        batch = super().prepare(feedback, forward, generator)
        if feedback.step in {steps}:
            batch.columns["advantages_N"][1] = math.nan
        return batch
"""


def poisoned(
    world: World, folder: Path, steps: Sequence[int], changes: Mapping[str, Any] | None = None
) -> Path:
    """Return the configuration of six steps of GRPO. At the given steps an advantage is not finite."""
    (folder / "poisoned.py").write_text(POISONED.format(steps=list(steps)), encoding="utf-8")
    small = {"stop.max_steps": 6, "evaluation": None, "engine": {"name": "torch", "threads": 1}}
    return world.config(
        "grpo", folder, {"algorithm.name": f"{folder / 'poisoned.py'}:Poisoned", **small, **(changes or {})}
    )


SKIP = {"learner.on_nonfinite": "skip", "learner.max_skips": 2}
