"""The objective of the ensemble: it learns rewards from pairs, with a prior that fades (SEA,
arXiv:2411.01493; EE4LLM, arXiv:2402.00396).

The loss is the sum of two terms:
* the mean over members m and pairs of - log sigmoid(r_m(chosen) - r_m(rejected)), with r_m the member's
  reward;
* the prior: `prior` * `batch` / labelled, times the mean squared distance of all parameters from their
  initial values. Here labelled is the number of labelled pairs taken so far, so the prior fades as answers
  come in.

The optimiser is that of the sources: Adam at a constant learning rate, with weight decay in the gradient of
every parameter. Its settings are in `explorer.ensemble`.

A ring buffer holds the newest pairs, at most `buffer` of them. While it holds fewer than `batch` pairs, the
ensemble makes no optimiser step. From then on, it makes `steps` optimiser steps in each step of the run. Each
optimiser step learns from `batch` pairs, which are drawn from the buffer without replacement.

Departures from the sources' code:
1. Pairs without a winner are not stored. The sources have a mask of pairs instead, but its shape does not fit
   the loss, so it masks nothing.
2. The ensemble never learns from a pair that it labelled itself.
3. The prior fades with the number of labelled pairs. Recorded pairs, and pairs whose answer was known, count
   too. In the sources the prior fades with the number of queries.
4. Two settings of the sources are left out: a prior that does not fade (`rm_fixed_reg`), and an end of
   learning (`rm_train_budget`).
5. The gradient may be clipped (`max_grad_norm`).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch.nn.functional import logsigmoid

from oat.algorithms.base import Forward, Objective, Outputs, View
from oat.errors import ConfigError, warn
from oat.types import ENSEMBLE, Batch, Feedback, Loss, Plan, Requires

_VERSION = 2
"""Version of the state's format. The first format had no version number. It is from a release that learned
by AdamW and with a prior that faded with the number of queries."""


@dataclass(frozen=True)
class EnsembleConfig:
    members: int = 20
    """Number of networks."""
    hidden: int = 128
    """Width of each network's two hidden layers."""
    activation: Literal["relu", "swish"] = "relu"
    """Activation between the layers."""
    learning_rate: float = 1e-3
    """Constant learning rate of the ensemble's Adam."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Betas of Adam."""
    eps: float = 1e-8
    """Epsilon of Adam, added to the root of the second moment."""
    weight_decay: float = 5e-5
    """Weight decay of all parameters, as a part of their gradient (L2)."""
    max_grad_norm: float | None = None
    """Largest norm of the gradient. A gradient with a larger norm is scaled down to it. None: no clipping."""
    prior: float = 0.5
    """The prior pulls the parameters towards their initial values. Its weight is `prior` times `batch`,
    divided by the number of labelled pairs so far."""
    batch: int = 128
    """Number of pairs in one optimiser step."""
    steps: int = 5
    """Number of optimiser steps in a step of the run."""
    buffer: int = 50_000
    """Largest number of pairs in the buffer. When the buffer is full, a new pair replaces the oldest one."""

    def __post_init__(self) -> None:
        for name in ("members", "hidden", "batch", "steps", "buffer"):
            if getattr(self, name) < 1:
                raise ConfigError(f"explorer.ensemble.{name} is {getattr(self, name)}; it must be at least 1")
        for name in ("learning_rate", "weight_decay", "prior"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(
                    f"explorer.ensemble.{name} is {getattr(self, name)}; it must be at least 0, and finite"
                )
        for name in ("eps", "max_grad_norm"):
            if (value := getattr(self, name)) is not None and not 0 < value < math.inf:
                raise ConfigError(f"explorer.ensemble.{name} is {value}; it must be above 0, and finite")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(
                f"explorer.ensemble.betas is {list(self.betas)}; both must be at least 0, and below 1"
            )
        if self.buffer < self.batch:
            raise ConfigError(
                f"explorer.ensemble.buffer is {self.buffer}, smaller than a batch of {self.batch}; raise it"
            )


class EnsembleLearning(Objective):
    name = "ensemble"
    Config = EnsembleConfig
    requires = Requires(
        feedback="compare", slots=frozenset({"sampler", "ensemble"}), models=frozenset({"ensemble"})
    )
    wants: Mapping[str, set[str]] = {"ensemble": {"rewards", "prior"}}

    def __init__(self, config: EnsembleConfig):
        self.config = config
        self.pairs = torch.zeros(0)
        self.seen = 0  # labelled pairs taken so far

    def plan(self, step: int) -> Plan:
        raise AssertionError("the ensemble learns from what the policy's algorithm asks")

    def prepare(self, feedback: Feedback, forward: Forward, generator: np.random.Generator) -> Batch:
        """Store the feedback's labelled pairs, and draw the batch. Rows 2u (chosen) and 2u + 1 (rejected) are
        pair u; the columns are `features_N` and `labelled_N`."""
        self._remember(feedback)
        size, wanted = len(self.pairs), self.config.batch
        metrics = {"ensemble/pairs": float(size)}
        if size < wanted:
            return Batch((), np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64), metrics=metrics)
        drawn = np.concatenate(
            [generator.choice(size, wanted, replace=False) for _ in range(self.config.steps)]
        )
        features_N = self.pairs[torch.from_numpy(drawn)].flatten(0, 1)
        columns = {"features_N": features_N, "labelled_N": torch.full((len(features_N),), float(self.seen))}
        units = np.arange(len(drawn)).repeat(2)
        return Batch((), units, units, columns, minibatches=self.config.steps, metrics=metrics, shuffle=False)

    def losses(self, outputs: Outputs, view: View) -> dict[str, Loss]:
        fading = self.config.prior * self.config.batch / float(view["labelled_N"][0])
        terms_U = -logsigmoid(self._margin(outputs)).mean(dim=1)
        return {
            "loss/ensemble": Loss(terms_U, per="pair"),
            "loss/prior": Loss(outputs["ensemble"]["prior"], per="step", coef=fading),
        }

    def metrics(self, outputs: Outputs, view: View) -> dict[str, tuple[torch.Tensor, str]]:
        return {"ensemble/accuracy": ((self._margin(outputs).mean(dim=1) > 0).float(), "U")}

    def _margin(self, outputs: Outputs) -> torch.Tensor:
        rewards_NM = outputs["ensemble"]["rewards"]
        return rewards_NM[0::2] - rewards_NM[1::2]

    def _remember(self, feedback: Feedback) -> None:
        """Store the features of both responses of each labelled pair, those of the chosen response first. If
        the store is full, a new pair replaces the oldest pair."""
        for item in feedback.items:
            if item.label is None or item.question.oracle == ENSEMBLE or item.question.features is None:
                continue
            pair = torch.from_numpy(item.question.features[[item.label, 1 - item.label]]).unsqueeze(0)
            if len(self.pairs) < self.config.buffer:
                self.pairs = torch.cat([self.pairs, pair]) if len(self.pairs) else pair
            else:
                self.pairs[self.seen % self.config.buffer] = pair[0]
            self.seen += 1

    @property
    def state(self) -> dict[str, Any]:
        return {"pairs": self.pairs, "seen": self.seen, "version": _VERSION}

    def load_state(self, state: dict[str, Any]) -> None:
        self.pairs, self.seen = state["pairs"].clone(), state["seen"]
        if "version" not in state:
            warn(
                "an earlier version of oat made this checkpoint's ensemble, by AdamW and with a prior "
                "that faded with queries. Now Adam goes on "
                f"with its moments, and the prior fades with labelled pairs, {self.seen} so far; begin a "
                "run of its own if its curve must be of one "
                "kind"
            )
