"""The way from scored responses to an update of the policy, which all policy gradients share.

`prepare` makes columns in this order:

1. The scores become rewards (`shaping.py`), at the places where they are earned (`credit.py`). A response
   without a score is left out.
2. The models compute values for the rows before the update (`rows.StartValues`).
3. The estimator (`estimators.py`) makes an advantage of each reward. If tokens of one response may differ
   (`credit`, `gamma`, `whiten`, a KL in the rewards), each token gets an advantage of its own.
4. Corrections and the choice of tokens become weights of tokens (`corrections.py`, `token_choice.py`).

`losses` has the policy's loss (`surrogates.py`) and the terms that hold the policy near the reference and the
old policy. An algorithm chooses the reduction (`reduced`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from oat.algorithms.adaptive import AdaptiveWeights
from oat.algorithms.base import OF_RESPONSES, Forward, Objective, Outputs, View, row_index
from oat.algorithms.corrections import correction_weights
from oat.algorithms.credit import CreditedRewards, earned, turn_ends
from oat.algorithms.estimators import Estimator, Rewards, find_estimator
from oat.algorithms.group_sizes import group_checks
from oat.algorithms.policy_gradient_config import PolicyGradientConfig
from oat.algorithms.rows import OldValues, ScoredRows, scored_rows, start_values
from oat.algorithms.shaping import RewardsConfig, RewardShaping
from oat.algorithms.surrogates import POLICY_LOSSES, TokenTerms
from oat.algorithms.token_choice import chosen_tokens
from oat.algorithms.vine import earned_by_steps
from oat.errors import ConfigError, warn
from oat.lazy import lazily
from oat.types import Batch, Feedback, Item, Loss, Plan, Requires
from oat.types.part import Check, RunFacts

if TYPE_CHECKING:
    import torch

    from oat import functional as F
else:
    torch, F = lazily("torch"), lazily("oat.functional")


class PolicyGradient(Objective):
    """Base class of the policy gradients. A subclass adds `reduced`."""

    config: PolicyGradientConfig
    setting_for: Mapping[str, str] = {"kl/reference": "kl_coef"}
    takes_recorded = True
    reports_rewards = False
    """True: `reward/shaped_mean`, and the KL of the rewards before the update, are reported in any case."""

    def __init__(self, config: PolicyGradientConfig):
        self.config = config
        self.shaping = RewardShaping(config.rewards, "vine" if config.branches else config.credit)
        self.estimator = self.chosen_estimator()
        self.has_reference = bool(config.kl_coef or config.kl_reward_coef)
        is_read = self.has_reference or config.old_from == "reference"
        models = {"policy", "reference"} if is_read else {"policy"}
        self.requires = Requires(feedback="score", models=frozenset(models), ratio_based=True)
        self.wants: Mapping[str, set[str]] = {
            "policy": {"sampled", "entropy", *(["raw"] if self.has_reference else [])}
        }
        self.weights = AdaptiveWeights(config)
        watched = {
            "policy/entropy": True,
            "policy/ratio_max": True,
            "kl/reference": self.has_reference,
            "reward/zero_spread_frac": config.compares_groups,
        }
        self.watched = OF_RESPONSES | {name for name, is_watched in watched.items() if is_watched}

    def check_answers(self, gives_steps: bool, sources: Sequence[str] | None) -> None:
        if self.config.credit == "steps" and not gives_steps:
            raise ConfigError(
                "algorithm.credit is steps, and the oracle gives no rewards of steps; give it the attribute "
                "`gives_steps` (docs/extending.md), or set credit to response"
            )
        self.shaping.check_sources(sources)

    @staticmethod
    def checks(config: PolicyGradientConfig, run: RunFacts) -> Iterator[Check]:
        why = "the probabilities with which recorded responses were sampled are not known; remove it"
        is_corrected = config.correction.form != "none"
        is_masked = config.correction.off_policy_bound is not None
        yield Check("algorithm.old_from", run.has_recorded and config.old_from == "sampler", why)
        is_single = not run.has_environment and not run.has_recorded
        longest = config.rewards.overlong_from
        yield Check(
            "algorithm.rewards.overlong_from",
            longest is not None and longest >= run.max_new_tokens and is_single,
            f"no response has more than sampling.max_new_tokens {run.max_new_tokens} tokens; lower it",
        )
        yield Check("algorithm.correction", run.has_recorded and (is_corrected or is_masked), why)
        no_turns = "there is no environment, and so no turn; remove it"
        yield Check("algorithm.credit", config.credit == "turns" and not run.has_environment, no_turns)
        yield Check("algorithm.turn_gamma", config.turn_gamma != 1 and is_single, no_turns)
        what = "recorded responses" if run.has_recorded else "episodes with an environment"
        yield Check(
            "algorithm.advantage",
            config.branches and (run.has_recorded or run.has_environment),
            f"vine samples again from within responses, which {what} do not allow; choose another",
        )
        yield from group_checks(config, run)

    def chosen_estimator(self) -> Estimator:
        return find_estimator(self.config.advantage)

    def reduced(self, terms_K: torch.Tensor, coef: float = 1.0) -> Loss:
        """Make a part of the loss from terms, (K,), with the algorithm's reduction."""
        raise NotImplementedError

    def is_usable(self, item: Item) -> bool:
        """Return True if one of the advantages within the item's group is not 0. Advantages that are made of
        all of the step, or with a KL in the rewards, differ within any group: then a single score is enough.
        If rewards are normalised over the step or the run, of which other groups are a part, they are
        judged before that: two different scores, for `sources` of one source, are enough."""
        scored = self.shaping.considered(scored_rows(Feedback(0, (item,), queries=0)))
        learned_N = self.shaping.learned(scored)
        if not scored.rows or (learned_N is not None and not learned_N.any()):
            return False
        if self.config.compares_steps:
            return True
        if self.shaping.reads_other_groups and not self.config.compares_groups:
            return True
        if self.config.rewards.sources in ("batch", "running"):
            return self.shaping.differ(scored)
        return bool((self._estimates(scored, learns=False)[1].rewards_E != 0).any())

    def plan(self, step: int) -> Plan:
        branching = self.config.vine.branching if self.config.branches else None
        return Plan(self.config.prompts, {"sampler": self.config.samples}, self.config.prompts, branching)

    def prepare(self, feedback: Feedback, forward: Forward, generator: np.random.Generator) -> Batch:
        scored = self.shaping.considered(scored_rows(feedback))
        metrics: dict[str, float] = {}
        columns: dict[str, torch.Tensor] = {}
        if scored.rows:
            scored, estimates, shaped = self._estimates(scored, learns=True)
            metrics |= shaped
        if scored.rows:
            start = self._start_values(scored, feedback.step, forward)
            metrics |= start.metrics()
            columns |= self._start_columns(start)
            columns |= self.weights.adapt(start, len(scored.rows), metrics)
            columns |= self.advantage_columns(scored, estimates, start, forward, metrics)
            columns |= self._weight_columns(scored, start, columns, generator, metrics)
        metrics["rows/trained"] = float(len(scored.rows))
        return Batch(
            scored.rows,
            np.arange(len(scored.rows)),
            scored.group_of_N.numpy(),
            columns,
            epochs=self.config.epochs,
            minibatches=self.config.minibatches,
            metrics=metrics,
        )

    def losses(self, outputs: Outputs, view: View) -> dict[str, Loss]:
        c, policy = self.config, outputs["policy"]
        terms_K, _ = self._surrogate(outputs, view)
        losses = {"loss/policy": self.reduced(terms_K * self._gradient_weights(outputs, view))}
        old_K = view["old_logps_K"]
        if c.drift_coef:
            losses["loss/drift"] = self.reduced(
                F.surrogates.policy_drift(policy["sampled"], old_K), coef=c.drift_coef
            )
        if c.tokens.covariance_kl:
            drift_K = F.surrogates.policy_drift(policy["sampled"], old_K) * view["covariance_kl_K"]
            losses["loss/covariance_kl"] = self.reduced(drift_K, coef=c.tokens.covariance_kl_coef)
        if c.kl_coef:
            losses["loss/kl"] = self.reduced(self._kl(policy, view), coef=_coef(view, "kl_coef_N", c.kl_coef))
        if c.entropy.is_used:
            coef = _coef(view, "entropy_coef_N", c.entropy.coef)
            losses["loss/entropy"] = self.reduced(policy["entropy"], coef=-coef)
        return losses

    def metrics(self, outputs: Outputs, view: View) -> dict[str, tuple[torch.Tensor, str]]:
        policy = outputs["policy"]
        ratio_K = F.policy.log_ratio(policy["sampled"], view["old_logps_K"]).exp()
        values = {
            "policy/clipped_frac": (self._surrogate(outputs, view)[1], "K"),
            "policy/entropy": (policy["entropy"], "K"),
            "policy/ratio_max": (ratio_K, "max"),
            "policy/ratio_min": (ratio_K, "min"),
        }
        if "is_recorded_N" in view.columns:
            gap_K = (policy["sampled"] - view["old_logps_K"]).abs()
            values |= {"logps/recorded_gap": (gap_K, "K"), "logps/recorded_gap_max": (gap_K, "max")}
        if self.config.target_kl is not None:
            values["kl/old"] = (F.kl.kl_k3(view["old_logps_K"], policy["sampled"]), "K")
        if self.has_reference:
            values["kl/reference"] = (F.kl.kl_k3(policy["raw"], view["reference_logps_K"]), "K")
        return values

    def ends_passes(self, values: Mapping[str, float]) -> bool:
        return self.config.target_kl is not None and values.get("kl/old", 0.0) > self.config.target_kl

    @property
    def state(self) -> dict[str, Any]:
        return {**self.weights.state, **self.shaping.state}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore the adapted weights and the running statistics."""
        self.weights.load_state(state)
        self.shaping.load_state(state)

    def estimated(self, scored: ScoredRows, rewards: CreditedRewards) -> torch.Tensor:
        """Return the advantage of each of the E rewards by the chosen estimator, (E,). Rewards of steps or
        turns of a response that is alone in its group have advantage 0 if an estimator of ours compares
        groups."""
        row_of_E = rewards.row_of_E
        advantages_E = self.estimator(
            Rewards(
                rewards.rewards_E,
                rewards.lengths_E,
                scored.group_of_N[row_of_E],
                scored.num_groups,
                rewards.counted_E,
                self.config.std_eps,
                rewards.values_E,
                row_of_E if self._has_many_rewards else None,
            )
        )
        advantages_E = torch.where(rewards.counted_E, advantages_E, 0.0)
        is_users = ":" in self.config.advantage
        if self.config.credit != "response" and self.config.compares_groups and not is_users:
            are_compared_G = scored.group_of_N.bincount(minlength=scored.num_groups) > 1
            advantages_E = torch.where(are_compared_G[scored.group_of_N[row_of_E]], advantages_E, 0.0)
        weight = self.config.rewards.flat_group_weight
        if weight is None:
            return advantages_E
        total_N = rewards.by_row(rewards.rewards_E)
        weights_N = F.reward_shaping.clip_filter_weights(
            total_N, scored.group_of_N, scored.num_groups, flat_weight=weight
        )
        return advantages_E * weights_N[row_of_E]

    def advantage_columns(
        self,
        scored: ScoredRows,
        estimates: CreditedRewards,
        start: OldValues,
        forward: Forward,
        metrics: dict[str, float],
    ) -> dict[str, torch.Tensor]:
        """Return `advantages_N` or, if the tokens of a response may differ, `advantages_K`. An algorithm may
        return further columns, and add metrics.

        What the estimator makes of a reward is the reward of the token at which it is earned, a KL penalty
        lowers the rewards of all tokens, and a token's advantage is the discounted sum of the rewards from it
        on. Then they are whitened. With the estimator `vine`, all tokens of a step have what it makes of the
        step, and only penalties are added up.

        Args:
            scored: the rows of the batch.
            estimates: what the estimator made of their rewards, at the places where these are earned.
        """
        advantages_E = estimates.rewards_E
        if not self.config.weighs_tokens:
            if self.config.whitens_responses:
                advantages_E = F.advantages.standardised(advantages_E, eps=self.config.std_eps)
            return {"advantages_N": self.clipped_advantages(advantages_E)}
        if self.config.branches:
            penalties_K = self.token_rewards(estimates, start, torch.zeros_like(advantages_E))
            own_K = advantages_E.repeat_interleave(estimates.lengths_E.long())
            returns_K = own_K + self.returns(scored, penalties_K)
        else:
            returns_K = self.returns(scored, self.token_rewards(estimates, start, advantages_E))
        return {"advantages_K": self.clipped_advantages(self.whitened(scored, returns_K))}

    def whitened(self, scored: ScoredRows, advantages_K: torch.Tensor) -> torch.Tensor:
        """Return the advantages of the tokens, whitened if the settings ask for it."""
        if not self.config.whiten:
            return advantages_K
        all_K = torch.ones_like(advantages_K)
        if self.config.whiten_over == "group":
            group_of_K = scored.group_of_N[row_index(scored.rows)]
            return F.advantages.whiten_in_groups(advantages_K, all_K, group_of_K, scored.num_groups)
        return (F.advantages.whiten if self.config.whiten_over == "step" else F.advantages.whiten_biased)(
            advantages_K, all_K
        )

    def returns(self, scored: ScoredRows, rewards_K: torch.Tensor) -> torch.Tensor:
        """Return the discounted sum of rewards from each token to the end of its row, (K,)."""
        row_of_K, num_rows = row_index(scored.rows), len(scored.rows)
        if self.config.turn_gamma == 1:
            return F.returns.discounted_returns(rewards_K, row_of_K, num_rows, gamma=self.config.gamma)
        return F.returns.affine_scan(rewards_K, self.discounts(scored))

    def discounts(self, scored: ScoredRows) -> torch.Tensor:
        """Return the discount between each token and the next one of its row, (K,); 0 for the last."""
        row_of_K, ends_K = row_index(scored.rows), turn_ends(scored.rows)
        discounts_K = torch.where(ends_K, self.config.turn_gamma * self.config.gamma, self.config.gamma)
        discounts_K[: max(0, len(row_of_K) - 1)][row_of_K[1:] != row_of_K[:-1]] = 0.0
        discounts_K[len(row_of_K) - 1 :] = 0.0
        return discounts_K

    def clipped_advantages(self, advantages: torch.Tensor) -> torch.Tensor:
        """Return the advantages within the bounds of `advantage_clip`."""
        most = self.config.advantage_clip
        return advantages if most is None else F.advantages.clipped_advantages(advantages, limit=most)

    def token_rewards(
        self, rewards: CreditedRewards, start: OldValues, values_E: torch.Tensor
    ) -> torch.Tensor:
        """Return the (K,) rewards of the tokens, whitened if `rewards.whiten` asks for it. Arguments as in
        `charged_rewards`."""
        rewards_K = self.charged_rewards(rewards, start, values_E)
        if self.config.rewards.whiten:
            rewards_K = F.advantages.whiten(rewards_K, torch.ones_like(rewards_K), shift_mean=False)
        return rewards_K

    def charged_rewards(
        self, rewards: CreditedRewards, start: OldValues, values_E: torch.Tensor
    ) -> torch.Tensor:
        """Return numbers at the tokens where rewards are earned, minus the KL penalty of each token
        (`kl_reward_coef`), (K,).

        Args:
            values_E: (E,) one number for each reward.
        """
        rewards_K = rewards.by_token(values_E, len(start.old_K))
        if self.config.kl_reward_coef:
            kl_K = F.kl.KL_ESTIMATORS[self.config.kl_reward_estimator](
                start.read("raw_K"), start.read("reference_K"), max_log_ratio=self.config.kl_max_log_ratio
            )
            rewards_K -= self.weights.kl_reward_coef * kl_K
        return rewards_K

    def _estimates(
        self, scored: ScoredRows, *, learns: bool
    ) -> tuple[ScoredRows, CreditedRewards, dict[str, float]]:
        """Return the rows that are learned from, what the estimator makes of their rewards, and metrics. Rows
        that are masked (`rewards.truncated`) count in the estimator's statistics, and then leave.

        Args:
            learns: True: the running statistics are updated. False: they, and bounds after them, are left
                out.
        """
        scored, rewards, metrics = self._rewards(scored, learns=learns)
        estimates = replace(rewards, rewards_E=self.estimated(scored, rewards))
        learned_N = self.shaping.learned(scored)
        if learned_N is not None:
            estimates = estimates.only(learned_N, scored.lengths_N.long())
            scored = scored.only(learned_N)
        return scored, estimates, metrics

    def _rewards(
        self, scored: ScoredRows, *, learns: bool
    ) -> tuple[ScoredRows, CreditedRewards, dict[str, float]]:
        """Return the rows that are trained, their shaped rewards at the places where they are earned, and
        metrics.

        Args:
            learns: True: the running statistics are updated.
        """
        scored = self.shaping.sources(scored)
        found = earned(scored, self.config.credit)
        found, metrics = self.shaping.shaped(found, scored, end_ids=self.end_ids, learns=learns)
        if self.config.branches:
            scored, found, of_steps = earned_by_steps(scored.with_rewards(found.rewards_E))
            metrics |= of_steps
            if learns and scored.rows and of_steps["vine/steps"] <= 1:
                warn(
                    "no response of a step has two steps, so nothing is sampled from within "
                    f"(algorithm.vine.delimiter {self.config.vine.delimiter!r}; metric vine/steps); set the "
                    "delimiter to the text that ends a step"
                )
        is_reported = self.reports_rewards or self.config.rewards != RewardsConfig()
        if is_reported and len(found.rewards_E):
            metrics["reward/shaped_mean"] = float(found.by_row(found.rewards_E).mean())
        return scored, found, metrics

    def _start_values(self, scored: ScoredRows, step: int, forward: Forward) -> OldValues:
        wants: set[Literal["raw", "entropy", "reference"]] = {"reference"} if self.has_reference else set()
        is_reported = self.reports_rewards and self.has_reference
        if self.config.kl_reward_coef or self.config.kl_target is not None or is_reported:
            wants.add("raw")
        if self.config.tokens.reads_entropy or self.config.entropy.target is not None:
            wants.add("entropy")
        return start_values(
            scored.rows,
            step,
            forward,
            is_same_precision=self.recorded_is_old,
            wants=wants,
            old_from=self.config.old_from,
        )

    def _start_columns(self, start: OldValues) -> dict[str, torch.Tensor]:
        """Return the columns of log-probabilities. `is_recorded_N` is there if the old log-probabilities are
        the recorded ones, so that the first optimiser step measures how far the policy's are from them."""
        columns = {"old_logps_K": start.old_K}
        if start.reference_K is not None:
            columns["reference_logps_K"] = start.reference_K
        if start.are_recorded:
            columns["is_recorded_N"] = torch.ones(start.num_rows)
        if self.config.correction.off_policy_bound is not None:
            columns["recorded_logps_K"] = start.recorded_K
        return columns

    def _weight_columns(
        self,
        scored: ScoredRows,
        start: OldValues,
        columns: Mapping[str, torch.Tensor],
        generator: np.random.Generator,
        metrics: dict[str, float],
    ) -> dict[str, torch.Tensor]:
        """Return `gradient_weight_K`, which multiplies the terms of the policy's loss, `correction_K`, which
        `vespo` has in its weight of the response instead, and `covariance_kl_K`. A column that the settings
        do not ask for is missing."""
        row_of_K, num_rows = row_index(scored.rows), len(scored.rows)
        advantages_N = columns.get("advantages_N")
        masks = chosen_tokens(
            self.config.tokens,
            entropy_K=start.entropy_K,
            old_K=start.old_K,
            advantages_K=columns["advantages_K"] if advantages_N is None else advantages_N[row_of_K],
            row_of_K=row_of_K,
            num_rows=num_rows,
            generator=generator,
        )
        found = {f"{name}_K": mask for name, mask in masks.items() if name != "gradient"}
        weights_K = masks.get("gradient")
        if weights_K is not None:
            metrics["policy/gradient_frac"] = float(weights_K.mean()) if len(weights_K) else 1.0
        if self.config.correction.form != "none":
            corrections_K, values = correction_weights(
                self.config.correction, start.old_K, start.recorded_K, row_of_K, num_rows
            )
            metrics |= values
            if self.config.policy_loss == "vespo":
                found["correction_K"] = corrections_K
            else:
                weights_K = corrections_K if weights_K is None else weights_K * corrections_K
        return found if weights_K is None else {**found, "gradient_weight_K": weights_K}

    @property
    def _has_many_rewards(self) -> bool:
        """True if a response may have several rewards."""
        return self.config.credit != "response" or self.config.branches

    def _kl(self, policy: Mapping[str, torch.Tensor], view: View) -> torch.Tensor:
        """Return the terms of the KL to the reference in the loss, (K,)."""
        c, bound = self.config, self.config.kl_max_log_ratio
        given = (policy["raw"], view["reference_logps_K"])
        if not c.kl_unbiased:
            return F.kl.KL_ESTIMATORS[c.kl_estimator](*given, max_log_ratio=bound)
        assert c.kl_estimator != "k2", "the configuration refuses it"
        old_K = view["old_logps_K"]
        return F.kl.unbiased_kl(c.kl_estimator, *given, policy["sampled"], old_K, max_log_ratio=bound)

    def _surrogate(self, outputs: Outputs, view: View) -> tuple[torch.Tensor, torch.Tensor]:
        logps = (outputs["policy"]["sampled"], view["old_logps_K"])
        correction_K = view.columns.get("correction_K")
        given = TokenTerms(*logps, _advantages(view), view.row_of_K, view.num_rows, correction_K)
        return POLICY_LOSSES[self.config.policy_loss](self.config, given)

    def _gradient_weights(self, outputs: Outputs, view: View) -> torch.Tensor | float:
        """Return the weights by which the terms of the policy's loss are multiplied, (K,), or 1."""
        weights_K = view.columns.get("gradient_weight_K")
        bound = self.config.correction.off_policy_bound
        if bound is None:
            return 1.0 if weights_K is None else weights_K
        mask_K = F.corrections.on_policy_mask(
            outputs["policy"]["sampled"],
            view["recorded_logps_K"],
            _advantages(view),
            view.row_of_K,
            view.num_rows,
            bound=bound,
        )
        return mask_K if weights_K is None else mask_K * weights_K


def _advantages(view: View) -> torch.Tensor:
    """Return the advantage of each token, (K,)."""
    advantages_N = view.columns.get("advantages_N")
    return view["advantages_K"] if advantages_N is None else advantages_N[view.row_of_K]


def _coef(view: View, column: str, fixed: float) -> float:
    """Return the adapted weight in a column, or the fixed one if there is no such column."""
    adapted_N = view.columns.get(column)
    return fixed if adapted_N is None else float(adapted_N[0])
