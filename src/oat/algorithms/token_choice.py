"""The sections `entropy` and `tokens` of policy gradients: the entropy bonus, and which tokens give a
gradient (`functional/entropy.py`, `functional/token_filters.py`)."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Literal

import numpy as np

from oat.errors import ConfigError
from oat.lazy import lazily

if TYPE_CHECKING:
    import torch

    from oat import functional as F
else:
    torch, F = lazily("torch"), lazily("oat.functional")


@dataclass(frozen=True)
class EntropyConfig:
    """The bonus for the policy's entropy in the loss."""

    coef: float = 0.0
    """Weight of the entropy, which the loss subtracts. With `target`, the weight at the start of the run."""
    target: float | None = None
    """Target of the entropy, nats per token. Each step raises the weight while the entropy is at the target
    or below, and lowers it while the entropy is above; above the target the weight that is applied is 0
    (arXiv:2505.22312). Measuring the entropy before the step costs a forward pass. None: the weight is
    fixed."""
    step: float = 0.005
    """How far the weight moves in a step."""
    highest: float = 1.0
    """Largest weight."""

    def __post_init__(self) -> None:
        for name in ("coef", "step", "highest"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise ConfigError(f"algorithm.entropy.{name} is {value}; it must be at least 0, and finite")
        if self.target is None:
            _refuse_unread(self, ("step", "highest"), "entropy", "algorithm.entropy.target")
        elif not 0 < self.target < math.inf:
            raise ConfigError(f"algorithm.entropy.target is {self.target}; it must be positive, and finite")

    @property
    def is_used(self) -> bool:
        return bool(self.coef) or self.target is not None


@dataclass(frozen=True)
class TokensConfig:
    """Which of the trained tokens give the policy's loss a gradient. The others still count in the
    denominators."""

    high_entropy_share: float = 1.0
    """Share of the tokens, those with the highest entropy, that give a gradient (arXiv:2506.01939, where it
    is 0.2). 1: all of them. Below 1, measuring the entropy before the step costs a forward pass."""
    high_entropy_per: Literal["step", "row"] = "step"
    """Where the share is taken. `step`: among all tokens of a step. `row`: in each response."""
    covariance_clip: float = 0.0
    """Share of the tokens that give no gradient, drawn from those whose covariance of log-probability and
    advantage is in a band (Clip-Cov, arXiv:2505.22617, where it is 2e-4). 0: none."""
    covariance_low: float = 1.0
    """Lower end of this band."""
    covariance_high: float = 5.0
    """Upper end of this band."""
    covariance_kl: float = 0.0
    """Share of the tokens, those with the largest covariance, that get a KL from the old policy in the loss
    (KL-Cov, arXiv:2505.22617). 0: none."""
    covariance_kl_coef: float = 1.0
    """Weight of this KL."""

    def __post_init__(self) -> None:
        for name in ("high_entropy_share", "covariance_clip", "covariance_kl"):
            value = getattr(self, name)
            if not 0 <= value <= 1:
                raise ConfigError(f"algorithm.tokens.{name} is {value}; it must be a share, from 0 to 1")
        if self.high_entropy_share == 0:
            raise ConfigError(
                "algorithm.tokens.high_entropy_share is 0, with which no token gives a gradient; raise it"
            )
        if self.high_entropy_share == 1:
            _refuse_unread(self, ("high_entropy_per",), "tokens", "high_entropy_share below 1")
        if not self.covariance_clip:
            _refuse_unread(self, ("covariance_low", "covariance_high"), "tokens", "covariance_clip")
        if not self.covariance_kl:
            _refuse_unread(self, ("covariance_kl_coef",), "tokens", "covariance_kl")
        if not self.covariance_low < self.covariance_high:
            raise ConfigError(
                f"algorithm.tokens.covariance_low is {self.covariance_low}, and covariance_high "
                f"{self.covariance_high}; the band must not be empty"
            )
        if not 0 <= self.covariance_kl_coef < math.inf:
            raise ConfigError(
                f"algorithm.tokens.covariance_kl_coef is {self.covariance_kl_coef}; it must be at least 0, "
                "and finite"
            )

    @property
    def reads_entropy(self) -> bool:
        return self.high_entropy_share < 1


def chosen_tokens(
    config: TokensConfig,
    *,
    entropy_K: torch.Tensor | None,
    old_K: torch.Tensor,
    advantages_K: torch.Tensor,
    row_of_K: torch.Tensor,
    num_rows: int,
    generator: np.random.Generator,
) -> dict[str, torch.Tensor]:
    """Return masks of tokens, (K,), by name: "gradient", 0 for the tokens that give no gradient, and
    "covariance_kl", 1 for those that get a KL. A mask that the settings do not ask for is missing.

    Args:
        entropy_K: entropies of the policy before the update, nats; read if `config.reads_entropy`.
        old_K: log-probabilities of the old policy, nats.
        generator: draws the tokens of `covariance_clip`.
    """
    masks: dict[str, torch.Tensor] = {}
    if config.reads_entropy:
        assert entropy_K is not None, "policy_gradient.py asks for it where it is read"
        masks["gradient"] = (
            F.token_filters.top_share(entropy_K, share=config.high_entropy_share)
            if config.high_entropy_per == "step"
            else F.token_filters.top_share_of_rows(
                entropy_K, row_of_K, num_rows, share=config.high_entropy_share
            )
        )
    if config.covariance_clip or config.covariance_kl:
        covariances_K = F.token_filters.covariances(old_K, advantages_K)
    if config.covariance_clip:
        uniforms_K = torch.from_numpy(generator.random(len(old_K)))
        kept_K = F.token_filters.outside_covariance_band(
            covariances_K,
            uniforms_K,
            share=config.covariance_clip,
            low=config.covariance_low,
            high=config.covariance_high,
        )
        masks["gradient"] = masks.get("gradient", 1.0) * kept_K
    if config.covariance_kl:
        masks["covariance_kl"] = F.token_filters.top_share(covariances_K, share=config.covariance_kl)
    return masks


def _refuse_unread(config: object, names: tuple[str, ...], section: str, reader: str) -> None:
    """Refuse fields that were changed although nothing reads them without the setting `reader`."""
    for field in fields(config):  # type: ignore[arg-type]
        if field.name in names and getattr(config, field.name) != field.default:
            raise ConfigError(
                f"algorithm.{section}.{field.name} is {getattr(config, field.name)}, and nothing reads it "
                f"without {reader}; remove it"
            )
