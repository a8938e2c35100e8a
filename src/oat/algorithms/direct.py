"""Direct alignment from preferences: an oracle says which of two responses to a prompt is better, and the
policy learns from its choice without a reward model.

| name | log-probability of a response | loss | paper |
| --- | --- | --- | --- |
| dpo | sum | log-sigmoid of beta h, smoothed | arXiv:2305.18290, Eq. 7; cDPO, E. Mitchell's note |
| robust_dpo | sum | that of dpo, unbiased under flipped labels | arXiv:2403.00409 |
| ipo | mean | (h - 1 / (2 beta))^2 | arXiv:2310.12036, Eq. 17 |
| slic | sum | hinge of beta h | arXiv:2305.10425 |
| simpo | mean; no reference | log-sigmoid or hinge of beta (h - gamma / beta) | arXiv:2405.14734, Eq. 6 |
| bnf | a score of each token | bidirectional negative feedback | arXiv:2410.04834 |

h is the margin: the log-ratio of the chosen response minus that of the rejected one. The log-ratio of a
response is its log-probability under the policy minus that under the reference. Without a reference it is the
log-probability under the policy. A log-probability is the sum or the mean over the response's tokens.

Options of dpo and robust_dpo, applied in this order:
1. `ld_alpha` (LD-DPO, arXiv:2409.06411) multiplies the log-probabilities of tokens beyond the length of the
   pair's shorter response, under policy and reference. h is made of the sums.
2. `length_alpha` (length-regularised DPO, arXiv:2403.19159, Eq. 9) changes h.
3. `positive_lambda` (DPO-Positive, arXiv:2402.13228, Eq. 3) changes h further. The loss is then computed.
4. `sft_weight` times the negative mean log-probability of the chosen response is added to the loss.

Departures from the papers:
1. A pair without a winner is left out and counted. With `ties: half`, a tied pair is learned: its loss is the
   mean of two losses, one for each response as the chosen one. `abstentions: half` does this for a pair on
   which the oracle abstained. A pair in which a response has no trained token is always left out.
2. The loss is the mean over all learned pairs of the optimiser step.
3. Log-probabilities are raw and cover the trained tokens. If the end-of-text token was sampled, it is one of
   them.
4. IPO takes the mean over a response's tokens. The paper takes the sum; so does `normalize: sum`.
5. SLiC's hinge is applied to h, which is relative to the reference. The paper's regulariser is left out.
6. BNF compares the two responses of a pair; the paper needs no pairs. The scores of a response's tokens are
   added. By default both sums are divided by the length of the shorter response. With `normalize: own`, each
   sum is divided by the length of its own response.

`logps/reference_gap` is the mean of |log policy - log reference| over the trained tokens of the batch. It is
0 if the two models are equal. It is no estimate of a KL, even if the policy sampled the responses: ties are
left out, and an explorer selects pairs.

Not handled: more than one pair per group. `contrast.py` has more losses.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np

from oat.algorithms.base import OF_RESPONSES, Forward, Objective, Outputs, View
from oat.algorithms.pairs import halves, pair_batch, teaches
from oat.errors import ConfigError
from oat.lazy import lazily
from oat.types import Batch, Feedback, Item, Loss, Mark, Plan, Requires

if TYPE_CHECKING:
    import torch

    from oat import functional as F
else:
    torch, F = lazily("torch"), lazily("oat.functional")


Undecided = Literal["mask", "half"]
"""Treatment of a pair without a winner. `mask`: the pair is left out. `half`: its loss is the mean of two
losses. In the first loss, the first response counts as chosen; in the second loss, the second response."""


ROUNDING = 1e-5
"""Largest difference between log-probabilities from two float32 passes of the same weights, nats per token
(docs/architecture.md, law 7)."""


@dataclass(frozen=True)
class PairConfig:
    """Settings of every direct loss."""

    prompts: int = 64
    """Prompts per step."""
    samples: int = 2
    """Responses per prompt. More than two need an explorer."""
    epochs: int = 1
    """Passes over a step's pairs."""
    minibatches: int = 1
    """Optimiser steps per pass."""
    ties: Undecided = "mask"
    """Treatment of tied pairs (equal rewards, or a probability of one half). `mask`: they are left out.
    `half`: their loss is the mean of two losses, with the first and with the second response as the chosen
    one; `aot` refuses `half`. With `half` too, a tied pair of equal responses is left out."""
    abstentions: Undecided = "mask"
    """Treatment of pairs on which the oracle abstains. `mask` and `half` mean the same as for `ties`. Pairs
    of failed and unpaid questions are left out, whatever the setting."""

    def __post_init__(self) -> None:
        check_field("samples", self.samples, self.samples >= 2, "a pair needs at least 2")

    @property
    def halved(self) -> frozenset[Mark]:
        """Marks whose setting, `ties` or `abstentions`, is `half`."""
        policies: dict[Mark, Undecided] = {"tie": self.ties, "abstain": self.abstentions}
        return frozenset(mark for mark, policy in policies.items() if policy == "half")


