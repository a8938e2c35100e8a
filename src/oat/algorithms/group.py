"""Policy gradients without a critic. The algorithms differ in three choices: the advantage estimator
(`estimators.py`), the policy loss (`surrogates.py`), and the reduction of the loss:

    grpo          DeepSeekMath, arXiv:2402.03300, Eq. 3. Advantages are divided by the group's standard
                  deviation. The loss is a mean over the tokens of each sequence.
    dr_grpo       arXiv:2503.20783, Section 3.2. Advantages are not divided. The loss is a sum over the tokens
                  of each sequence, divided by a constant (`max_length`). So neither easy prompts nor short
                  responses get extra weight.
    rloo          arXiv:2402.14740, Eq. 8. The baseline is the mean of the group's other rewards. The loss is
                  a sum over the tokens of each sequence.
    reinforce_pp  REINFORCE++, arXiv:2501.03262. The group has no part in the advantage, which is normalised
                  over all tokens of the step. The loss is a mean over tokens. With `advantage: group_mean`
                  this is its form with a baseline.
    gspo          arXiv:2507.18071, Eq. 5. One importance ratio for each sequence.
    cispo         MiniMax-M1, arXiv:2506.13585, Eq. 4. The importance ratio is clipped, and gives no gradient.
    cpgd          arXiv:2505.12504. The logarithm of the ratio is clipped, and a term holds the policy near
                  the policy at the start of the step (`drift_coef`).

Departures from the papers:
1. The standard deviation is unbiased, and `std_eps` (by default 1e-4) is added to it. In a group with one
   score only, or with equal scores only, all advantages are 0. The group's samples with a score still count
   in every denominator.
2. The KL to the reference (k3 of `functional/kl.py`, Eq. 4) is off by default (`kl_coef: 0`). With
   `kl_target`, its coefficient is adaptive (arXiv:1909.08593, Section 2.2; `adapted_coef`). Before a step
   learns, the coefficient is adapted to the mean of k3 per token, under the weights at the start of the step.
   The paper adapts it after the step, to the divergence per response.
3. A sample without a score (abstained, failed or unpaid) is left out of its group's statistics and of the
   loss.
4. `reduction: sequence` is GRPO's reduction; `token` is DAPO's (arXiv:2503.14476).

If the policy's present weights sampled every token of a step, in the learner's precision, the recorded
sampled log-probabilities serve as the old ones. Otherwise the learner computes the old ones.

Not handled: importance weights for a lagging sampler. `logps/recorded_gap` shows how far the recorded
log-probabilities are from the old ones.
"""

import math
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import torch

from oat.algorithms.base import OF_RESPONSES, Forward, Objective, Outputs, View, row_index
from oat.algorithms.estimators import ESTIMATORS, Rewards
from oat.algorithms.group_config import (
    CISPOConfig,
    CPGDConfig,
    DrGRPOConfig,
    GroupConfig,
    GRPOConfig,
    GSPOConfig,
    ReducedConfig,
    ReinforcePPConfig,
    RLOOConfig,
)
from oat.algorithms.surrogates import POLICY_LOSSES
from oat.errors import ConfigError
from oat.functional.advantages import whiten
from oat.functional.kl import adapted_coef, kl_k1, kl_k3
from oat.functional.policy import log_ratio
from oat.functional.returns import discounted_returns
from oat.functional.surrogates import policy_drift
from oat.types import Batch, Feedback, Item, Loss, Plan, Requires, Trajectory
from oat.types.part import Derived, RunFacts


