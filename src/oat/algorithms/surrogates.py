"""Losses of the policy by name: terms for each trained token, and which tokens a bound changed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from oat.algorithms.policy_gradient_config import PolicyGradientConfig
from oat.lazy import lazily

if TYPE_CHECKING:
    import torch

    from oat import functional as F
else:
    torch, F = lazily("torch"), lazily("oat.functional")


@dataclass(frozen=True, eq=False)
class TokenTerms:
    """What a loss of the policy reads of the K trained tokens of a forward pass.

    Attributes:
        logps_K: sampled log-probabilities of the policy, nats, with gradient.
        old_logps_K: those of the old policy, nats.
        advantages_K: the advantage of each token.
        row_of_K: index of each token's row, in [0, num_rows).
        correction_K: weights for the sampler that are a part of the loss's own weight (`vespo`); None: there
            are none.
    """

    logps_K: torch.Tensor
    old_logps_K: torch.Tensor
    advantages_K: torch.Tensor
    row_of_K: torch.Tensor
    num_rows: int
    correction_K: torch.Tensor | None = None

    @property
    def elementwise(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The arguments of a loss that needs no rows."""
        return self.logps_K, self.old_logps_K, self.advantages_K


Terms: TypeAlias = "tuple[torch.Tensor, torch.Tensor]"
"""The terms of the loss, (K,), with gradient; and (K,), 1 where a bound changed the term, else 0."""
Surrogate: TypeAlias = "Callable[[PolicyGradientConfig, TokenTerms], Terms]"


def _low(config: PolicyGradientConfig) -> float:
    """Return the distance of the lower bound from 1. At a distance of 1 the bound is 0, so it bounds
    nothing."""
    return 1.0 if config.clip_low is None else config.clip_low


def _clipped(config: PolicyGradientConfig, given: TokenTerms) -> Terms:
    logps_K, old_logps_K, advantages_K = given.elementwise
    return F.policy.clipped_policy_loss(
        logps_K,
        old_logps_K,
        advantages_K,
        clip_low=_low(config),
        clip_high=config.clip_high,
        dual_clip=config.dual_clip,
    )


def _reinforce(config: PolicyGradientConfig, given: TokenTerms) -> Terms:
    return F.surrogates.reinforce_loss(given.logps_K, given.advantages_K), torch.zeros_like(given.old_logps_K)


def _gspo(config: PolicyGradientConfig, given: TokenTerms, *, per_token: bool) -> Terms:
    logps_K, old_logps_K, advantages_K = given.elementwise
    return F.surrogates.gspo_loss(
        logps_K,
        old_logps_K,
        advantages_K,
        given.row_of_K,
        given.num_rows,
        clip_low=_low(config),
        clip_high=config.clip_high,
        per_token=per_token,
    )


def _cispo(config: PolicyGradientConfig, given: TokenTerms) -> Terms:
    return F.surrogates.cispo_loss(*given.elementwise, clip_high=config.clip_high, clip_low=config.clip_low)


def _cpgd(config: PolicyGradientConfig, given: TokenTerms) -> Terms:
    return F.surrogates.cpgd_loss(*given.elementwise, clip_low=config.clip_low, clip_high=config.clip_high)


def _sapo(config: PolicyGradientConfig, given: TokenTerms) -> Terms:
    smooth = config.smooth
    return F.surrogates.sapo_loss(
        *given.elementwise,
        temperature=smooth.tau,
        negative_temperature=smooth.negative_tau,
    )


def _vespo(config: PolicyGradientConfig, given: TokenTerms) -> Terms:
    logps_K, old_logps_K, advantages_K = given.elementwise
    smooth = config.smooth
    return F.surrogates.vespo_loss(
        logps_K,
        old_logps_K,
        advantages_K,
        given.row_of_K,
        given.num_rows,
        power=smooth.power,
        decay=smooth.decay,
        negative_power=smooth.negative_power,
        negative_decay=smooth.negative_decay,
        correction_K=given.correction_K,
    )


POLICY_LOSSES: Mapping[str, Surrogate] = {
    "clipped": _clipped,
    "reinforce": _reinforce,
    "gspo": lambda config, given: _gspo(config, given, per_token=False),
    "gspo_token": lambda config, given: _gspo(config, given, per_token=True),
    "cispo": _cispo,
    "cpgd": _cpgd,
    "sapo": _sapo,
    "vespo": _vespo,
}
"""The loss of each name that `algorithm.policy_loss` may have."""
