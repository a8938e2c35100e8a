"""The way from scored responses to an update of the policy, which all policy gradients share.

`prepare` makes columns in this order:

1. The scores become rewards (`scored_rows`). A response without a score is left out.
2. The models compute values for the rows before the update (`rows.StartValues`).
3. The estimator (`estimators.py`) makes an advantage for each response. If tokens of one response may differ
   (`gamma`, `whiten`, a KL in the rewards), each token gets an advantage of its own.

`losses` has the policy's loss (`surrogates.py`) and the terms that hold the policy near the reference and the
old policy. An algorithm chooses the reduction (`reduced`).
"""

import math
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import torch

from oat.algorithms.base import OF_RESPONSES, Forward, Objective, Outputs, View, row_index
from oat.algorithms.estimators import Rewards, find_estimator
from oat.algorithms.policy_gradient_config import PolicyGradientConfig
from oat.algorithms.rows import ScoredRows, StartValues, scored_rows, start_values
from oat.algorithms.surrogates import POLICY_LOSSES, TokenTerms
from oat.functional.advantages import whiten
from oat.functional.kl import adapted_coef, kl_k1, kl_k3
from oat.functional.policy import log_ratio
from oat.functional.returns import discounted_returns
from oat.functional.surrogates import policy_drift
from oat.types import Batch, Feedback, Item, Loss, Plan, Requires


