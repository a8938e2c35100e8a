"""Settings of the algorithms in `group.py`."""

from dataclasses import dataclass

from oat.algorithms.policy_gradient_config import PolicyGradientConfig, PolicyLoss, Reduction
from oat.errors import ConfigError


@dataclass(frozen=True)
class ReducedConfig(PolicyGradientConfig):
    """Settings of the algorithms that may choose the reduction of their loss."""

    reduction: Reduction = "sequence"
    """Mean over tokens in the loss. `sequence`: the mean over each response's tokens, and then over
    responses. `token`: the mean over all tokens of the step. `sequence_sum`: the sum over each response's
    tokens, and then the mean over responses."""


@dataclass(frozen=True)
class GRPOConfig(ReducedConfig):
    """Settings of `grpo`."""


@dataclass(frozen=True)
class RLOOConfig(ReducedConfig):
    """Settings of `rloo`."""

    advantage: str = "leave_one_out"
    reduction: Reduction = "sequence_sum"


@dataclass(frozen=True)
class ReinforcePPConfig(ReducedConfig):
    """Settings of `reinforce_pp`."""

    samples: int = 1
    advantage: str = "none"
    whiten: bool = True
    reduction: Reduction = "token"


@dataclass(frozen=True)
class GSPOConfig(ReducedConfig):
    """Settings of `gspo`. The bounds are those of the paper's Section 5.1."""

    policy_loss: PolicyLoss = "gspo"
    clip_low: float | None = 3e-4
    clip_high: float = 4e-4


@dataclass(frozen=True)
class CISPOConfig(ReducedConfig):
    """Settings of `cispo`. The paper bounds the ratio from above only, and names no value."""

    policy_loss: PolicyLoss = "cispo"
    clip_low: float | None = None
    clip_high: float = 4.0
    reduction: Reduction = "token"


@dataclass(frozen=True)
class CPGDConfig(ReducedConfig):
    """Settings of `cpgd`."""

    advantage: str = "group_mean"
    policy_loss: PolicyLoss = "cpgd"
    drift_coef: float = 0.1


@dataclass(frozen=True)
class SAPOConfig(ReducedConfig):
    """Settings of `sapo`."""

    policy_loss: PolicyLoss = "sapo"


@dataclass(frozen=True)
class LUSPOConfig(ReducedConfig):
    """Settings of `luspo`. The bounds are those of its paper (Section 5.1)."""

    policy_loss: PolicyLoss = "gspo"
    clip_low: float | None = 2e-3
    clip_high: float = 2.5e-3
    reduction: Reduction = "sequence_sum"


@dataclass(frozen=True)
class VESPOConfig(ReducedConfig):
    """Settings of `vespo`."""

    policy_loss: PolicyLoss = "vespo"
    reduction: Reduction = "token"


@dataclass(frozen=True)
class DrGRPOConfig(PolicyGradientConfig):
    """Settings of `dr_grpo`."""

    advantage: str = "group_mean"
    max_length: int | None = None
    """Constant by which the sum over a response's tokens is divided. None: sampling.max_new_tokens; where
    responses are sampled, a smaller value is refused. With an environment it must be set, to the largest
    number of tokens that all responses of an episode may have together."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_length is not None and self.max_length < 1:
            raise ConfigError(f"algorithm.max_length is {self.max_length}; it must be at least 1")
