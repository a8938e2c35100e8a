"""PPO with a critic (arXiv:1707.06347), for language models (arXiv:1909.08593).

Each token is an action. Its reward is minus the penalty for the KL to the reference; the oracle's score is
added at the end of the response. The critic gives the value of the state before each token. Generalised
advantage estimation (arXiv:1506.02438) makes advantages and the critic's targets of rewards and values. The
policy's loss is the clipped surrogate, the critic's the clipped squared error (`functional/values.py`).

Two older implementations differ in what they count. Both are options here:

    | | `oat-llm` (`end: last_token`) | TRL (`end: final_state`) |
    | --- | --- | --- |
    | score | at the last token | at the state after the last token, if there is one |
    | value after the last token | 0 | the critic's, and 0 after that |
    | whitened rewards | of the tokens | of the tokens and the final states |
    | critic's loss | over the tokens | over the tokens and the final states |
    | whitened advantages, policy's loss | over the tokens | over the tokens |
    | reduction | `sequence` | `token` |

A response has a final state if it has fewer tokens than `response_length`.

Departures:
1. Policy and critic have optimisers of their own. TRL has one for both, so its `vf_coef` is a learning rate.
2. Log-probabilities of the KL are those at temperature 1. TRL and `oat-llm` divide the logits by the
   temperature first.
3. Nothing is padded, so no statistic contains places of padding (TRL's metrics do).
4. Statistics of whitening are over the step, not over a process.

Not handled: a value for the end of a response that was cut off; its value after the last token counts as 0,
as in both older implementations.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from oat.algorithms.base import Forward, Outputs, View, row_index
from oat.algorithms.credit import CreditedRewards
from oat.algorithms.estimators import Estimator, Places, find_estimator, find_token_estimator
from oat.algorithms.policy_gradient import PolicyGradient
from oat.algorithms.policy_gradient_config import PolicyGradientConfig
from oat.algorithms.ppo_config import LEAST_WHITENED, PPOConfig
from oat.algorithms.rows import OldValues, ScoredRows
from oat.errors import ConfigError
from oat.lazy import lazily
from oat.types import Loss, Requires
from oat.types.part import Check, Derived, RunFacts

if TYPE_CHECKING:
    import torch

    from oat import functional as F
else:
    torch, F = lazily("torch"), lazily("oat.functional")


class PPO(PolicyGradient):
    name = "ppo"
    Config = PPOConfig
    config: PPOConfig
    reports_rewards = True

    def __init__(self, config: PPOConfig):
        has_ends = config.end == "final_state"
        if has_ends and config.response_length is None:
            raise ConfigError(
                "algorithm.response_length is not set; give the most tokens that a response may have"
            )
        super().__init__(config)
        self.response_length = config.response_length if has_ends else None
        self.of_tokens = find_token_estimator(config.advantage) if ":" in config.advantage else None
        models = self.requires.models | {"critic"}
        self.requires = Requires(feedback="score", models=models, ratio_based=True)
        self.wants = {**self.wants, "critic": {"value", *(["value_after"] if has_ends else [])}}

    @staticmethod
    def defaults(config: PPOConfig, run: RunFacts) -> Mapping[str, Derived]:
        if config.end == "last_token" or config.response_length is not None:
            return {}
        if run.has_environment or run.has_recorded:
            which = "the responses of an episode together have" if run.has_environment else "a response has"
            raise ConfigError(
                f"set algorithm.response_length, the number of tokens from which {which} no final state"
            )
        return {"response_length": Derived(run.max_new_tokens, "as sampling.max_new_tokens")}

    @staticmethod
    def checks(config: PolicyGradientConfig, run: RunFacts) -> Iterator[Check]:
        assert isinstance(config, PPOConfig)
        yield from PolicyGradient.checks(config, run)
        yield Check(
            "algorithm.advantage",
            run.has_recorded and config.advantage == "vtrace",
            "the probabilities with which recorded responses were sampled are not known; set it to gae",
        )
        rows = config.prompts * (run.num_recorded or config.samples)
        minibatches = max(1, config.minibatches)
        yield Check(
            "algorithm.minibatches",
            rows % minibatches,
            f"the {rows} responses of a step (algorithm.prompts times samples) cannot be divided into equal "
            "mini-batches; give a divisor",
        )
        yield Check(
            "algorithm.rewards.whiten",
            config.rewards.whiten and rows // minibatches < LEAST_WHITENED,
            f"a mini-batch has {rows // minibatches} responses, and a variance of fewer than "
            f"{LEAST_WHITENED} says little; raise algorithm.prompts or samples, or lower minibatches",
        )

    def chosen_estimator(self) -> Estimator:
        """Return the estimator that passes rewards on, since the critic takes the place of a group."""
        return find_estimator("none")

    def reduced(self, terms_K: torch.Tensor, coef: float = 1.0) -> Loss:
        return Loss(terms_K, per=self.config.reduction, coef=coef)

    def advantage_columns(
        self,
        scored: ScoredRows,
        estimates: CreditedRewards,
        start: OldValues,
        forward: Forward,
        metrics: dict[str, float],
    ) -> dict[str, torch.Tensor]:
        """Return the columns of the policy's loss and of the critic's. With final states, `value_mask_K`
        counts the last token of a row twice if the row has one."""
        row_of_K = row_index(scored.rows)
        has_end_N = torch.zeros(len(scored.rows), dtype=torch.bool)
        if self.response_length is not None:
            has_end_N = (scored.lengths_N > 0) & (scored.lengths_N < self.response_length)
        states = F.final_states.final_states(row_of_K, has_end_N)
        values_L = self._values(scored, states, forward)
        rewards_L = self._placed_rewards(estimates, start, states)
        metrics |= self._reward_metrics(scored, start, rewards_L)
        if self.config.rewards.whiten:
            rewards_L = F.advantages.whiten(rewards_L, torch.ones_like(rewards_L), shift_mean=False)
        targets_L, advantages_L, weights_L = self._targets(scored, rewards_L, values_L, states, start)
        metrics |= _value_metrics(values_L, targets_L)
        advantages_K, _ = states.parted(advantages_L)
        advantages_K = self.whitened(scored, advantages_K)
        if weights_L is not None:
            advantages_K = advantages_K * states.parted(weights_L)[0]
        old_K, old_ends_N = states.parted(values_L)
        targets_K, end_targets_N = states.parted(targets_L)
        columns = {
            "advantages_K": self.clipped_advantages(advantages_K),
            "old_values_K": old_K,
            "value_targets_K": targets_K,
        }
        if self.response_length is not None:
            mask_K = torch.ones_like(old_K)
            if len(mask_K):
                mask_K[last_tokens(row_of_K, len(has_end_N))[has_end_N]] *= 2.0
            columns |= {"has_end_N": has_end_N, "old_ends_N": old_ends_N, "end_targets_N": end_targets_N}
            columns["value_mask_K"] = mask_K
        return columns

    def losses(self, outputs: Outputs, view: View) -> dict[str, Loss]:
        terms_K, _ = self._value_terms(outputs, view)
        loss = self.reduced(terms_K, coef=self.config.value_coef)
        if self.response_length is not None:
            loss = replace(loss, mask="value_mask_K")
        return {**super().losses(outputs, view), "loss/value": loss}

    def metrics(self, outputs: Outputs, view: View) -> dict[str, tuple[torch.Tensor, str]]:
        logps_K, old_K = outputs["policy"]["sampled"], view["old_logps_K"]
        ratio_K = F.policy.log_ratio(logps_K, old_K).exp()
        return {
            **super().metrics(outputs, view),
            "policy/ratio_mean": (ratio_K, "K"),
            "policy/ratio_var": ((ratio_K - 1).square(), "K"),
            "kl/old_k2": (F.kl.kl_k2(old_K, logps_K), "K"),
            "value/clipped_frac": (self._value_terms(outputs, view)[1], "K"),
        }

    def _values(
        self, scored: ScoredRows, states: F.final_states.FinalStates, forward: Forward
    ) -> torch.Tensor:
        """Return the critic's values before the update, (L,)."""
        found = forward("critic", scored.rows, set(self.wants["critic"]))
        ends_N = found["value"].new_zeros(len(scored.rows))
        if self.response_length is not None and len(found["value"]):
            has_end_N = states.has_end_N
            last_N = last_tokens(row_index(scored.rows), len(has_end_N))
            ends_N[has_end_N] = found["value_after"][last_N[has_end_N]]
        return states.joined(found["value"], ends_N)

    def _placed_rewards(
        self, rewards: CreditedRewards, start: OldValues, states: F.final_states.FinalStates
    ) -> torch.Tensor:
        """Return the rewards of tokens and of final states, (L,). A final state has its row's last reward."""
        last_N = rewards.last_of_rows()
        at_tokens_E = rewards.rewards_E.clone()
        at_tokens_E[last_N[states.has_end_N]] = 0.0
        return states.joined(self.charged_rewards(rewards, start, at_tokens_E), rewards.rewards_E[last_N])

    def _targets(
        self,
        scored: ScoredRows,
        rewards_L: torch.Tensor,
        values_L: torch.Tensor,
        states: F.final_states.FinalStates,
        start: OldValues,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return the critic's targets, the advantages, and the weights of V-trace or None, (L,) each."""
        c = self.config
        if c.advantage == "vtrace":
            ratios_L = self._ratios(start, states)
            return F.values.vtrace(rewards_L, values_L, ratios_L, states.row_of_L, gamma=c.gamma, lam=c.lam)
        advantages_L = self._advantages(scored, rewards_L, values_L, states, start)
        return advantages_L + values_L, advantages_L, None

    def _advantages(
        self,
        scored: ScoredRows,
        rewards_L: torch.Tensor,
        values_L: torch.Tensor,
        states: F.final_states.FinalStates,
        start: OldValues,
    ) -> torch.Tensor:
        """Return the advantages of `gae` or of the user's estimator, (L,)."""
        c, row_of_L, num_rows = self.config, states.row_of_L, len(states.has_end_N)
        if self.of_tokens is None and c.turn_gamma == 1:
            return F.returns.gae(rewards_L, values_L, row_of_L, num_rows, gamma=c.gamma, lam=c.lam)
        discounts_L = self._discounts(scored, states)
        next_L = torch.nn.functional.pad(values_L[1:], (0, min(1, len(values_L))))
        if self.of_tokens is None:
            return F.returns.affine_scan(rewards_L + discounts_L * next_L - values_L, discounts_L * c.lam)
        is_last_L = torch.ones_like(row_of_L, dtype=torch.bool)
        is_last_L[:-1] = row_of_L[1:] != row_of_L[:-1]
        next_L = torch.where(is_last_L, 0.0, next_L)
        ratios_L = self._ratios(start, states)
        return self.of_tokens(
            Places(rewards_L, values_L, next_L, discounts_L, ratios_L, c.lam, row_of_L, num_rows)
        )

    def _ratios(self, start: OldValues, states: F.final_states.FinalStates) -> torch.Tensor:
        """Return the old probability of each token divided by the one with which it was sampled, (L,); 1 for
        final states and for tokens of which the latter is not known."""
        ratios_K = torch.where(
            start.is_sampled_K, F.policy.log_ratio(start.old_K, start.recorded_K).exp(), 1.0
        )
        return states.joined(ratios_K, torch.ones(len(states.has_end_N)))

    def _discounts(self, scored: ScoredRows, states: F.final_states.FinalStates) -> torch.Tensor:
        """Return the discount between each place and the next one of its row, (L,); 0 for the last."""
        last_N = last_tokens(row_index(scored.rows), len(states.has_end_N))
        discounts_K = self.discounts(scored)
        discounts_K[last_N[states.has_end_N]] = self.config.gamma
        return states.joined(discounts_K, torch.zeros(len(states.has_end_N)))

    def _value_terms(self, outputs: Outputs, view: View) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the terms of the critic's loss, (K,), and for each place 1 if the clip decides its term."""
        critic, clip = outputs["critic"], self.config.value_clip
        terms_K, clipped_K = F.values.clipped_value_loss(
            critic["value"], view["old_values_K"], view["value_targets_K"], clip=clip
        )
        if self.response_length is None or not len(terms_K):
            return terms_K, clipped_K
        has_end_N = view["has_end_N"]
        ends_N = critic["value_after"][last_tokens(view.row_of_K, view.num_rows)]
        terms_N, clipped_N = F.values.clipped_value_loss(
            ends_N, view["old_ends_N"], view["end_targets_N"], clip=clip
        )
        terms_K = F.final_states.mean_with_end(terms_K, terms_N, view.row_of_K, has_end_N)
        return terms_K, torch.cat([clipped_K, clipped_N[has_end_N]])

    def _reward_metrics(
        self, scored: ScoredRows, start: OldValues, rewards_L: torch.Tensor
    ) -> dict[str, float]:
        row_of_K, num_rows = row_index(scored.rows), len(scored.rows)
        found = {
            "reward/total": float(rewards_L.sum() / num_rows),
            "reward/kl": 0.0,
            "response/ended": float(sum(row.finish_reason == "stop" for row in scored.rows)),
        }
        if self.config.old_from != "reference":
            found["policy/response_entropy"] = -float(
                F.segments.segment_sum(start.old_K, row_of_K, num_rows).mean()
            )
        if self.has_reference:
            kl_K = F.kl.KL_ESTIMATORS[self.config.kl_reward_estimator](
                start.read("raw_K"), start.read("reference_K"), max_log_ratio=self.config.kl_max_log_ratio
            )
            found["kl/response"] = float(F.segments.segment_sum(kl_K, row_of_K, num_rows).mean())
            if self.config.kl_reward_coef:
                found["reward/kl"] = -self.weights.kl_reward_coef * found["kl/response"]
        return found


def last_tokens(row_of_K: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Return the index of each row's last trained token, (N,). For a row without tokens it is that of another
    row's token, or -1."""
    return row_of_K.bincount(minlength=num_rows).cumsum(0) - 1


def _value_metrics(values_L: torch.Tensor, targets_L: torch.Tensor) -> dict[str, float]:
    """Return the mean of the critic's values, and the share of the variance of its targets that it explains:
    1 if values and targets are equal, 0 or less if a constant would be as good."""
    found = {"value/mean": float(values_L.mean())} if len(values_L) else {}
    variance = float(targets_L.double().var()) if len(targets_L) > 1 else 0.0
    if variance > 0:
        found["value/explained_var"] = 1 - float((targets_L - values_L).double().var()) / variance
    return found
