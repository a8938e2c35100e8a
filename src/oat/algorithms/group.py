"""Policy gradients without a critic (`policy_gradient.py`). The algorithms differ in three choices: the
advantage estimator (`estimators.py`), the policy loss (`surrogates.py`), and the reduction of the loss:

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
    sapo          arXiv:2511.20347. A smooth gate takes the place of the clip.
    luspo         arXiv:2602.05261. GSPO with a sum over the tokens of each sequence.
    vespo         arXiv:2602.10693. A smooth weight of the whole sequence takes the place of the ratio.

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
4. `rloo` with `kl_reward_coef`: the paper's reward is r - beta KL of the whole response, and the baseline has
   the others' KL too. Here the baseline is made of the scores alone, and each token is charged afterwards for
   its own KL, as in REINFORCE++ (docs/algorithms/group.md).
5. `reduction: sequence` is GRPO's reduction; `token` is DAPO's (arXiv:2503.14476).

If the policy's present weights sampled every token of a step, in the learner's precision, the recorded
sampled log-probabilities serve as the old ones. Otherwise the learner computes the old ones.

Corrections for a lagging sampler, the shaping of rewards, and what else the algorithms share is in
`policy_gradient.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from oat.algorithms.group_config import (
    CISPOConfig,
    CPGDConfig,
    DrGRPOConfig,
    GRPOConfig,
    GSPOConfig,
    LUSPOConfig,
    ReducedConfig,
    ReinforcePPConfig,
    RLOOConfig,
    SAPOConfig,
    VESPOConfig,
)
from oat.algorithms.policy_gradient import PolicyGradient
from oat.errors import ConfigError
from oat.lazy import lazily
from oat.types import Loss
from oat.types.part import Derived, RunFacts

if TYPE_CHECKING:
    import torch
else:
    torch = lazily("torch")


class ReducedPolicyGradient(PolicyGradient):
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


class SAPO(ReducedPolicyGradient):
    name = "sapo"
    Config = SAPOConfig


class LUSPO(ReducedPolicyGradient):
    name = "luspo"
    Config = LUSPOConfig


class VESPO(ReducedPolicyGradient):
    name = "vespo"
    Config = VESPOConfig


class DrGRPO(PolicyGradient):
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
            ConfigError: `max_length` is below `sampling.max_new_tokens`, and responses are sampled; or it is
                not set in a run with an environment or recorded responses, which `sampling.max_new_tokens`
                does not bound.
        """
        episode = "the responses of an episode may have together"
        if config.max_length is None:
            if run.has_environment or run.has_recorded:
                which = episode if run.has_environment else "a recorded response may have"
                raise ConfigError(f"set algorithm.max_length, the most tokens that {which}")
            return {"max_length": Derived(run.max_new_tokens, "as sampling.max_new_tokens")}
        if config.max_length < run.max_new_tokens and not run.has_recorded:
            advice = f"the most tokens that {episode}" if run.has_environment else "or leave it out"
            raise ConfigError(
                f"algorithm.max_length is {config.max_length}: a response may have sampling.max_new_tokens "
                f"{run.max_new_tokens}; set as much or more, {advice}"
            )
        return {}

    def reduced(self, terms_K: torch.Tensor, coef: float = 1.0) -> Loss:
        return Loss(terms_K, per="constant", coef=coef, constant=self.max_length)
