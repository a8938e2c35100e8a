"""Policy gradients with a baseline from the group, and the clipped surrogate of PPO:

    grpo      DeepSeekMath, arXiv:2402.03300, Eq. 3. Advantages are divided by the group's standard deviation.
              The loss is a mean over the tokens of each sequence.
    dr_grpo   arXiv:2503.20783, Section 3.2. Advantages are not divided. The loss is a sum over the tokens of
              each sequence, divided by a constant (`max_length`). So neither easy prompts nor short
              responses get extra weight.

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
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from oat.algorithms.base import OF_RESPONSES, Forward, Objective, Outputs, View
from oat.errors import ConfigError
from oat.functional.advantages import group_advantages
from oat.functional.kl import adapted_coef, kl_k3
from oat.functional.policy import clipped_policy_loss, log_ratio
from oat.types import Batch, Feedback, Item, Loss, Plan, Requires, Trajectory
from oat.types.part import Derived, RunFacts


@dataclass(frozen=True)
class GroupConfig:
    """Settings of every algorithm in this file."""

    prompts: int = 16
    """Prompts per step."""
    samples: int = 8
    """Responses per prompt: the size of a group."""
    clip_low: float = 0.2
    """The importance ratio is clipped from below at 1 - clip_low."""
    clip_high: float = 0.2
    """The importance ratio is clipped from above at 1 + clip_high."""
    kl_coef: float = 0.0
    """Weight of the KL to the reference. 0: no KL, and no reference is needed. With `kl_target`, this is the
    weight at the start of the run."""
    kl_target: float | None = None
    """Target of the KL to the reference, nats per token. Each step changes the weight so that the KL moves
    towards the target. None: the weight is fixed."""
    kl_horizon: int = 10_000
    """Number of responses over which the weight of the KL can grow or shrink by about a fifth. It must be at
    least the number of responses of one step."""
    epochs: int = 1
    """Passes over a step's samples."""
    minibatches: int = 1
    """Optimiser steps per pass."""
    target_kl: float | None = None
    """Largest KL(old policy || policy), nats per token. An update ends before the optimiser step whose
    mini-batch is above it. None: an update makes all of its optimiser steps."""

    def __post_init__(self) -> None:
        if self.samples < 2:
            raise ConfigError(
                f"algorithm.samples is {self.samples}; a group needs at least 2 responses a prompt"
            )
        if not 0 <= self.clip_low < 1:
            raise ConfigError(f"algorithm.clip_low is {self.clip_low}; it must be at least 0 and below 1")
        for name in ("clip_high", "kl_coef"):
            _check_finite(name, getattr(self, name))
        self._check_control()
        self._check_ends()

    def _check_ends(self) -> None:
        """Check the setting that ends passes early."""
        if self.target_kl is None:
            return
        if not 0 < self.target_kl < math.inf:
            raise ConfigError(f"algorithm.target_kl is {self.target_kl}; it must be positive, and finite")
        if self.epochs * self.minibatches == 1:
            raise ConfigError(
                "algorithm.target_kl is set, and an update is one optimiser step, at which the KL is 0; set "
                "algorithm.epochs or minibatches above 1, or remove it"
            )

    def _check_control(self) -> None:
        """Check the settings that adapt the weight of the KL."""
        if self.kl_target is None:
            if self.kl_horizon != GroupConfig.kl_horizon:
                raise ConfigError(
                    f"algorithm.kl_horizon is {self.kl_horizon}, and nothing reads it without "
                    "algorithm.kl_target; remove it"
                )
            return
        if not 0 < self.kl_target < math.inf:
            raise ConfigError(f"algorithm.kl_target is {self.kl_target}; it must be positive, and finite")
        if not self.kl_coef:
            raise ConfigError(
                "algorithm.kl_target is set, and algorithm.kl_coef is 0, of which every multiple is 0; "
                "set kl_coef to where it starts"
            )
        if self.kl_horizon < self.prompts * self.samples:
            raise ConfigError(
                f"algorithm.kl_horizon is {self.kl_horizon}, less than the {self.prompts * self.samples} "
                "responses of a step, so the coefficient "
                "would leap; raise it"
            )


@dataclass(frozen=True)
class GRPOConfig(GroupConfig):
    std_eps: float = 1e-4
    """Number that is added to the standard deviation of a group."""
    reduction: Literal["sequence", "token"] = "sequence"
    """Mean over tokens in the loss. `sequence`: the mean over each response's tokens, and then over
    responses. `token`: the mean over all tokens of the step."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_finite("std_eps", self.std_eps)


@dataclass(frozen=True)
class DrGRPOConfig(GroupConfig):
    max_length: int | None = None
    """Constant by which the sum over a response's tokens is divided. None: sampling.max_new_tokens; a smaller
    value is refused. With an environment it must be set, to the largest number of tokens that all responses
    of an episode may have together."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_length is not None and self.max_length < 1:
            raise ConfigError(f"algorithm.max_length is {self.max_length}; it must be at least 1")