@dataclass(frozen=True)
class WithReferenceConfig(PairConfig):
    """Settings that all losses with a margin over the reference have."""

    beta: float = 0.1
    """Strength of the tie to the reference: the margin at which the loss becomes flat is proportional to
    1 / beta."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_beta(self.beta)


@dataclass(frozen=True)
class DPOConfig(WithReferenceConfig):
    label_smoothing: float = 0.0
    """Probability that a label is wrong, in [0, 0.5)."""
    ld_alpha: float = 1.0
    """Factor of the log-probabilities of tokens beyond the length of the pair's shorter response, in [0, 1]
    (LD-DPO, arXiv:2409.06411). 1: all tokens count fully. 0: tokens beyond that length do not count."""
    length_alpha: float = 0.0
    """Penalty for each token of a response, in units of the implicit reward; 0 is off."""
    positive_lambda: float = 0.0
    """Weight of the penalty on a chosen response that is less probable under the policy than under the
    reference; 0 is off."""
    sft_weight: float = 0.0
    """Weight of the negative mean log-probability of the chosen response; 0 is off."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_smoothing(self.label_smoothing)
        is_share = 0 <= self.ld_alpha <= 1
        check_field("ld_alpha", self.ld_alpha, is_share, "it must be at least 0 and at most 1")
        for name in ("length_alpha", "positive_lambda", "sft_weight"):
            check_field(
                name, getattr(self, name), 0 <= getattr(self, name) < math.inf, "it must be at least 0"
            )


@dataclass(frozen=True)
class IPOConfig(WithReferenceConfig):
    normalize: Literal["mean", "sum"] = "mean"
    """Log-probability of a response. `mean`: the mean over its tokens. `sum`: the sum over its tokens."""


