"""Weights that follow a target over the steps of a run: that of the KL to the reference, and that of the
entropy. Each step adapts them to what the policy has on its rows before the update, and then applies them.

They are a state of the objective, and follow from recorded responses and the weights before the update. So a
continued run has the weights of the unbroken one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from oat.algorithms.policy_gradient_config import PolicyGradientConfig
from oat.algorithms.rows import OldValues
from oat.lazy import lazily

if TYPE_CHECKING:
    import torch

    from oat import functional as F
else:
    torch, F = lazily("torch"), lazily("oat.functional")


class AdaptiveWeights:
    """The present weights.

    Attributes:
        kl: the weight that `kl_target` adapts, and otherwise a fixed one: that of the KL in the loss or, if
            this one is 0, of the KL in the rewards.
        entropy: the weight that `entropy.target` adapts, and otherwise a fixed one.
    """

    def __init__(self, config: PolicyGradientConfig):
        self.config = config
        self.kl = self._first_kl
        self.entropy = config.entropy.coef

    @property
    def kl_reward_coef(self) -> float:
        """The present weight of the KL in the rewards."""
        c = self.config
        return self.kl if c.kl_target is not None and not c.kl_coef else c.kl_reward_coef

    def adapt(self, start: OldValues, num_rows: int, metrics: dict[str, float]) -> dict[str, torch.Tensor]:
        """Adapt the weights to the policy before the step's update. Return those of the loss as columns, and
        add all to the metrics."""
        columns: dict[str, torch.Tensor] = {}
        c, entropy = self.config, self.config.entropy
        if c.kl_target is not None:
            divergence = _mean(F.kl.kl_k3(start.read("raw_K"), start.read("reference_K")))
            self.kl = F.kl.adapted_coef(
                self.kl, divergence, target=c.kl_target, samples=num_rows, horizon=c.kl_horizon
            )
            if c.kl_coef:
                columns["kl_coef_N"] = torch.full((num_rows,), self.kl, dtype=torch.float64)
            metrics["kl/coef"] = self.kl
        if entropy.target is not None:
            present = _mean(start.read("entropy_K"))
            self.entropy = F.entropy.adapted_entropy_coef(
                self.entropy, present, target=entropy.target, step=entropy.step, highest=entropy.highest
            )
            applied = F.entropy.applied_entropy_coef(self.entropy, present, target=entropy.target)
            columns["entropy_coef_N"] = torch.full((num_rows,), applied, dtype=torch.float64)
            metrics["policy/entropy_coef"] = applied
        return columns

    @property
    def state(self) -> dict[str, Any]:
        """The adapted weights, and those at the start of the run; empty if no weight has a target."""
        state: dict[str, Any] = {}
        if self.config.kl_target is not None:
            state |= {self._kl_name: self.kl, "started": self._first_kl}
        if self.config.entropy.target is not None:
            state |= {"entropy_coef": self.entropy, "entropy_started": self.config.entropy.coef}
        return state

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the weights. A fork ignores a saved weight if it sets no target, or another weight at the
        start than the original run."""
        is_same = self._kl_name in state and state["started"] == self._first_kl
        if self.config.kl_target is not None and is_same:
            self.kl = state[self._kl_name]
        entropy = self.config.entropy
        if entropy.target is not None and state.get("entropy_started") == entropy.coef:
            self.entropy = state["entropy_coef"]

    @property
    def _first_kl(self) -> float:
        return self.config.kl_coef or self.config.kl_reward_coef

    @property
    def _kl_name(self) -> str:
        return "kl_coef" if self.config.kl_coef else "kl_reward_coef"


def _mean(values_K: torch.Tensor) -> float:
    return float(values_K.mean()) if len(values_K) else math.nan
