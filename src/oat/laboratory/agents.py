"""Agents of the laboratory. An agent learns utilities from labelled pairs. With M samples of its belief, it
tells a rule the rewards of candidates.

* `Ideal`: Bayesian logistic regression by Laplace's approximation, whose prior has the scale of the world's
  utility. In a world with a linear utility, it believes as well as one can, up to the approximation. So a
  rule that does badly with it is a bad rule.
* `Learned`: the ensemble of `oat` (`oat.models.ensemble`), learned as in a run. A rule that does well with
  `Ideal` and badly with it has a poor ensemble.
"""

from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
from torch.nn.functional import logsigmoid

from oat.explore.pair_buffer import PairBuffer
from oat.explore.settings import EnsembleConfig
from oat.explore.uncertainty import sigmoid
from oat.models.ensemble import Ensemble

MEMBERS = 20
_NEWTON_STEPS = 50
_SMALL = 1e-6
"""Newton's method ends where a step would raise the logarithm of the posterior by less than half of this."""
ENSEMBLE = EnsembleConfig(members=MEMBERS, hidden=32, learning_rate=3e-3, prior=0.0)
"""`Learned`: as `explorer.ensemble`. Width and learning rate were chosen in `independent` and `redundant`, on
seeds that no figure uses."""


class Agent(Protocol):
    def rewards(self, features_BGD: np.ndarray) -> np.ndarray:
        """Return the rewards of candidates under each sample of the belief, (M, B, G)."""

    def means(self, features_BGD: np.ndarray) -> np.ndarray:
        """Return the mean rewards of candidates, (B, G)."""

    def learn(self, chosen_PD: np.ndarray, rejected_PD: np.ndarray) -> None:
        """Learn from P labelled pairs."""


class Ideal:
    """See the module's docstring.

    Args:
        dim: number of features.
        prior_std: standard deviation of each weight before any label.
    """

    def __init__(self, dim: int, generator: np.random.Generator, prior_std: float):
        self.generator, self.prior_std = generator, prior_std
        self.pairs_PD = np.zeros((0, dim))
        self.mean_D = np.zeros(dim)
        self.root_DD = prior_std * np.eye(dim)

    def rewards(self, features_BGD: np.ndarray) -> np.ndarray:
        normal_MD = self.generator.normal(size=(MEMBERS, len(self.mean_D)))
        weights_MD = self.mean_D + normal_MD @ self.root_DD.T
        return np.einsum("bgd,md->mbg", features_BGD, weights_MD)

    def means(self, features_BGD: np.ndarray) -> np.ndarray:
        return features_BGD @ self.mean_D

    def learn(self, chosen_PD: np.ndarray, rejected_PD: np.ndarray) -> None:
        """Find the maximum of the posterior by Newton's method, with halved steps where a whole one goes too
        far. The belief is normal, with the curvature at the maximum."""
        self.pairs_PD = np.concatenate([self.pairs_PD, chosen_PD - rejected_PD])
        prior_DD = np.eye(len(self.mean_D)) / self.prior_std**2
        for _ in range(_NEWTON_STEPS):
            p_P = sigmoid(self.pairs_PD @ self.mean_D)
            gradient_D = self.pairs_PD.T @ (1 - p_P) - prior_DD @ self.mean_D
            curvature_DD = (self.pairs_PD.T * (p_P * (1 - p_P))) @ self.pairs_PD + prior_DD
            step_D = np.linalg.solve(curvature_DD, gradient_D)
            if gradient_D @ step_D < _SMALL:
                break
            before = self._log_posterior(self.mean_D)
            while self._log_posterior(self.mean_D + step_D) < before:
                step_D = 0.5 * step_D
            self.mean_D = self.mean_D + step_D
        self.root_DD = np.linalg.inv(np.linalg.cholesky(curvature_DD)).T

    def _log_posterior(self, weights_D: np.ndarray) -> float:
        """Return the logarithm of the posterior density, up to a constant."""
        margins_P = self.pairs_PD @ weights_D
        return float(-np.logaddexp(0, -margins_P).sum() - 0.5 * weights_D @ weights_D / self.prior_std**2)


class Learned:
    """See the module's docstring."""

    def __init__(self, dim: int, generator: np.random.Generator, config: EnsembleConfig = ENSEMBLE):
        self.config, self.generator = config, generator
        self.model = Ensemble(
            features=dim,
            members=config.members,
            hidden=config.hidden,
            activation=config.activation,
            prior_form=config.prior_form,
            generator=generator,
        )
        self.buffer = PairBuffer(config.buffer)
        self.optimiser = torch.optim.Adam(
            self.model.parameters(),
            config.learning_rate,
            betas=config.betas,
            eps=config.eps,
            weight_decay=config.weight_decay,
        )

    @torch.no_grad()
    def rewards(self, features_BGD: np.ndarray) -> np.ndarray:
        prompts, size, dim = features_BGD.shape
        flat_ND = torch.from_numpy(features_BGD.reshape(-1, dim).astype(np.float32))
        return self.model.rewards(flat_ND).T.numpy().reshape(-1, prompts, size)

    def means(self, features_BGD: np.ndarray) -> np.ndarray:
        return self.rewards(features_BGD).mean(axis=0)

    def learn(self, chosen_PD: np.ndarray, rejected_PD: np.ndarray) -> None:
        """Store the pairs, and make the optimiser steps of a step of a run."""
        c = self.config
        pairs = np.stack([chosen_PD, rejected_PD], axis=1).astype(np.float32)
        if len(pairs):
            self.buffer.add(torch.from_numpy(pairs))
        size = min(c.batch, self.buffer.size)
        for _ in range(c.steps if size else 0):
            drawn = torch.from_numpy(self.generator.choice(self.buffer.size, size, replace=False))
            rewards_NM = self.model.rewards(self.buffer.pairs[drawn].flatten(0, 1))
            loss = -logsigmoid(rewards_NM[0::2] - rewards_NM[1::2]).mean()
            if c.prior:
                loss = loss + c.weight_of_prior(self.buffer.seen) * self.model.prior()
            self.optimiser.zero_grad()
            loss.backward()
            self.optimiser.step()


def _learned(dim: int, generator: np.random.Generator, prior_std: float) -> Learned:
    """Make an ensemble. Its initial weights do not depend on the world."""
    return Learned(dim, generator)


MakeAgent = Callable[[int, np.random.Generator, float], Agent]
"""Makes an agent that reads so many features. The number is the scale of the world's utility
(`oat.laboratory.worlds.weight_std`)."""
AGENTS: dict[str, MakeAgent] = {"ideal": Ideal, "ensemble": _learned}
