"""Losses of the policy by name: terms for each trained token, and which tokens a bound changed."""

from collections.abc import Callable, Mapping

import torch

from oat.algorithms.base import View
from oat.algorithms.group_config import GroupConfig
from oat.functional.policy import clipped_policy_loss
from oat.functional.surrogates import cispo_loss, cpgd_loss, gspo_loss, reinforce_loss

Terms = tuple[torch.Tensor, torch.Tensor]
"""The terms of the loss, (K,), with gradient; and (K,), 1 where a bound changed the term, else 0."""
Surrogate = Callable[[GroupConfig, View, torch.Tensor, torch.Tensor, torch.Tensor], Terms]
"""Makes the terms of the settings, the view, and three tensors, (K,): the policy's log-probabilities, the
old ones, and the advantages."""


def _low(config: GroupConfig) -> float:
    """Return the distance of the lower bound from 1. At a distance of 1 the bound is 0, so it bounds
    nothing."""
    return 1.0 if config.clip_low is None else config.clip_low


def _clipped(
    config: GroupConfig, view: View, logps_K: torch.Tensor, old_K: torch.Tensor, advantages_K: torch.Tensor
) -> Terms:
    return clipped_policy_loss(
        logps_K,
        old_K,
        advantages_K,
        clip_low=_low(config),
        clip_high=config.clip_high,
        dual_clip=config.dual_clip,
    )


def _reinforce(
    config: GroupConfig, view: View, logps_K: torch.Tensor, old_K: torch.Tensor, advantages_K: torch.Tensor
) -> Terms:
    return reinforce_loss(logps_K, advantages_K), torch.zeros_like(old_K)


def _gspo(*, per_token: bool) -> Surrogate:
    def loss(
        config: GroupConfig,
        view: View,
        logps_K: torch.Tensor,
        old_K: torch.Tensor,
        advantages_K: torch.Tensor,
    ) -> Terms:
        return gspo_loss(
            logps_K,
            old_K,
            advantages_K,
            view.row_of_K,
            view.num_rows,
            clip_low=_low(config),
            clip_high=config.clip_high,
            per_token=per_token,
        )

    return loss


def _cispo(
    config: GroupConfig, view: View, logps_K: torch.Tensor, old_K: torch.Tensor, advantages_K: torch.Tensor
) -> Terms:
    return cispo_loss(logps_K, old_K, advantages_K, clip_high=config.clip_high, clip_low=config.clip_low)


def _cpgd(
    config: GroupConfig, view: View, logps_K: torch.Tensor, old_K: torch.Tensor, advantages_K: torch.Tensor
) -> Terms:
    return cpgd_loss(logps_K, old_K, advantages_K, clip_low=config.clip_low, clip_high=config.clip_high)


POLICY_LOSSES: Mapping[str, Surrogate] = {
    "clipped": _clipped,
    "reinforce": _reinforce,
    "gspo": _gspo(per_token=False),
    "gspo_token": _gspo(per_token=True),
    "cispo": _cispo,
    "cpgd": _cpgd,
}
"""The loss of each name that `algorithm.policy_loss` may have."""
