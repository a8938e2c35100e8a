"""The actor's part of an ensemble: a frozen backbone, which turns samples into features, and a copy of the
ensemble with the weights that were last loaded."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from oat.engines.base import checksum
from oat.models.causal_lm import CausalLM
from oat.models.ensemble import Ensemble
from oat.types import Group, Receipt, Trajectory

_ROWS = 64
"""Largest number of rows in one forward pass of the backbone."""


class EnsembleScorer:
    """Scores samples with every member of the ensemble.

    The feature of a sample, (D,), is the backbone's last hidden state at the sample's last token.
    """

    def __init__(self, backbone: CausalLM, ensemble: Ensemble):
        self.backbone, self.ensemble = backbone, ensemble.requires_grad_(False)

    @torch.no_grad()
    def score(self, groups: Sequence[Group]) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Return two lists with one float32 array per group: the rewards (M, G), and the features (G, D). D
        is the backbone's hidden size."""
        rows = [trajectory for group in groups for trajectory in group.trajectories]
        features_ND = torch.cat(
            [self._features(rows[start : start + _ROWS]) for start in range(0, len(rows), _ROWS)]
        )
        rewards_MN = self.ensemble(features_ND).T.numpy()
        bounds = np.cumsum([len(group.trajectories) for group in groups])[:-1]
        return np.split(rewards_MN, bounds, axis=1), np.split(features_ND.numpy(), bounds)

    def load(self, slot: str, version: int, tensors: Mapping[str, torch.Tensor]) -> Receipt:
        """Copy weights into the ensemble, and return the receipt of the weights that it then has."""
        held = self.ensemble.tensors()
        with torch.no_grad():
            for name, tensor in tensors.items():
                held[name].copy_(tensor)
        return Receipt(slot, version, {name: checksum(tensor) for name, tensor in held.items()})

    def _features(self, rows: Sequence[Trajectory]) -> torch.Tensor:
        hidden_TD, places = self.backbone.hidden_of([row.ids for row in rows])
        return hidden_TD[[place[-1] for place in places]].float().cpu()
