"""More losses of pairs. They share the base classes of `direct.py`, and with these the treatment of pairs
without a winner, the reduction and the metrics.

h is the margin: the log-ratio of the chosen response minus that of the rejected one. The log-ratio of a
response is its log-probability under the policy minus that under the reference. NLL is the negative
log-likelihood of the chosen response.

| name | loss | paper |
| --- | --- | --- |
| exo | reverse KL from sigmoid(beta h) to the smoothed label | arXiv:2402.00856, Eq. 16 |
| nca | each response against the reference | arXiv:2402.05369 |
| apo_zero | raises the chosen response, lowers the rejected one | arXiv:2408.06266, Eq. 7 |
| apo_down | lowers both responses, the rejected one further | arXiv:2408.06266, Eq. 8 |
| sppo_hard | log-ratios drawn to 1 / (2 beta) and -1 / (2 beta) | arXiv:2405.00675, Eq. 4.7 |
| discopop | logistic and exponential of beta h, mixed by h | arXiv:2406.08414, Eq. 5 |
| aot | log-sigmoid of beta times the gap of equal ranks in two lists (`AOTConfig.form`) | arXiv:2406.05882 |
| orpo | odds ratio, and the NLL; no reference | arXiv:2403.07691, Eqs. 4 and 7 |
| cpo | log-sigmoid, and the NLL; no reference | arXiv:2401.08417, Eq. 3 |

Departures from the papers, in addition to those of `direct.py`:
1. The paper of `aot` sorts each batch. Here all pairs of a step are sorted once, in `prepare`, under the
   weights at the start of the step. So micro-batches and mini-batches do not change which values are
   compared.
2. The NLL of `orpo` and `cpo` is a mean over the tokens of the response. CPO's paper takes the sum.
3. `sppo_hard` sets the chosen response's win probability to 1. The paper estimates this probability.

Not handled: the soft form of SPPO; the forms of EXO and NCA for more than two responses.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np

from oat.algorithms.base import Forward, Outputs, View, row_index
from oat.algorithms.direct import (
    Direct,
    PairConfig,
    WithReference,
    WithReferenceConfig,
    check_beta,
    check_field,
)
from oat.algorithms.pairs import halves
from oat.lazy import lazily
from oat.types import Batch, Feedback, Loss, Requires

if TYPE_CHECKING:
    import torch

    from oat import functional as F
else:
    torch, F = lazily("torch"), lazily("oat.functional")


@dataclass(frozen=True)
class EXOConfig(WithReferenceConfig):
    label_smoothing: float = 1e-3
    """Probability that the smoothed label gives to the rejected response, in (0, 0.5)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_field(
            "label_smoothing",
            self.label_smoothing,
            0 < self.label_smoothing < 0.5,
            "it must be above 0 and below one half",
        )


@dataclass(frozen=True)
class DiscoPOPConfig(WithReferenceConfig):
    tau: float = 0.05
    """Width of the transition from the logistic to the exponential loss, in (0, 1], in units of beta times
    the margin."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_field("tau", self.tau, 0 < self.tau <= 1, "it must be above 0 and at most 1")


@dataclass(frozen=True)
class AOTConfig(WithReferenceConfig):
    form: Literal["paired", "unpaired"] = "paired"
    """The two lists of values that are sorted and then compared rank by rank. `paired`: for each pair, the
    log-probability of the chosen response minus that of the rejected one; one list has the policy's
    differences, the other the reference's. `unpaired`: the log-ratios of the chosen responses, and those of
    the rejected responses."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("ties", "abstentions"):
            check_field(
                name,
                getattr(self, name),
                getattr(self, name) == "mask",
                "a pair without a winner has no rank; set it to mask",
            )


@dataclass(frozen=True)
class ORPOConfig(PairConfig):
    beta: float = 0.1
    """Weight of the odds-ratio term (the paper's lambda). The negative mean log-probability of the chosen
    response is the loss's other term, with weight 1."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_beta(self.beta)


@dataclass(frozen=True)
class CPOConfig(PairConfig):
    beta: float = 0.1
    """Factor of the difference between the summed log-probabilities of the two responses."""
    sft_weight: float = 1.0
    """Weight of the negative mean log-probability of the chosen response; 0 is off."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_beta(self.beta)
        check_field("sft_weight", self.sft_weight, 0 <= self.sft_weight < math.inf, "it must be at least 0")


class EXO(WithReference):
    name = "exo"
    Config = EXOConfig
    config: EXOConfig

    def terms(self, margin_U: torch.Tensor) -> torch.Tensor:
        return F.contrast.exo_loss(
            margin_U, beta=self.config.beta, label_smoothing=self.config.label_smoothing
        )


class DiscoPOP(WithReference):
    name = "discopop"
    Config = DiscoPOPConfig
    config: DiscoPOPConfig

    def terms(self, margin_U: torch.Tensor) -> torch.Tensor:
        return F.contrast.discopop_loss(margin_U, beta=self.config.beta, tau=self.config.tau)


class Ratios(WithReference):
    """Base class of losses that are a function of a pair's two log-ratios. A subclass has this function as
    `loss`."""

    Config = WithReferenceConfig

    def loss(self, chosen_U: torch.Tensor, rejected_U: torch.Tensor) -> torch.Tensor:
        """Return the losses, (U,), from the log-ratios of the chosen and of the rejected responses, (U,)."""
        raise NotImplementedError

    def pair_losses(self, outputs: Outputs, view: View) -> dict[str, Loss]:
        policy_N, reference_N = self.logps(outputs, view)
        return {"loss/preference": Loss(self.loss(*halves(policy_N - reference_N)), per="pair")}


