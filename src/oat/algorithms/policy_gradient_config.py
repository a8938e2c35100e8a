"""Settings that all policy gradients share."""

import math
from dataclasses import MISSING, dataclass, field, fields
from typing import Literal

from oat.algorithms.corrections import CorrectionConfig
from oat.algorithms.credit import Credit
from oat.algorithms.shaping import RewardsConfig
from oat.algorithms.token_choice import EntropyConfig, TokensConfig
from oat.algorithms.vine import VineConfig
from oat.errors import ConfigError, did_you_mean

ADVANTAGES = (
    "none",
    "group_mean",
    "group_norm",
    "batch_mean",
    "batch_norm",
    "leave_one_out",
    "leave_one_out_max",
    "length_weighted",
    "best_of_group",
    "vine",
)
"""Names of the estimators in `estimators.py`."""
_WITH_SUM_0 = ("group_mean", "group_norm", "batch_norm", "leave_one_out")
"""Those whose advantages add up to 0 in each group."""
PolicyLoss = Literal["clipped", "reinforce", "gspo", "gspo_token", "cispo", "cpgd", "sapo", "vespo"]
"""Names of the losses in `surrogates.py`."""
_WITHOUT_CLIP = ("reinforce", "sapo", "vespo")
KLEstimator = Literal["k1", "k2", "k3"]
"""Names of the estimators in `functional/kl.py`."""
Reduction = Literal["sequence", "token", "sequence_sum"]
"""Names of the reductions of a loss that an algorithm may choose from."""


@dataclass(frozen=True)
class SmoothConfig:
    """Constants of the losses without a hard clip (`functional/surrogates.py`). The defaults are those of the
    papers."""

    tau: float = 1.0
    """`sapo`: the gate's temperature for tokens with a positive advantage. A higher one fades sooner."""
    negative_tau: float = 1.05
    """`sapo`: that for the other tokens."""
    power: float = 2.0
    """`vespo`: power of the response's ratio w in the weight exp(decay (1 - w)) w^power, for tokens with an
    advantage that is not negative."""
    decay: float = 3.0
    """`vespo`: decay in this weight."""
    negative_power: float = 3.0
    """`vespo`: power for tokens with a negative advantage."""
    negative_decay: float = 2.0
    """`vespo`: decay for tokens with a negative advantage."""

    def __post_init__(self) -> None:
        for each in fields(self):
            if not 0 < getattr(self, each.name) < math.inf:
                raise ConfigError(
                    f"algorithm.smooth.{each.name} is {getattr(self, each.name)}; it must be positive, and "
                    "finite"
                )


