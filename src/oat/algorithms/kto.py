"""KTO (arXiv:2402.01306, Eq. 7): each response is judged by itself as desirable or not, and its log-ratio is
pushed above or below a common baseline.

The log-ratio of a response is its log-probability under the policy minus that under the reference. A response
is desirable if its score reaches `threshold`. Recorded responses without a column of scores have scores of 1
and 0. The score is 1 for a true label and for the chosen response of a pair, and 0 for a false label and for
the rejected response.

The baseline z is the mean log-ratio of mismatched sequences, each made of a prompt and the response to
another prompt. If this mean is negative, z is 0. z is the paper's estimate of KL(policy || reference).

Departures from the paper:
1. z is estimated in `prepare`, from all rows of the step, under the weights at the start of the step. The
   paper estimates z in every micro-batch. So z does not depend on the size of micro-batches, and all
   optimiser steps of a step have the same z.
2. The function `mismatched` chooses which prompt gets which response. It leaves out sequences that are longer
   than every row of the step, since the model and the memory may have no room for them. If it finds no
   sequence, z is 0. `kto/baseline_rows` counts the sequences.
3. A response without a score (abstained, failed or unpaid) or without a trained token is left out.

`kl/reference` is the mean of k3 (`functional/kl.py`) over the trained tokens of responses that the sampler
drew for this step. Recorded responses and responses of earlier steps do not count. If no response counts, the
metric is not reported. k3 is computed under the weights at the start of each optimiser step. As an estimate
of KL(policy || reference), the metric is biased in three cases:
* other weights drew the responses (`lag/versions`, `minibatches`, `epochs`);
* the temperature is not 1;
* sampling is truncated.

`logps/reference_gap` covers all responses that a step learns from. It is no estimate of a KL (`direct.py`).

Not handled: weights computed from the share of desirable responses; the weights are settings.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from oat.algorithms.base import OF_RESPONSES, Forward, Objective, Outputs, View, row_index
from oat.algorithms.direct import check_beta, check_field, reference_gap
from oat.algorithms.rows import scored_rows
from oat.lazy import lazily
from oat.types import Batch, Feedback, Loss, Plan, Requires, Trajectory

if TYPE_CHECKING:
    import torch

    from oat import functional as F
else:
    torch, F = lazily("torch"), lazily("oat.functional")


@dataclass(frozen=True)
class KTOConfig:
    prompts: int = 64
    """Prompts per step."""
    samples: int = 1
    """Responses per prompt."""
    beta: float = 0.1
    """Strength of the tie to the reference: the steepness of the loss as a function of the log-ratio, 1 /
    nat."""
    threshold: float = 0.5
    """Smallest score of a desirable response. Recorded labels are scores of 1 and 0, so the threshold must be
    above 0 and at most 1 to separate them."""
    lambda_desirable: float = 1.0
    """Weight of desirable responses."""
    lambda_undesirable: float = 1.0
    """Weight of undesirable responses."""
    epochs: int = 1
    """Passes over a step's responses."""
    minibatches: int = 1
    """Optimiser steps per pass."""

    def __post_init__(self) -> None:
        check_field("samples", self.samples, self.samples >= 1, "it must be at least 1")
        check_field(
            "threshold",
            self.threshold,
            math.isfinite(self.threshold),
            "give the least score of a desirable response",
        )
        check_beta(self.beta)
        for name in ("lambda_desirable", "lambda_undesirable"):
            check_field(
                name, getattr(self, name), 0 <= getattr(self, name) < math.inf, "it must be at least 0"
            )