class GroupPolicyGradient(Objective):
    """Base class of the algorithms in this file. A subclass adds `advantages` and `reduced`."""

    config: GroupConfig
    setting_for: Mapping[str, str] = {"kl/reference": "kl_coef"}

    def __init__(self, config: GroupConfig):
        self.config = config
        models = {"policy", "reference"} if config.kl_coef else {"policy"}
        self.requires = Requires(feedback="score", models=frozenset(models), ratio_based=True)
        self.wants: Mapping[str, set[str]] = {
            "policy": {"sampled", "raw", "entropy"} if config.kl_coef else {"sampled", "entropy"}
        }
        tie = {"kl/reference"} if config.kl_coef else set()
        self.kl_coef = config.kl_coef
        self.watched = OF_RESPONSES | {"policy/entropy", "policy/ratio_max", "reward/zero_spread_frac"} | tie

    def advantages(
        self, rewards_N: torch.Tensor, group_of_N: torch.Tensor, num_groups: int, valid_N: torch.Tensor
    ) -> torch.Tensor:
        """Return the (N,) advantages of the samples; see `group_advantages`."""
        raise NotImplementedError

    def reduced(self, terms_K: torch.Tensor, coef: float = 1.0) -> Loss:
        """Make a part of the loss from terms, (K,), with the algorithm's reduction."""
        raise NotImplementedError

    def is_usable(self, item: Item) -> bool:
        """Return True if one of the advantages within the item's group is not 0."""
        _, group_of_N, rewards_N, valid_N = scored_rows(Feedback(0, (item,), queries=0))
        advantages_N = self.advantages(rewards_N, group_of_N, 1, valid_N)
        return bool((advantages_N[valid_N] != 0).any())

    def plan(self, step: int) -> Plan:
        return Plan(self.config.prompts, {"sampler": self.config.samples}, self.config.prompts)

    def prepare(self, feedback: Feedback, forward: Forward, generator: np.random.Generator) -> Batch:
        rows, group_of_N, rewards_N, valid_N = scored_rows(feedback)
        metrics: dict[str, float] = {}
        advantages_N = self.advantages(rewards_N, group_of_N, len(feedback.items), valid_N)
        rows, group_of_N, advantages_N = _kept(rows, group_of_N, advantages_N, valid_N)
        columns = {"advantages_N": advantages_N}
        if rows:
            recorded_K = recorded_logps(rows)
            columns["old_logps_K"] = old_logps(
                rows, recorded_K, feedback.step, forward, is_same_precision=self.recorded_is_old
            )
            metrics["logps/recomputed"] = float(columns["old_logps_K"] is not recorded_K)
            metrics["logps/recorded_gap"] = (
                float((columns["old_logps_K"] - recorded_K).abs().mean()) if len(recorded_K) else 0.0
            )
            if self.config.kl_coef:
                columns["reference_logps_K"] = forward("reference", rows, {"raw"})["raw"]
                if self.config.kl_target is not None:
                    self._adapt(rows, columns["reference_logps_K"], feedback.step, forward)
                    columns["kl_coef_N"] = torch.full((len(rows),), self.kl_coef, dtype=torch.float64)
                    metrics["kl/coef"] = self.kl_coef
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
        if self.config.kl_coef:
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
        raw_K = (
            recorded_logps(rows, "raw_logps")
            if _is_fresh(rows, step, self.recorded_is_old)
            else forward("policy", rows, {"raw"})["raw"]
        )
        divergence = float(kl_k3(raw_K, reference_K).mean()) if len(raw_K) else math.nan
        self.kl_coef = adapted_coef(
            self.kl_coef, divergence, target=target, samples=len(rows), horizon=horizon
        )

    def _surrogate(self, outputs: Outputs, view: View) -> tuple[torch.Tensor, torch.Tensor]:
        advantages_K = view["advantages_N"][view.row_of_K]
        clips = {"clip_low": self.config.clip_low, "clip_high": self.config.clip_high}
        return clipped_policy_loss(outputs["policy"]["sampled"], view["old_logps_K"], advantages_K, **clips)


class GRPO(GroupPolicyGradient):
    name = "grpo"
    Config = GRPOConfig
    config: GRPOConfig

    def advantages(
        self, rewards_N: torch.Tensor, group_of_N: torch.Tensor, num_groups: int, valid_N: torch.Tensor
    ) -> torch.Tensor:
        return group_advantages(rewards_N, group_of_N, num_groups, valid_N=valid_N, eps=self.config.std_eps)

    def reduced(self, terms_K: torch.Tensor, coef: float = 1.0) -> Loss:
        return Loss(terms_K, per=self.config.reduction, coef=coef)


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

    def advantages(
        self, rewards_N: torch.Tensor, group_of_N: torch.Tensor, num_groups: int, valid_N: torch.Tensor
    ) -> torch.Tensor:
        return group_advantages(rewards_N, group_of_N, num_groups, valid_N=valid_N, normalise=False)

    def reduced(self, terms_K: torch.Tensor, coef: float = 1.0) -> Loss:
        return Loss(terms_K, per="constant", coef=coef, constant=self.max_length)


def _check_finite(name: str, value: float) -> None:
    if not 0 <= value < math.inf:
        raise ConfigError(f"algorithm.{name} is {value}; it must be at least 0, and finite")


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
