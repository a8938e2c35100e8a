"""Settings of `ppo`."""

import math
from dataclasses import dataclass
from typing import Literal

from oat.algorithms.policy_gradient_config import PolicyGradientConfig, Reduction
from oat.errors import ConfigError, did_you_mean

ADVANTAGES = ("gae", "vtrace")
LEAST_WHITENED = 8
"""Least number of responses of a mini-batch with which rewards may be whitened (TRL's bound)."""


@dataclass(frozen=True)
class PPOConfig(PolicyGradientConfig):
    """Settings of `ppo`. The defaults are those of TRL's last PPO trainer, except `value_coef`, which the
    critic's own optimiser makes irrelevant, and the place of the score (`end`)."""

    samples: int = 1
    """Responses per prompt."""
    advantage: str = "gae"
    """Advantage of a token. `gae`: generalised advantage estimation. `vtrace`: the same with V-trace's
    weights for tokens that other weights sampled than the old policy's (docs/algorithms/ppo.md).
    `path/to/file.py:name`: a function of your own (docs/extending.md)."""
    lam: float = 0.95
    """Lambda of the advantage. 0: one-step differences of values. 1: returns minus values."""
    whiten: bool = True
    whiten_over: Literal["step", "step_biased", "group"] = "step"
    """What `whiten` takes the statistics over. `step`: all tokens of the step, with the unbiased variance.
    `step_biased`: the same with the biased variance (LightRFT, OpenRLHF). `group`: the tokens of each
    group."""
    end: Literal["last_token", "final_state"] = "last_token"
    """Place of the score. `last_token`: it is the reward of a response's last token, and the value after it
    counts as 0. `final_state`: a response of fewer than `response_length` tokens has one more place, the
    state after its last token; the critic learns its value, and the score is its reward (TRL's PPO)."""
    response_length: int | None = None
    """Number of tokens from which a response has no final state, with `end: final_state`. None:
    sampling.max_new_tokens. With an environment it must be set."""
    value_coef: float = 1.0
    """Weight of the critic's loss."""
    value_clip: float | None = 0.2
    """Largest distance of a value from its old value, within which the critic's loss has a gradient. None:
    no bound."""
    kl_reward_coef: float = 0.05
    reduction: Reduction = "token"
    """Mean over tokens in the losses of policy and critic. `token`: the mean over all tokens of the step.
    `sequence`: the mean over each response's tokens, and then over responses. `sequence_sum`: the sum over
    each response's tokens, and then the mean over responses."""
    epochs: int = 4

    @property
    def compares_groups(self) -> bool:
        return False

    @property
    def compares_steps(self) -> bool:
        return True

    @property
    def tokens_differ(self) -> bool:
        return True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.lam <= 1:
            raise ConfigError(f"algorithm.lam is {self.lam}; it must be at least 0 and at most 1")
        if not 0 <= self.value_coef < math.inf:
            raise ConfigError(f"algorithm.value_coef is {self.value_coef}; it must be at least 0, and finite")
        if self.value_clip is not None and not 0 < self.value_clip < math.inf:
            raise ConfigError(f"algorithm.value_clip is {self.value_clip}; it must be positive, and finite")
        if self.response_length is not None and self.response_length < 1:
            raise ConfigError(f"algorithm.response_length is {self.response_length}; it must be at least 1")
        if self.response_length is not None and self.end == "last_token":
            raise ConfigError(
                f"algorithm.response_length is {self.response_length}, and nothing reads it with "
                "algorithm.end last_token; remove it"
            )
        if self.rewards.flat_group_weight is not None:
            raise ConfigError(
                "algorithm.rewards.flat_group_weight is set, and ppo compares no groups; remove it"
            )
        if self.advantage == "vtrace" and self.turn_gamma != 1:
            raise ConfigError(
                f"algorithm.turn_gamma is {self.turn_gamma}, and vtrace has one discount; set "
                "algorithm.advantage to gae"
            )
        if self.advantage == "vtrace" and self.old_from != "policy":
            raise ConfigError(
                f"algorithm.old_from is {self.old_from}, and vtrace weighs the policy before the update "
                "against the sampler; set it to policy, or algorithm.advantage to gae"
            )
        if self.advantage == "vtrace" and self.correction.form != "none":
            raise ConfigError(
                "algorithm.correction.form is set, and the weights of algorithm.advantage vtrace correct for "
                "the sampler already; remove one of the two"
            )

    @property
    def reads_std_eps(self) -> bool:
        return False

    def _check_advantage(self) -> None:
        if self.advantage not in ADVANTAGES and ":" not in self.advantage:
            raise ConfigError(
                f"algorithm.advantage is {self.advantage}, which ppo does not have; "
                f"{did_you_mean(self.advantage, ADVANTAGES)}, or name a function as path/to/file.py:name"
            )