@dataclass(frozen=True)
class PolicyGradientConfig:
    """Settings of every policy gradient."""

    prompts: int = 16
    """Prompts per step."""
    samples: int = 8
    """Responses per prompt: the size of a group."""
    advantage: str = "group_norm"
    """Advantage of a response, from its group's rewards r. `none`: r. `group_mean`: r minus the mean.
    `group_norm`: this, divided by the group's standard deviation. `batch_norm`: r minus the group's mean,
    divided by the standard deviation of all rewards of the step. `batch_mean`: r minus the mean of all
    rewards of the step. `leave_one_out`: r minus the mean of the others.
    `leave_one_out_max`: r minus the largest of the others. `length_weighted`: r minus the mean weighted by
    the responses' lengths. `best_of_group`: 1 for the first of the best, 0 for the others. `vine`: how much
    each step of a response raises the mean reward of further responses that are sampled from the step's end
    (docs/algorithms/vine.md). A function of your own is named `path/to/file.py:name` or
    `package.module:name` (docs/extending.md)."""
    credit: Credit = "response"
    """Where a response's reward is earned. `response`: at its last token. `steps`: at the ends of the steps
    that the oracle rewarded. `turns`: at the ends of the turns that the environment rewarded. With `steps`
    and `turns` the estimator compares single steps or turns with all of the group (`leave_one_out` and
    `leave_one_out_max`: with those of the group's other responses)."""
    turn_gamma: float = 1.0
    """Discount per turn: a token's advantage counts a reward n turns later turn_gamma^n times."""
    vine: VineConfig = field(default_factory=VineConfig)
    """The branches of `advantage: vine`."""
    std_eps: float = 1e-4
    """Number that is added to the standard deviation by which `group_norm`, `batch_norm` and
    `whiten_over: responses` divide."""
    kl_reward_coef: float = 0.0
    """Weight of the KL to the reference in the tokens' rewards. 0: the KL is no part of the rewards. With
    `kl_target`, and `kl_coef: 0`, this is the weight at the start of the run."""
    kl_reward_estimator: KLEstimator = "k1"
    """Estimator of the KL in the rewards (`functional/kl.py`)."""
    gamma: float = 1.0
    """Discount per token: a token's advantage counts a reward n tokens later gamma^n times."""
    whiten: bool = False
    """Shift and scale the advantages to mean 0 and variance 1 over all tokens of the step."""
    whiten_over: Literal["step", "step_biased", "group", "responses"] = "step"
    """What `whiten` takes the statistics over. `step`: all tokens of the step, with the unbiased variance.
    `step_biased`: the same with the biased variance (LightRFT, OpenRLHF). `group`: the tokens of each group.
    `responses`: the responses of the step, each counted once, however long it is (TRL's RLOO). The tokens of
    a response must then have one advantage."""
    advantage_clip: float | None = None
    """Largest absolute value of an advantage, after whitening. None: no bound."""
    old_from: Literal["policy", "sampler", "reference"] = "policy"
    """The old policy, by whose probabilities importance ratios divide. `policy`: the policy before the
    update. If other weights or another precision sampled the tokens, a forward pass computes its
    log-probabilities. `sampler`: the weights that sampled the tokens; their log-probabilities are recorded.
    `reference`: the reference, so that all steps of a run on recorded responses have the same bounds."""
    policy_loss: PolicyLoss = "clipped"
    """Loss of the policy. `clipped`: that of PPO. `reinforce`: without importance ratio. `gspo`: one ratio
    for each response; `gspo_token`: its form for tokens. `cispo`: the clipped ratio gives no gradient.
    `cpgd`: the logarithm of the ratio is clipped. `sapo`: a smooth gate takes the place of the clip. `vespo`:
    a smooth weight of the whole response does."""
    smooth: SmoothConfig = field(default_factory=SmoothConfig)
    """Constants of `sapo` and `vespo`."""
    clip_low: float | None = 0.2
    """The importance ratio is clipped from below at 1 - clip_low. None: it is not."""
    clip_high: float = 0.2
    """The importance ratio is clipped from above at 1 + clip_high."""
    dual_clip: float | None = None
    """Largest loss of a token with a negative advantage, in multiples of the advantage's size
    (arXiv:1912.09729); above 1. None: no bound. Only `clipped` has it."""
    drift_coef: float = 0.0
    """Weight of the KL from the policy at the start of the step, KL(old policy || policy), in the loss."""
    kl_coef: float = 0.0
    """Weight of the KL to the reference. 0: no KL, and no reference is needed. With `kl_target`, this is the
    weight at the start of the run."""
    kl_estimator: KLEstimator = "k3"
    """Estimator of the KL in the loss (`functional/kl.py`)."""
    kl_unbiased: bool = False
    """Multiply each term of the KL in the loss by the importance ratio, so that its gradient is that of the
    KL (arXiv:2512.02556). Not with `k2`."""
    kl_max_log_ratio: float | None = None
    """Largest absolute value of the log-ratio between policy and reference in a term of the KL, nats. A
    log-ratio beyond it counts as the bound, and gets no gradient; with `kl_unbiased` it keeps the gradient
    that it has at the bound. None: no bound."""
    kl_target: float | None = None
    """Target of the KL to the reference, nats per token. Each step changes `kl_coef` (or, if it is 0,
    `kl_reward_coef`) so that the KL moves towards the target. None: the weight is fixed."""
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
    rewards: RewardsConfig = field(default_factory=RewardsConfig)
    """The way from scores to rewards."""
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    """Weights for tokens that the old policy would have sampled with another probability."""
    entropy: EntropyConfig = field(default_factory=EntropyConfig)
    """The bonus for the policy's entropy."""
    tokens: TokensConfig = field(default_factory=TokensConfig)
    """Which tokens give a gradient."""

    @property
    def compares_groups(self) -> bool:
        """True if a response's advantage depends on which rewards are of its group."""
        return self.advantage not in ("none", "batch_mean")

    @property
    def whitens_responses(self) -> bool:
        """True if advantages are normalised over the responses of the step."""
        return self.whiten and self.whiten_over == "responses"

    @property
    def reads_std_eps(self) -> bool:
        """True if the estimator gets `std_eps`."""
        is_read = self.advantage in ("group_norm", "batch_norm") or ":" in self.advantage
        return is_read or self.whitens_responses

    @property
    def compares_steps(self) -> bool:
        """True if an advantage depends on more than the scores of its group, so that a flat group may teach
        something. Where the advantages of each group add up to 0, it does not, even if they are normalised
        over the responses of the step."""
        is_whitened = self.whiten and not (self.whitens_responses and self.advantage in _WITH_SUM_0)
        is_charged = bool(self.kl_reward_coef) or self.rewards.whiten
        return is_whitened or is_charged or self.advantage == "batch_mean"

    @property
    def weighs_tokens(self) -> bool:
        """True if advantages are made for tokens, not for responses."""
        is_whitened = self.whiten and not self.whitens_responses
        return is_whitened or self.rewards.whiten or self.tokens_differ

    @property
    def branches(self) -> bool:
        """True if further responses are sampled from within responses."""
        return self.advantage == "vine"

    @property
    def tokens_differ(self) -> bool:
        """True if the tokens of one response may have different advantages before they are whitened."""
        is_discounted = self.gamma != 1 or self.turn_gamma != 1
        return is_discounted or self.credit != "response" or self.branches or bool(self.kl_reward_coef)

    def __post_init__(self) -> None:
        self._check_advantage()
        if self.samples < 1:
            raise ConfigError(f"algorithm.samples is {self.samples}; it must be at least 1")
        if self.clip_low is not None and not 0 <= self.clip_low < 1:
            raise ConfigError(f"algorithm.clip_low is {self.clip_low}; it must be at least 0 and below 1")
        for name in ("clip_high", "kl_coef", "std_eps", "kl_reward_coef", "drift_coef"):
            _check_finite(name, getattr(self, name))
        for name in ("gamma", "turn_gamma"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(
                    f"algorithm.{name} is {getattr(self, name)}; it must be at least 0 and at most 1"
                )
        if self.dual_clip is not None and not 1 < self.dual_clip < math.inf:
            raise ConfigError(f"algorithm.dual_clip is {self.dual_clip}; it must be above 1, and finite")
        for name in ("advantage_clip", "kl_max_log_ratio"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"algorithm.{name} is {value}; it must be positive, and finite")
        self._check_read()
        self._check_forms()
        self._check_control()
        self._check_ends()

    def _check_advantage(self) -> None:
        """Check that there is an estimator of this name."""
        if self.advantage not in ADVANTAGES and ":" not in self.advantage:
            raise ConfigError(
                f"algorithm.advantage is {self.advantage}, which is no estimator; "
                f"{did_you_mean(self.advantage, ADVANTAGES)}, or name a function as path/to/file.py:name"
            )

    def _check_read(self) -> None:
        """Check that the chosen estimator and the chosen loss read the settings that were changed."""
        readers = {
            "credit": (not self.branches, "advantage"),
            "gamma": (not self.branches, "advantage"),
            "turn_gamma": (not self.branches, "advantage"),
            "std_eps": (self.reads_std_eps, "advantage"),
            "clip_low": (self.policy_loss not in _WITHOUT_CLIP, "policy_loss"),
            "clip_high": (self.policy_loss not in _WITHOUT_CLIP, "policy_loss"),
            "whiten_over": (self.whiten, "whiten"),
            "dual_clip": (self.policy_loss == "clipped", "policy_loss"),
            "kl_reward_estimator": (bool(self.kl_reward_coef), "kl_reward_coef"),
            "kl_estimator": (bool(self.kl_coef), "kl_coef"),
            "kl_unbiased": (bool(self.kl_coef), "kl_coef"),
            "kl_max_log_ratio": (bool(self.kl_coef or self.kl_reward_coef), "kl_coef"),
        }
        defaults = {each.name: each.default for each in fields(self) if each.default is not MISSING}
        for name, (is_read, by) in readers.items():
            if not is_read and getattr(self, name) != defaults[name]:
                raise ConfigError(
                    f"algorithm.{name} is {getattr(self, name)}, and nothing reads it with "
                    f"algorithm.{by} {getattr(self, by)}; remove it"
                )

    def _check_forms(self) -> None:
        """Check settings that exclude each other, and that a loss reads its constants."""
        if self.policy_loss not in ("sapo", "vespo") and self.smooth != SmoothConfig():
            raise ConfigError(
                "algorithm.smooth is set, and nothing reads it with algorithm.policy_loss "
                f"{self.policy_loss}; remove it"
            )
        if self.whitens_responses and (self.tokens_differ or self.rewards.whiten):
            raise ConfigError(
                "algorithm.whiten_over is responses, and the tokens of a response have advantages of their "
                "own (algorithm.gamma, turn_gamma, credit, vine, kl_reward_coef or rewards.whiten); set it "
                "to step, or remove what makes them differ"
            )
        if self.kl_unbiased and self.kl_estimator == "k2":
            raise ConfigError(
                "algorithm.kl_unbiased is true, and k2 is no estimator of the KL itself; set "
                "algorithm.kl_estimator to k1 or k3"
            )
        if self.rewards.sources != "sum" and self.credit != "response":
            raise ConfigError(
                f"algorithm.rewards.sources is {self.rewards.sources}, and the rewards of {self.credit} "
                "(algorithm.credit) are in other units than normalised scores; remove one of the two"
            )
        if self.branches and self.rewards.whiten:
            raise ConfigError(
                "algorithm.rewards.whiten is true, and with algorithm.advantage vine the advantages of steps "
                "are no sums of rewards of tokens; set algorithm.whiten instead"
            )
        if not self.branches and self.vine != VineConfig():
            raise ConfigError(
                f"algorithm.vine is set, and nothing reads it with algorithm.advantage {self.advantage}; "
                "remove it"
            )
        if self.old_from == "reference" and (self.tokens.covariance_clip or self.tokens.covariance_kl):
            raise ConfigError(
                "algorithm.tokens.covariance_clip and covariance_kl read the policy's log-probabilities "
                "before the update, and with algorithm.old_from reference nothing computes them; remove one "
                "of the two"
            )
        if self.old_from != "policy" and self.correction.form != "none":
            raise ConfigError(
                f"algorithm.correction.form is set, and with algorithm.old_from {self.old_from} there is no "
                "old policy beside the sampler; remove one of the two"
            )

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
            if self.kl_horizon != PolicyGradientConfig.kl_horizon:
                raise ConfigError(
                    f"algorithm.kl_horizon is {self.kl_horizon}, and nothing reads it without "
                    "algorithm.kl_target; remove it"
                )
            return
        if not 0 < self.kl_target < math.inf:
            raise ConfigError(f"algorithm.kl_target is {self.kl_target}; it must be positive, and finite")
        if not self.kl_coef and not self.kl_reward_coef:
            raise ConfigError(
                "algorithm.kl_target is set, and algorithm.kl_coef is 0, of which every multiple is 0, and "
                "kl_reward_coef too; set kl_coef to where it starts, or kl_reward_coef for one in the rewards"
            )
        if self.kl_horizon < self.prompts * self.samples:
            raise ConfigError(
                f"algorithm.kl_horizon is {self.kl_horizon}, less than the {self.prompts * self.samples} "
                "responses of a step, so the coefficient "
                "would leap; raise it"
            )


def _check_finite(name: str, value: float) -> None:
    if not 0 <= value < math.inf:
        raise ConfigError(f"algorithm.{name} is {value}; it must be at least 0, and finite")
