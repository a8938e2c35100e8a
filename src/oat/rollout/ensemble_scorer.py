"""The actor's part of an ensemble: the features of samples, and a copy of the ensemble with the weights that
were last loaded."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from oat.errors import NonFiniteError
from oat.models.ensemble import Ensemble
from oat.rollout.features import Features
from oat.types import Group


class EnsembleScorer:
    """Scores samples with every member of the ensemble."""

    def __init__(self, features: Features, ensemble: Ensemble):
        self.features, self.ensemble = features, ensemble.requires_grad_(False)
        self._version = 0

    @torch.no_grad()
    def score(self, groups: Sequence[Group]) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Return two lists with one float32 array per group: the rewards (M, G), and the features (G, D).

        Raises:
            NonFiniteError: a feature or a reward is NaN or infinite.
        """
        features = self.features.of(groups)
        features_ND = np.concatenate(features)
        rewards_MN = self.ensemble.rewards(torch.from_numpy(features_ND)).T.numpy()
        _refuse_nonfinite(
            features_ND, "features of responses", "see the weights of the backbone (explorer.features)"
        )
        _refuse_nonfinite(
            rewards_MN,
            "rewards that the ensemble gives responses",
            "begin a new run with a lower explorer.ensemble.learning_rate, or with another "
            "explorer.ensemble.start",
        )
        bounds = np.cumsum([len(group.trajectories) for group in groups])[:-1]
        return np.split(rewards_MN, bounds, axis=1), features

    def load(self, slot: str, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy weights into the ensemble, the only slot."""
        held = self.ensemble.tensors()
        with torch.no_grad():
            for name, tensor in tensors.items():
                held[name].copy_(tensor)
        self._version = version

    def tensors(self, slot: str) -> dict[str, torch.Tensor]:
        """Return the tensors of the ensemble, by name."""
        return self.ensemble.tensors()

    def version(self, slot: str) -> int:
        """Return the version of the weights; 0 before weights are loaded."""
        return self._version


def _refuse_nonfinite(numbers: np.ndarray, what: str, advice: str) -> None:
    if bad := int((~np.isfinite(numbers)).sum()):
        raise NonFiniteError(f"{bad} of {numbers.size} {what} are NaN or infinite; {advice}")