class PolicyGradient(Objective):
    """Base class of the policy gradients. A subclass adds `reduced`."""

    config: PolicyGradientConfig
    setting_for: Mapping[str, str] = {"kl/reference": "kl_coef"}

    def __init__(self, config: PolicyGradientConfig):
        self.config = config
        self.estimator = find_estimator(config.advantage)
        self.has_reference = bool(config.kl_coef or config.kl_reward_coef)
        models = {"policy", "reference"} if self.has_reference else {"policy"}
        self.requires = Requires(feedback="score", models=frozenset(models), ratio_based=True)
        self.wants: Mapping[str, set[str]] = {
            "policy": {"sampled", "entropy", *(["raw"] if self.has_reference else [])}
        }
        self.kl_coef = config.kl_coef
        tie = {"kl/reference"} if self.has_reference else set()
        self.watched = OF_RESPONSES | {"policy/entropy", "policy/ratio_max", "reward/zero_spread_frac"} | tie

    def reduced(self, terms_K: torch.Tensor, coef: float = 1.0) -> Loss:
        """Make a part of the loss from terms, (K,), with the algorithm's reduction."""
        raise NotImplementedError

    def is_usable(self, item: Item) -> bool:
        """Return True if one of the advantages within the item's group is not 0. Advantages that are made of
        all tokens of the step, or with a KL in the rewards, differ within any group: then a single score is
        enough."""
        scored = scored_rows(Feedback(0, (item,), queries=0))
        kept = scored.only(scored.valid_N)
        if self._is_per_token or not kept.rows:
            return bool(kept.rows)
        return bool((self.response_advantages(kept) != 0).any())

    def plan(self, step: int) -> Plan:
        return Plan(self.config.prompts, {"sampler": self.config.samples}, self.config.prompts)

    def prepare(self, feedback: Feedback, forward: Forward, generator: np.random.Generator) -> Batch:
        scored = scored_rows(feedback)
        kept = scored.only(scored.valid_N)
        metrics: dict[str, float] = {"rows/trained": float(len(kept.rows))}
        columns: dict[str, torch.Tensor] = {}
        if kept.rows:
            start = self._start_values(kept, feedback.step, forward)
            metrics |= start.metrics()
            columns["old_logps_K"] = start.old_K
            if start.reference_K is not None:
                columns["reference_logps_K"] = start.reference_K
            if self.config.kl_target is not None:
                self._adapt(start, len(kept.rows))
                columns["kl_coef_N"] = torch.full((len(kept.rows),), self.kl_coef, dtype=torch.float64)
                metrics["kl/coef"] = self.kl_coef
            columns |= self.advantage_columns(kept, start, forward)
        return Batch(
            kept.rows,
            np.arange(len(kept.rows)),
            kept.group_of_N.numpy(),
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

    def response_advantages(self, scored: ScoredRows) -> torch.Tensor:
        """Return the (N,) advantages of the responses by the chosen estimator.

        Args:
            scored: rows that all have a reward.
        """
        return self.estimator(
            Rewards(
                scored.rewards_N,
                scored.lengths_N,
                scored.group_of_N,
                scored.num_groups,
                scored.valid_N,
                self.config.std_eps,
            )
        )

    def advantage_columns(
        self, scored: ScoredRows, start: StartValues, forward: Forward
    ) -> dict[str, torch.Tensor]:
        """Return `advantages_N` or, if the tokens of a response may differ, `advantages_K`.

        A response's advantage is the reward of its last token, a KL penalty lowers the rewards of all tokens,
        and a token's advantage is the discounted sum of the rewards from it on. Then they are whitened.
        """
        advantages_N = self.response_advantages(scored)
        if not self._is_per_token:
            return {"advantages_N": advantages_N}
        rewards_K = self.token_rewards(scored, start, advantages_N)
        row_of_K = row_index(scored.rows)
        returns_K = discounted_returns(rewards_K, row_of_K, len(scored.rows), gamma=self.config.gamma)
        return {
            "advantages_K": whiten(returns_K, torch.ones_like(returns_K)) if self.config.whiten else returns_K
        }

    def token_rewards(self, scored: ScoredRows, start: StartValues, rewards_N: torch.Tensor) -> torch.Tensor:
        """Return the (K,) rewards of the tokens: that of each response at its last token, minus the KL
        penalty of each token (`kl_reward_coef`).

        Args:
            rewards_N: (N,) one number for each response.
        """
        row_of_K = row_index(scored.rows)
        lengths_N = row_of_K.bincount(minlength=len(scored.rows))
        has_tokens_N = lengths_N > 0
        rewards_K = torch.zeros(len(row_of_K))
        rewards_K[(lengths_N.cumsum(0) - 1)[has_tokens_N]] = rewards_N[has_tokens_N]
        if self.config.kl_reward_coef:
            rewards_K -= self.config.kl_reward_coef * kl_k1(start.read("raw_K"), start.read("reference_K"))
        return rewards_K

    def _start_values(self, scored: ScoredRows, step: int, forward: Forward) -> StartValues:
        wants: set[Literal["raw", "entropy", "reference"]] = {"reference"} if self.has_reference else set()
        if self.config.kl_reward_coef or self.config.kl_target is not None:
            wants.add("raw")
        return start_values(scored.rows, step, forward, is_same_precision=self.recorded_is_old, wants=wants)

    def _adapt(self, start: StartValues, num_rows: int) -> None:
        """Adapt `kl_coef` to the KL from the reference, which is estimated on these rows before the step's
        update."""
        target, horizon = self.config.kl_target, self.config.kl_horizon
        assert target is not None, "asked for where there is one"
        k3_K = kl_k3(start.read("raw_K"), start.read("reference_K"))
        divergence = float(k3_K.mean()) if len(k3_K) else math.nan
        self.kl_coef = adapted_coef(
            self.kl_coef, divergence, target=target, samples=num_rows, horizon=horizon
        )

    @property
    def _is_per_token(self) -> bool:
        """True if the tokens of one response may have different advantages, or ones that depend on other
        groups."""
        return bool(self.config.whiten or self.config.kl_reward_coef or self.config.gamma != 1)

    def _surrogate(self, outputs: Outputs, view: View) -> tuple[torch.Tensor, torch.Tensor]:
        advantages_N = view.columns.get("advantages_N")
        advantages_K = view["advantages_K"] if advantages_N is None else advantages_N[view.row_of_K]
        logps = (outputs["policy"]["sampled"], view["old_logps_K"])
        given = TokenTerms(*logps, advantages_K, view.row_of_K, view.num_rows)
        return POLICY_LOSSES[self.config.policy_loss](self.config, given)
