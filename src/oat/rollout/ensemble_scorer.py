"""The actor's part of an ensemble: the features of samples, and a copy of the ensemble with the weights that
were last loaded."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from oat.engines.base import checksum
from oat.models.ensemble import Ensemble
from oat.rollout.features import Features
from oat.types import Group, Receipt


class EnsembleScorer:
    """Scores samples with every member of the ensemble."""

    def __init__(self, features: Features, ensemble: Ensemble):
        self.features, self.ensemble = features, ensemble.requires_grad_(False)

    @torch.no_grad()
    def score(self, groups: Sequence[Group]) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Return two lists with one float32 array per group: the rewards (M, G), and the features (G, D)."""
        features = self.features.of(groups)
        rewards_MN = self.ensemble(torch.from_numpy(np.concatenate(features))).T.numpy()
        bounds = np.cumsum([len(group.trajectories) for group in groups])[:-1]
        return np.split(rewards_MN, bounds, axis=1), features

    def load(self, slot: str, version: int, tensors: Mapping[str, torch.Tensor]) -> Receipt:
        """Copy weights into the ensemble, and return the receipt of the weights that it then has."""
        held = self.ensemble.tensors()
        with torch.no_grad():
            for name, tensor in tensors.items():
                held[name].copy_(tensor)
        return Receipt(slot, version, {name: checksum(tensor) for name, tensor in held.items()})