class GroupPolicyGradient(Objective):
    """Base class of the algorithms in this file. A subclass adds `reduced`."""

    config: GroupConfig
    setting_for: Mapping[str, str] = {"kl/reference": "kl_coef"}

    def __init__(self, config: GroupConfig):
        self.config = config
        has_reference = bool(config.kl_coef or config.kl_reward_coef)
        models = {"policy", "reference"} if has_reference else {"policy"}
        self.requires = Requires(feedback="score", models=frozenset(models), ratio_based=True)
        self.wants: Mapping[str, set[str]] = {
            "policy": {"sampled", "raw", "entropy"} if has_reference else {"sampled", "entropy"}
        }
        tie = {"kl/reference"} if has_reference else set()
        self.kl_coef = config.kl_coef
        self.has_reference = has_reference
        self.watched = OF_RESPONSES | {"policy/entropy", "policy/ratio_max", "reward/zero_spread_frac"} | tie

    def reduced(self, terms_K: torch.Tensor, coef: float = 1.0) -> Loss:
        """Make a part of the loss from terms, (K,), with the algorithm's reduction."""
        raise NotImplementedError

    def is_usable(self, item: Item) -> bool:
        """Return True if one of the advantages within the item's group is not 0. Advantages that are made of
        all tokens of the step, or with a KL in the rewards, differ within any group: then a single score is
        enough."""
        rows, group_of_N, rewards_N, valid_N = scored_rows(Feedback(0, (item,), queries=0))
        if self._is_per_token:
            return bool(valid_N.any())
        advantages_N = self._advantages(rows, rewards_N, group_of_N, 1, valid_N)
        return bool((advantages_N[valid_N] != 0).any())

    def plan(self, step: int) -> Plan:
        return Plan(self.config.prompts, {"sampler": self.config.samples}, self.config.prompts)

    def prepare(self, feedback: Feedback, forward: Forward, generator: np.random.Generator) -> Batch:
        rows, group_of_N, rewards_N, valid_N = scored_rows(feedback)
        metrics: dict[str, float] = {}
        advantages_N = self._advantages(rows, rewards_N, group_of_N, len(feedback.learned), valid_N)
        rows, group_of_N, advantages_N = _kept(rows, group_of_N, advantages_N, valid_N)
        columns = {} if self._is_per_token else {"advantages_N": advantages_N}
        if rows:
            recorded_K = recorded_logps(rows)
            columns["old_logps_K"] = old_logps(
                rows, recorded_K, feedback.step, forward, is_same_precision=self.recorded_is_old
            )
            metrics["logps/recomputed"] = float(columns["old_logps_K"] is not recorded_K)
            metrics["logps/recorded_gap"] = (
                float((columns["old_logps_K"] - recorded_K).abs().mean()) if len(recorded_K) else 0.0
            )
            if self.has_reference:
                columns["reference_logps_K"] = forward("reference", rows, {"raw"})["raw"]
            if self.config.kl_target is not None:
                self._adapt(rows, columns["reference_logps_K"], feedback.step, forward)
                columns["kl_coef_N"] = torch.full((len(rows),), self.kl_coef, dtype=torch.float64)
                metrics["kl/coef"] = self.kl_coef
            if self._is_per_token:
                raw_K = self._raw(rows, feedback.step, forward) if self.config.kl_reward_coef else None
                reference_K = columns.get("reference_logps_K")
                columns["advantages_K"] = self._token_advantages(rows, advantages_N, raw_K, reference_K)
        metrics["rows/trained"] = float(len(rows))
        units = np.arange(len(rows))
        return Batch(
            rows,
            units,
            group_of_N.numpy(),
            columns,
            epochs=self.config.epochs,
            minibatches=self.config.minibatches,
            metrics=metrics,
        )

    def losses(self, outputs: Outputs, view: View) -> dict[str, Loss]:
        policy = outputs["policy"]
        terms_K, _ = self._surrogate(outputs, view)
        losses = {"loss/policy": self.reduced(terms_K)}
        if self.config.drift_coef:
            drift_K = policy_drift(policy["sampled"], view["old_logps_K"])
            losses["loss/drift"] = self.reduced(drift_K, coef=self.config.drift_coef)
        if self.config.kl_coef:
            adapted_N = view.columns.get("kl_coef_N")
            coef = self.config.kl_coef if adapted_N is None else float(adapted_N[0])
            losses["loss/kl"] = self.reduced(kl_k3(policy["raw"], view["reference_logps_K"]), coef=coef)
        return losses

    def metrics(self, outputs: Outputs, view: View) -> dict[str, tuple[torch.Tensor, str]]:
        policy = outputs["policy"]
        ratio_K = log_ratio(policy["sampled"], view["old_logps_K"]).exp()
        values = {
            "policy/clipped_frac": (self._surrogate(outputs, view)[1], "K"),
            "policy/entropy": (policy["entropy"], "K"),
            "policy/ratio_max": (ratio_K, "max"),
            "policy/ratio_min": (ratio_K, "min"),
        }
        if self.config.target_kl is not None:
            values["kl/old"] = (kl_k3(view["old_logps_K"], policy["sampled"]), "K")
        if self.has_reference:
            values["kl/reference"] = (kl_k3(policy["raw"], view["reference_logps_K"]), "K")
        return values

    def ends_passes(self, values: Mapping[str, float]) -> bool:
        return self.config.target_kl is not None and values.get("kl/old", 0.0) > self.config.target_kl

    @property
    def state(self) -> dict[str, Any]:
        return (
            {} if self.config.kl_target is None else {"kl_coef": self.kl_coef, "started": self.config.kl_coef}
        )

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore the adapted weight of the KL. A fork ignores the saved weight if `kl_target` is not set, or
        if its `kl_coef` differs from that of the original run."""
        if self.config.kl_target is not None and state.get("started") == self.config.kl_coef:
            self.kl_coef = state["kl_coef"]

    def _adapt(
        self, rows: tuple[Trajectory, ...], reference_K: torch.Tensor, step: int, forward: Forward
    ) -> None:
        """Adapt `kl_coef` to the KL from the reference, which is estimated on these rows before the step's
        update."""
        target, horizon = self.config.kl_target, self.config.kl_horizon
        assert target is not None, "asked for where there is one"
        raw_K = self._raw(rows, step, forward)
        divergence = float(kl_k3(raw_K, reference_K).mean()) if len(raw_K) else math.nan
        self.kl_coef = adapted_coef(
            self.kl_coef, divergence, target=target, samples=len(rows), horizon=horizon
        )

    def _raw(self, rows: tuple[Trajectory, ...], step: int, forward: Forward) -> torch.Tensor:
        """Return the policy's raw log-probabilities at the start of this step, (K,)."""
        if _is_fresh(rows, step, self.recorded_is_old):
            return recorded_logps(rows, "raw_logps")
        return forward("policy", rows, {"raw"})["raw"]

    @property
    def _is_per_token(self) -> bool:
        """True if the tokens of one response may have different advantages, or ones that depend on other
        groups."""
        return bool(self.config.whiten or self.config.kl_reward_coef or self.config.gamma != 1)

    def _advantages(
        self,
        rows: tuple[Trajectory, ...],
        rewards_N: torch.Tensor,
        group_of_N: torch.Tensor,
        num_groups: int,
        valid_N: torch.Tensor,
    ) -> torch.Tensor:
        """Return the (N,) advantages of the responses by the chosen estimator."""
        lengths_N = torch.tensor([float(row.trained.sum()) for row in rows], dtype=rewards_N.dtype)
        place = (group_of_N, num_groups, valid_N)
        return ESTIMATORS[self.config.advantage](Rewards(rewards_N, lengths_N, *place, self.config.std_eps))

    def _token_advantages(
        self,
        rows: tuple[Trajectory, ...],
        advantages_N: torch.Tensor,
        raw_K: torch.Tensor | None,
        reference_K: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return the (K,) advantages of the tokens. A response's advantage is the reward of its last token,
        the KL penalty lowers the rewards of all tokens, and an advantage is the discounted sum of the rewards
        from its token on. Then they are whitened."""
        row_of_K = row_index(rows)
        lengths_N = row_of_K.bincount(minlength=len(rows))
        has_tokens_N = lengths_N > 0
        rewards_K = torch.zeros(len(row_of_K))
        rewards_K[(lengths_N.cumsum(0) - 1)[has_tokens_N]] = advantages_N[has_tokens_N]
        if raw_K is not None and reference_K is not None:
            rewards_K -= self.config.kl_reward_coef * kl_k1(raw_K, reference_K)
        returns_K = discounted_returns(rewards_K, row_of_K, len(rows), gamma=self.config.gamma)
        return whiten(returns_K, torch.ones_like(returns_K)) if self.config.whiten else returns_K

    def _surrogate(self, outputs: Outputs, view: View) -> tuple[torch.Tensor, torch.Tensor]:
        advantages_K = view["advantages_K"] if self._is_per_token else view["advantages_N"][view.row_of_K]
        loss = POLICY_LOSSES[self.config.policy_loss]
        return loss(self.config, view, outputs["policy"]["sampled"], view["old_logps_K"], advantages_K)


class ReducedPolicyGradient(GroupPolicyGradient):
    """Base class of the algorithms that may choose the reduction of their loss."""

    config: ReducedConfig

    def reduced(self, terms_K: torch.Tensor, coef: float = 1.0) -> Loss:
        return Loss(terms_K, per=self.config.reduction, coef=coef)


class GRPO(ReducedPolicyGradient):
    name = "grpo"
    Config = GRPOConfig


class RLOO(ReducedPolicyGradient):
    name = "rloo"
    Config = RLOOConfig


class ReinforcePP(ReducedPolicyGradient):
    name = "reinforce_pp"
    Config = ReinforcePPConfig


class GSPO(ReducedPolicyGradient):
    name = "gspo"
    Config = GSPOConfig


class CISPO(ReducedPolicyGradient):
    name = "cispo"
    Config = CISPOConfig


class CPGD(ReducedPolicyGradient):
    name = "cpgd"
    Config = CPGDConfig


class DrGRPO(GroupPolicyGradient):
    name = "dr_grpo"
    Config = DrGRPOConfig
    config: DrGRPOConfig

    def __init__(self, config: DrGRPOConfig):
        if config.max_length is None:
            raise ConfigError(
                "algorithm.max_length is not set; give the most tokens that a response may have"
            )
        super().__init__(config)
        self.max_length = float(config.max_length)

    @staticmethod
    def defaults(config: DrGRPOConfig, run: RunFacts) -> Mapping[str, Derived]:
        """Return `sampling.max_new_tokens` as the value of `max_length`. Return an empty dict if `max_length`
        is set.

        Raises:
            ConfigError: `max_length` is below `sampling.max_new_tokens`; or it is not set in a run with an
                environment, since nothing bounds the responses of an episode.
        """
        if run.has_environment:
            if config.max_length is None:
                raise ConfigError(
                    "set algorithm.max_length, the most tokens that the responses of an episode may have "
                    "together"
                )
            return {}
        if config.max_length is None:
            return {"max_length": Derived(run.max_new_tokens, "as sampling.max_new_tokens")}
        if config.max_length < run.max_new_tokens:
            raise ConfigError(
                f"algorithm.max_length is {config.max_length}: a response may have sampling.max_new_tokens "
                f"{run.max_new_tokens}; set as much or more, or leave it out"
            )
        return {}

    def reduced(self, terms_K: torch.Tensor, coef: float = 1.0) -> Loss:
        return Loss(terms_K, per="constant", coef=coef, constant=self.max_length)


def scored_rows(
    feedback: Feedback,
) -> tuple[tuple[Trajectory, ...], torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the samples of a step's feedback with their scores, group after group. The groups of earlier
    steps (`feedback.older`) come first.

    Returns:
        The N trajectories; the index of each one's group, (N,); the scores, (N,), NaN for a missing score;
        and (N,) bool, True if there is a score.
    """
    rows = []
    groups = []
    rewards = []
    valid = []
    for number, item in enumerate(feedback.learned):
        for pick, value, mark in zip(item.question.picks, item.answer.values, item.answer.marks, strict=True):
            rows.append(item.group.trajectories[pick])
            groups.append(number)
            rewards.append(value if mark == "ok" else float("nan"))
            valid.append(mark == "ok")
    return (
        tuple(rows),
        torch.tensor(groups, dtype=torch.long),
        torch.tensor(rewards, dtype=torch.float32),
        torch.tensor(valid, dtype=torch.bool),
    )


def recorded_logps(
    rows: tuple[Trajectory, ...], name: Literal["raw_logps", "sampled_logps"] = "sampled_logps"
) -> torch.Tensor:
    """Return the log-probabilities recorded at sampling, (K,)."""
    return torch.from_numpy(np.concatenate([row.recorded(name) for row in rows]).astype(np.float32))


def old_logps(
    rows: tuple[Trajectory, ...],
    recorded_K: torch.Tensor,
    step: int,
    forward: Forward,
    *,
    is_same_precision: bool,
) -> torch.Tensor:
    """Return the policy's sampled log-probabilities at the start of this step, (K,).

    They are `recorded_K` if exactly these weights sampled every token, in the learner's precision
    (`Objective.recorded_is_old`). Otherwise a forward pass computes them.
    """
    return (
        recorded_K
        if _is_fresh(rows, step, is_same_precision)
        else forward("policy", rows, {"sampled"})["sampled"]
    )


def _is_fresh(rows: tuple[Trajectory, ...], step: int, is_same_precision: bool) -> bool:
    """Return True if the log-probabilities recorded at sampling are those that the policy gives now."""
    return is_same_precision and all(
        row.slot == "sampler" and (row.recorded("versions") == step).all() for row in rows
    )


def _kept(
    rows: tuple[Trajectory, ...], group_of_N: torch.Tensor, advantages_N: torch.Tensor, valid_N: torch.Tensor
) -> tuple[tuple[Trajectory, ...], torch.Tensor, torch.Tensor]:
    kept = tuple(row for row, valid in zip(rows, valid_N.tolist(), strict=True) if valid)
    _, groups = group_of_N[valid_N].unique(return_inverse=True)
    return kept, groups, advantages_N[valid_N]
