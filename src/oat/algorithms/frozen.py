"""The algorithm `frozen`: it asks about pairs, and the policy does not learn from the answers. The ensemble
of the run's explorer does (EE4LLM, arXiv:2402.00396), and picks the best of several responses
(`evaluation.best_of`).
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from oat.algorithms.base import Forward, Objective, Outputs, View
from oat.errors import ConfigError
from oat.types import Batch, Feedback, Loss, Plan, Requires


@dataclass(frozen=True)
class FrozenConfig:
    prompts: int = 128
    """Number of prompts in a step."""
    samples: int = 2
    """Responses per prompt. More than two need an explorer."""

    def __post_init__(self) -> None:
        if self.samples < 2:
            raise ConfigError(f"algorithm.samples is {self.samples}; a comparison needs at least 2")


class Frozen(Objective):
    name = "frozen"
    Config = FrozenConfig
    requires = Requires(feedback="compare", models=frozenset({"policy"}))
    wants: Mapping[str, set[str]] = {"policy": {"raw"}}
    learns = False

    def __init__(self, config: FrozenConfig):
        self.config = config

    def plan(self, step: int) -> Plan:
        return Plan(self.config.prompts, {"sampler": self.config.samples}, self.config.prompts)

    def prepare(self, feedback: Feedback, forward: Forward, generator: np.random.Generator) -> Batch:
        """Return a batch without rows."""
        nothing = np.zeros(0, dtype=np.int64)
        return Batch((), nothing, nothing, metrics={"rows/trained": 0.0})

    def losses(self, outputs: Outputs, view: View) -> dict[str, Loss]:
        return {"loss/policy": Loss(0 * outputs["policy"]["raw"], per="token")}
