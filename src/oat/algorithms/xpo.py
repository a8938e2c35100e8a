"""Exploratory preference optimisation (XPO, arXiv:2405.21046, Algorithm 1): DPO on pairs of one response of
the policy and one of the reference, with a bonus for exploring.

The loss is DPO's, plus `alpha` times the mean over pairs of the policy's log-probability of the reference's
response, nats. The term pushes these responses down, and so it is optimistic about all others.

Departure: the optimism term needs no winner, so it counts every pair, also equal responses and pairs without
a winner. The predecessor drops them from both terms; TRL keeps equal responses in both. With
`sampling.refill_rounds`, a step asks further pairs in place of those without a winner, and these are then in
neither term.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from oat.algorithms.base import Forward, Outputs, View, row_index
from oat.algorithms.direct import DPO, DPOConfig, check_field
from oat.algorithms.pairs import pair_batch
from oat.lazy import lazily
from oat.types import Batch, Feedback, Loss, Plan, Requires
from oat.types.part import Check, RunFacts

if TYPE_CHECKING:
    import torch
else:
    torch = lazily("torch")


@dataclass(frozen=True)
class XPOConfig(DPOConfig):
    alpha: float = 5e-6
    """Coefficient of the optimism term."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_field("alpha", self.alpha, 0 <= self.alpha < float("inf"), "it must be at least 0")
        check_field(
            "samples",
            self.samples,
            self.samples == 2,
            "xpo takes 2, one of the policy and one of the reference",
        )


class XPO(DPO):
    name = "xpo"
    Config = XPOConfig
    config: XPOConfig
    requires = Requires(
        feedback="compare",
        slots=frozenset({"sampler", "reference"}),
        models=frozenset({"policy", "reference"}),
    )
    wants: Mapping[str, set[str]] = {"policy": {"raw"}}

    @staticmethod
    def checks(config: XPOConfig, run: RunFacts) -> list[Check]:
        return [
            Check(
                "prompts.responses",
                run.has_recorded,
                "xpo samples one response of the policy and one of the reference; remove the recorded ones, "
                "or take dpo",
            )
        ]

    def plan(self, step: int) -> Plan:
        return Plan(self.config.prompts, {"sampler": 1, "reference": 1}, self.config.prompts)

    def prepare(self, feedback: Feedback, forward: Forward, generator: np.random.Generator) -> Batch:
        c = self.config
        batch = pair_batch(
            feedback, forward, epochs=c.epochs, minibatches=c.minibatches, keep_ties=True, halved=c.halved
        )
        from_reference_N = torch.tensor([float(row.slot == "reference") for row in batch.rows])
        return replace(batch, columns={**batch.columns, "mask_K": from_reference_N[row_index(batch.rows)]})

    def losses(self, outputs: Outputs, view: View) -> dict[str, Loss]:
        optimism = Loss(outputs["policy"]["raw"], per="sequence_sum", coef=self.config.alpha)
        return {**super().losses(outputs, view), "loss/optimism": optimism}