@dataclass(frozen=True)
class SimPOConfig(PairConfig):
    beta: float = 2.0
    """Factor of the difference between the mean log-probabilities of the two responses."""
    gamma_beta_ratio: float = 0.5
    """Target margin divided by beta, nats per token."""
    loss: Literal["sigmoid", "hinge"] = "sigmoid"
    """Loss as a function of beta times the margin: logistic (`sigmoid`), or `hinge`."""
    label_smoothing: float = 0.0
    """Probability that a label is wrong, in [0, 0.5). Refused with `loss: hinge`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_beta(self.beta)
        check_field(
            "gamma_beta_ratio",
            self.gamma_beta_ratio,
            0 <= self.gamma_beta_ratio < math.inf,
            "it must be at least 0",
        )
        _check_smoothing(self.label_smoothing)
        smoothed = self.loss == "sigmoid" or not self.label_smoothing
        check_field(
            "label_smoothing",
            self.label_smoothing,
            smoothed,
            "nothing reads it with algorithm.loss hinge; remove it",
        )


@dataclass(frozen=True)
class BNFConfig(PairConfig):
    normalize: Literal["shorter", "own"] = "shorter"
    """Length by which the sum of the loss over a response's tokens is divided. `shorter`: the length of the
    pair's shorter response. `own`: the response's own length."""


class Direct(Objective):
    """Base class of the direct losses. A subclass adds `rewards` and `pair_losses`."""

    config: PairConfig
    requires = Requires(feedback="compare", models=frozenset({"policy", "reference"}))
    wants: Mapping[str, set[str]] = {"policy": {"raw"}}
    watched = OF_RESPONSES | {"answers/tied_frac"}
    reuses = True
    weighs_winners = True

    def __init__(self, config: PairConfig):
        self.config = config

    def is_usable(self, item: Item) -> bool:
        return teaches(item, self.config.halved)

    def plan(self, step: int) -> Plan:
        return Plan(self.config.prompts, {"sampler": self.config.samples}, self.config.prompts)

    def prepare(self, feedback: Feedback, forward: Forward, generator: np.random.Generator) -> Batch:
        c, reference = self.config, "reference" in self.requires.models
        return pair_batch(
            feedback,
            forward,
            epochs=c.epochs,
            minibatches=c.minibatches,
            reference=reference,
            halved=c.halved,
        )

    def losses(self, outputs: Outputs, view: View) -> dict[str, Loss]:
        losses = self.pair_losses(outputs, view)
        if "turned_U" not in view.columns:
            return losses
        # the rows of a pair are 2u and 2u + 1, so the last bit of a row's number exchanges them
        turned = self.pair_losses(outputs, replace(view, row_of_K=view.row_of_K ^ 1))
        weight_U = view["turned_U"]
        return {
            name: replace(loss, terms=(1 - weight_U) * loss.terms + weight_U * turned[name].terms)
            for name, loss in losses.items()
        }

    def pair_losses(self, outputs: Outputs, view: View) -> dict[str, Loss]:
        """Return the parts of the loss, by metric name, with (U,) terms. Row 2u is the chosen response of
        pair u, row 2u + 1 the rejected one.

        Read the values of rows only through `View.row_sum` and `View.row_mean`. If the batch has
        pairs without a winner, `losses` calls this method a second time, with a view that exchanges the two
        rows of every pair.
        """
        raise NotImplementedError

    def rewards(self, outputs: Outputs, view: View) -> torch.Tensor:
        """Return the (N,) implicit rewards of the responses, nats."""
        raise NotImplementedError

    def metrics(self, outputs: Outputs, view: View) -> dict[str, tuple[torch.Tensor, str]]:
        rewards_N, logps_N = self.rewards(outputs, view), view.row_sum(outputs["policy"]["raw"])
        chosen_U, rejected_U = halves(rewards_N)
        values = {
            "pairs/accuracy": (chosen_U > rejected_U).float(),
            "pairs/margin": chosen_U - rejected_U,
            "pairs/reward_chosen": chosen_U,
            "pairs/reward_rejected": rejected_U,
            "logps/chosen": logps_N[0::2],
            "logps/rejected": logps_N[1::2],
        }
        is_learned_U = view.columns.get("mask_U", torch.ones_like(chosen_U)) > 0
        has_winner_U = is_learned_U & (view.columns.get("turned_U", torch.zeros_like(chosen_U)) != 0.5)
        moved = (
            {"logps/reference_gap": (reference_gap(outputs, view), "K")}
            if "reference_logps_K" in view.columns
            else {}
        )
        return {**{name: (values_U[has_winner_U], "U") for name, values_U in values.items()}, **moved}


class WithReference(Direct):
    """Base class of the losses with a margin over the reference. A subclass adds `terms`."""

    config: WithReferenceConfig

    def pair_losses(self, outputs: Outputs, view: View) -> dict[str, Loss]:
        return {"loss/preference": Loss(self.terms(self.margin(outputs, view)), per="pair")}

    def terms(self, margin_U: torch.Tensor) -> torch.Tensor:
        """Return the (U,) losses of the pairs."""
        raise NotImplementedError

    def margin(self, outputs: Outputs, view: View) -> torch.Tensor:
        """Return the (U,) margins h of the pairs, nats."""
        policy_N, reference_N = self.logps(outputs, view)
        return F.preference.dpo_margin(*halves(policy_N), *halves(reference_N))

    def logps(self, outputs: Outputs, view: View) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the log-probabilities of the responses under the policy and under the reference, (N,) each,
        nats."""
        return view.row_sum(outputs["policy"]["raw"]), view.row_sum(view["reference_logps_K"])

    def rewards(self, outputs: Outputs, view: View) -> torch.Tensor:
        policy_N, reference_N = self.logps(outputs, view)
        return self.config.beta * (policy_N - reference_N)


Tied = WithReference
TiedConfig = WithReferenceConfig
"""`Tied` and `TiedConfig` are the former names of `WithReference` and `WithReferenceConfig`. A user's loss
may import them if its run began before the classes were renamed."""


class DPO(WithReference):
    name = "dpo"
    Config = DPOConfig
    config: DPOConfig

    def pair_losses(self, outputs: Outputs, view: View) -> dict[str, Loss]:
        losses = super().pair_losses(outputs, view)
        if self.config.sft_weight:
            chosen_U, _ = halves(view.row_mean(outputs["policy"]["raw"]))
            losses["loss/sft"] = Loss(-chosen_U, per="pair", coef=self.config.sft_weight)
        return losses

    def terms(self, margin_U: torch.Tensor) -> torch.Tensor:
        return F.preference.dpo_loss(
            margin_U, beta=self.config.beta, label_smoothing=self.config.label_smoothing
        )

    def margin(self, outputs: Outputs, view: View) -> torch.Tensor:
        c, counted_K = self.config, torch.ones_like(outputs["policy"]["raw"])
        given = (outputs["policy"]["raw"], view["reference_logps_K"], counted_K)
        policy_N, reference_N, counted_N = (view.row_sum(self._counted(each, view)) for each in given)
        margin_U = F.preference.dpo_margin(*halves(policy_N), *halves(reference_N))
        if c.length_alpha:
            margin_U = F.preference.length_margin(
                margin_U, *halves(response_lengths(outputs, view)), alpha=c.length_alpha, beta=c.beta
            )
        if c.positive_lambda:
            (policy_U, _), (reference_U, _), (counted_U, _) = map(halves, (policy_N, reference_N, counted_N))
            margin_U = F.preference.positive_margin(
                margin_U, policy_U, reference_U, weight=c.positive_lambda, rounding_U=ROUNDING * counted_U
            )
        return margin_U

    def _counted(self, values_K: torch.Tensor, view: View) -> torch.Tensor:
        """Return values of tokens, (K,), each times the factor with which its log-probability counts."""
        alpha = self.config.ld_alpha
        if alpha == 1:
            return values_K
        return F.preference.length_desensitised(values_K, view.row_of_K, view.num_rows, alpha=alpha)


