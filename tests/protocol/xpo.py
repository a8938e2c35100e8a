"""Exploratory preference optimisation as a user would add it: DPO, a plan with one response of the reference,
and one more term.

XPO (arXiv:2405.21046, Algorithm 1): loss = DPO + alpha * mean over pairs of the log-probability of the
reference's response.

Departure: a pair without a winner is left out of the preference term only. It stays in the optimism term,
which needs no winner.
"""

from dataclasses import dataclass, replace

import torch

from oat.algorithms.base import row_index
from oat.algorithms.direct import DPO, DPOConfig, pair_batch
from oat.errors import ConfigError
from oat.types import Loss, Plan, Requires


@dataclass(frozen=True)
class XPOConfig(DPOConfig):
    alpha: float = 5e-6
    """Coefficient of the optimism term."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.samples != 2:
            raise ConfigError(
                f"algorithm.samples is {self.samples}; xpo takes 2, one of the policy and one of the "
                "reference"
            )


class XPO(DPO):
    name = "xpo"
    Config = XPOConfig
    requires = Requires(
        feedback="compare",
        slots=frozenset({"sampler", "reference"}),
        models=frozenset({"policy", "reference"}),
    )

    def plan(self, step):
        return Plan(self.config.prompts, {"sampler": 1, "reference": 1}, self.config.prompts)

    def prepare(self, feedback, forward, generator):
        c = self.config
        batch = pair_batch(
            feedback, forward, epochs=c.epochs, minibatches=c.minibatches, keep_ties=True, halved=c.halved
        )
        from_reference_N = torch.tensor([float(row.slot == "reference") for row in batch.rows])
        return replace(batch, columns={**batch.columns, "mask_K": from_reference_N[row_index(batch.rows)]})

    def losses(self, outputs, view):
        optimism = Loss(outputs["policy"]["raw"], per="sequence_sum", coef=self.config.alpha)
        return {**super().losses(outputs, view), "user/optimism": optimism}