class KTO(Objective):
    name = "kto"
    Config = KTOConfig
    requires = Requires(feedback="score", models=frozenset({"policy", "reference"}))
    wants: Mapping[str, set[str]] = {"policy": {"raw"}}
    watched = OF_RESPONSES | {"kl/reference"}
    reuses = True
    judges_singly = True

    def __init__(self, config: KTOConfig):
        self.config = config

    def plan(self, step: int) -> Plan:
        return Plan(self.config.prompts, {"sampler": self.config.samples}, self.config.prompts)

    def prepare(self, feedback: Feedback, forward: Forward, generator: np.random.Generator) -> Batch:
        """Make a batch in which every response is a unit. Its columns are `reference_logps_K`,
        `is_sampled_N`, `is_desirable_U`, `baseline_U` and `weight_U`."""
        scored = scored_rows(feedback)
        first = int((scored.group_of_N < len(feedback.older)).sum())
        kept = [
            number for number, row in enumerate(scored.rows) if scored.valid_N[number] and row.trained.any()
        ]
        rows, units = tuple(scored.rows[number] for number in kept), np.arange(len(kept))
        is_desirable_U = scored.rewards_N[kept] >= self.config.threshold
        metrics = {
            "rows/trained": float(len(rows)),
            "kto/desirable_frac": float(is_desirable_U.sum()) / max(1, len(rows)),
        }
        columns: dict[str, torch.Tensor] = {}
        if rows:
            others = mismatched(rows)
            baseline = max(0.0, _mean_log_ratio(others, forward)) if others else 0.0
            metrics |= {"kto/baseline": baseline, "kto/baseline_rows": float(len(others))}
            columns = {
                "reference_logps_K": forward("reference", rows, {"raw"})["raw"],
                "is_sampled_N": torch.tensor(
                    [scored.rows[number].slot == "sampler" and number >= first for number in kept]
                ),
                "is_desirable_U": is_desirable_U,
                "baseline_U": torch.full((len(rows),), baseline),
                "weight_U": torch.where(
                    is_desirable_U, self.config.lambda_desirable, self.config.lambda_undesirable
                ),
            }
        groups = np.unique(scored.group_of_N[kept].numpy(), return_inverse=True)[1]
        return Batch(
            rows,
            units,
            groups,
            columns,
            epochs=self.config.epochs,
            minibatches=self.config.minibatches,
            metrics=metrics,
        )

    def losses(self, outputs: Outputs, view: View) -> dict[str, Loss]:
        terms_U = F.contrast.kto_loss(
            self._log_ratios(outputs, view), view["is_desirable_U"], view["baseline_U"], beta=self.config.beta
        )
        return {"loss/preference": Loss(terms_U, per="pair")}

    def metrics(self, outputs: Outputs, view: View) -> dict[str, tuple[torch.Tensor, str]]:
        rewards_U, is_desirable_U = self.config.beta * self._log_ratios(outputs, view), view["is_desirable_U"]
        k3_K, is_sampled_K = (
            F.kl.kl_k3(outputs["policy"]["raw"], view["reference_logps_K"]),
            view["is_sampled_N"][view.row_of_K],
        )
        return {
            "kto/reward_desirable": (rewards_U[is_desirable_U], "U"),
            "kto/reward_undesirable": (rewards_U[~is_desirable_U], "U"),
            "kl/reference": (k3_K[is_sampled_K], "K"),
            "logps/reference_gap": (reference_gap(outputs, view), "K"),
        }

    def _log_ratios(self, outputs: Outputs, view: View) -> torch.Tensor:
        return view.row_sum(outputs["policy"]["raw"] - view["reference_logps_K"])


def mismatched(rows: Sequence[Trajectory]) -> tuple[Trajectory, ...]:
    """Return sequences of a prompt and the response to another prompt.

    For each row i, the sequence has the prompt of row i and the response of row i + s; row numbers wrap
    around. Here s is the largest number of rows with the same prompt. A sequence is left out if both rows
    have the same prompt, or if it is longer than every row.

    Args:
        rows: at least one; rows with the same prompt are adjacent.
    """
    prompts = [row.segments[0].ids.tobytes() for row in rows]
    longest, ahead = max(len(row.ids) for row in rows), max(prompts.count(prompt) for prompt in set(prompts))
    found = []
    for number, row in enumerate(rows):
        other = (number + ahead) % len(rows)
        mixed = replace(rows[other], segments=(row.segments[0], *rows[other].segments[1:]))
        if prompts[other] != prompts[number] and len(mixed.ids) <= longest:
            found.append(mixed)
    return tuple(found)


def _mean_log_ratio(rows: Sequence[Trajectory], forward: Forward) -> float:
    """Return the mean over rows of the row's log-ratio, which is a sum over its trained tokens, nats."""
    policy_K, reference_K = (forward(model, rows, {"raw"})["raw"] for model in ("policy", "reference"))
    return float(F.segments.segment_sum(policy_K - reference_K, row_index(rows), len(rows)).mean())