class RobustDPO(DPO):
    name = "robust_dpo"

    def terms(self, margin_U: torch.Tensor) -> torch.Tensor:
        return F.preference.robust_dpo_loss(
            margin_U, beta=self.config.beta, label_smoothing=self.config.label_smoothing
        )


class IPO(WithReference):
    name = "ipo"
    Config = IPOConfig
    config: IPOConfig

    def terms(self, margin_U: torch.Tensor) -> torch.Tensor:
        return F.preference.ipo_loss(margin_U, beta=self.config.beta)

    def logps(self, outputs: Outputs, view: View) -> tuple[torch.Tensor, torch.Tensor]:
        if self.config.normalize == "sum":
            return super().logps(outputs, view)
        return view.row_mean(outputs["policy"]["raw"]), view.row_mean(view["reference_logps_K"])


class SLiC(WithReference):
    name = "slic"
    Config = WithReferenceConfig

    def terms(self, margin_U: torch.Tensor) -> torch.Tensor:
        return F.preference.hinge_loss(margin_U, beta=self.config.beta)


class SimPO(Direct):
    name = "simpo"
    Config = SimPOConfig
    config: SimPOConfig
    requires = Requires(feedback="compare", models=frozenset({"policy"}))

    def pair_losses(self, outputs: Outputs, view: View) -> dict[str, Loss]:
        c, means_N = self.config, view.row_mean(outputs["policy"]["raw"])
        margin_U = F.preference.simpo_margin(*halves(means_N), gamma_beta_ratio=c.gamma_beta_ratio)
        if c.loss == "hinge":
            terms_U = F.preference.hinge_loss(margin_U, beta=c.beta)
        else:
            terms_U = F.preference.dpo_loss(margin_U, beta=c.beta, label_smoothing=c.label_smoothing)
        return {"loss/preference": Loss(terms_U, per="pair")}

    def rewards(self, outputs: Outputs, view: View) -> torch.Tensor:
        return self.config.beta * view.row_mean(outputs["policy"]["raw"])


class BNF(Direct):
    name = "bnf"
    Config = BNFConfig
    config: BNFConfig
    wants: Mapping[str, set[str]] = {"policy": {"raw", "entropy"}}

    def pair_losses(self, outputs: Outputs, view: View) -> dict[str, Loss]:
        policy = outputs["policy"]
        scores_N = view.row_sum(
            F.preference.bnf_scores(policy["raw"], view["reference_logps_K"], policy["entropy"])
        )
        terms_U = F.preference.bnf_loss(
            *halves(scores_N),
            *halves(response_lengths(outputs, view)),
            own_length=self.config.normalize == "own",
        )
        return {"loss/preference": Loss(terms_U, per="pair")}

    def rewards(self, outputs: Outputs, view: View) -> torch.Tensor:
        return view.row_sum(outputs["policy"]["raw"] - view["reference_logps_K"])


def response_lengths(outputs: Outputs, view: View) -> torch.Tensor:
    """Return the number of trained tokens of each response, (N,)."""
    return view.row_sum(torch.ones_like(outputs["policy"]["raw"]))


def reference_gap(outputs: Outputs, view: View) -> torch.Tensor:
    """Return |log policy - log reference| of each trained token, (K,), nats."""
    return (outputs["policy"]["raw"] - view["reference_logps_K"]).abs()


def check_field(name: str, value: object, holds: bool, why: str) -> None:
    """Raise an error if a setting has a wrong value.

    Raises:
        ConfigError: `holds` is false. The message names the setting and its value, and ends with `why`.
    """
    if not holds:
        raise ConfigError(f"algorithm.{name} is {value}; {why}")


def check_beta(beta: float) -> None:
    check_field("beta", beta, 0 < beta < math.inf, "it must be positive")


def _check_smoothing(label_smoothing: float) -> None:
    check_field(
        "label_smoothing", label_smoothing, 0 <= label_smoothing < 0.5, "it is a probability below one half"
    )