class NCA(Ratios):
    name = "nca"

    def loss(self, chosen_U: torch.Tensor, rejected_U: torch.Tensor) -> torch.Tensor:
        return F.contrast.nca_loss(chosen_U, rejected_U, beta=self.config.beta)


class APOZero(Ratios):
    name = "apo_zero"

    def loss(self, chosen_U: torch.Tensor, rejected_U: torch.Tensor) -> torch.Tensor:
        return F.contrast.apo_zero_loss(chosen_U, rejected_U, beta=self.config.beta)


class APODown(Ratios):
    name = "apo_down"

    def loss(self, chosen_U: torch.Tensor, rejected_U: torch.Tensor) -> torch.Tensor:
        return F.contrast.apo_down_loss(chosen_U, rejected_U, beta=self.config.beta)


class SPPOHard(Ratios):
    name = "sppo_hard"

    def loss(self, chosen_U: torch.Tensor, rejected_U: torch.Tensor) -> torch.Tensor:
        return F.contrast.sppo_hard_loss(chosen_U, rejected_U, beta=self.config.beta)


class AOT(WithReference):
    """Ranks the values of a step, and compares values of equal rank (`AOTConfig.form`).

    * `paired`: a value is log p(chosen) - log p(rejected) of a pair. The values under the policy and those
      under the reference are ranked separately. If a pair's value under the policy has rank r, its entry in
      column `matched_U` is the value of rank r under the reference.
    * `unpaired`: a value is the log-ratio of a response. Chosen and rejected responses are ranked separately.
      A unit is a chosen and a rejected response of equal rank, mostly to different prompts.
    """

    name = "aot"
    weighs_winners = False
    Config = AOTConfig
    config: AOTConfig

    def prepare(self, feedback: Feedback, forward: Forward, generator: np.random.Generator) -> Batch:
        batch = super().prepare(feedback, forward, generator)
        if not batch.size:
            return batch
        row_of_K, reference_K = row_index(batch.rows), batch.columns["reference_logps_K"]
        policy_N = F.segments.segment_sum(forward("policy", batch.rows, {"raw"})["raw"], row_of_K, batch.size)
        reference_N = F.segments.segment_sum(reference_K, row_of_K, batch.size)
        if self.config.form == "unpaired":
            return _repaired(batch, F.contrast.rank_matches(*halves(policy_N - reference_N)))
        policy_U, reference_U = policy_N[0::2] - policy_N[1::2], reference_N[0::2] - reference_N[1::2]
        return replace(
            batch,
            columns={
                **batch.columns,
                "matched_U": reference_U[F.contrast.rank_matches(policy_U, reference_U)],
            },
        )

    def terms(self, margin_U: torch.Tensor) -> torch.Tensor:
        return F.preference.dpo_loss(margin_U, beta=self.config.beta)

    def margin(self, outputs: Outputs, view: View) -> torch.Tensor:
        if self.config.form == "unpaired":
            return super().margin(outputs, view)
        policy_N, _ = self.logps(outputs, view)
        return policy_N[0::2] - policy_N[1::2] - view["matched_U"]


class ReferenceFree(Direct):
    """Base class of ORPO and CPO. They need no reference, and can add the NLL of the chosen response."""

    requires = Requires(feedback="compare", models=frozenset({"policy"}))

    def chosen_nll(self, outputs: Outputs, view: View, coef: float = 1.0) -> Loss:
        """Return a part of the loss, with the factor `coef`: the negative mean log-probability per token of
        each chosen response."""
        return Loss(-view.row_mean(outputs["policy"]["raw"])[0::2], per="pair", coef=coef)


class ORPO(ReferenceFree):
    name = "orpo"
    Config = ORPOConfig
    config: ORPOConfig

    def pair_losses(self, outputs: Outputs, view: View) -> dict[str, Loss]:
        terms_U = F.contrast.orpo_loss(*halves(view.row_mean(outputs["policy"]["raw"])))
        return {
            "loss/preference": Loss(terms_U, per="pair", coef=self.config.beta),
            "loss/sft": self.chosen_nll(outputs, view),
        }

    def rewards(self, outputs: Outputs, view: View) -> torch.Tensor:
        return self.config.beta * view.row_mean(outputs["policy"]["raw"])


class CPO(ReferenceFree):
    name = "cpo"
    Config = CPOConfig
    config: CPOConfig

    def pair_losses(self, outputs: Outputs, view: View) -> dict[str, Loss]:
        terms_U = F.contrast.cpo_loss(*halves(view.row_sum(outputs["policy"]["raw"])), beta=self.config.beta)
        losses = {"loss/preference": Loss(terms_U, per="pair")}
        return (
            {**losses, "loss/sft": self.chosen_nll(outputs, view, self.config.sft_weight)}
            if self.config.sft_weight
            else losses
        )

    def rewards(self, outputs: Outputs, view: View) -> torch.Tensor:
        return self.config.beta * view.row_sum(outputs["policy"]["raw"])


def _repaired(batch: Batch, match_U: torch.Tensor) -> Batch:
    """Return the batch with new pairs: unit u has the chosen row of pair u and the rejected row of pair
    `match_U[u]`. Every row keeps the group of its prompt."""
    rows = torch.stack([torch.arange(0, batch.size, 2), 2 * match_U + 1], dim=1).flatten().tolist()
    parts = batch.columns["reference_logps_K"].split([row.num_trained for row in batch.rows])
    columns = {**batch.columns, "reference_logps_K": torch.cat([parts[row] for row in rows])}
    return replace(
        batch, rows=tuple(batch.rows[row] for row in rows), group_of_N=batch.group_of_N[rows], columns=columns
    )
