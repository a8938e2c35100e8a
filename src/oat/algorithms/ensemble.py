"""The objective of the ensemble: it learns rewards from pairs, with a prior that fades (SEA,
arXiv:2411.01493; EE4LLM, arXiv:2402.00396).

The loss is the sum of two terms:
* the mean over members m and pairs of - log sigmoid(r_m(chosen) - r_m(rejected)), with r_m the member's
  reward;
* the prior, which pulls all parameters towards their initial values (`EnsembleConfig.prior_form`). Its weight
  is divided by the number of labelled pairs taken so far, so the prior fades as answers come in. With
  `prior_fades: false` (`rm_fixed_reg` in the sources) it is divided by `batch` instead.

The optimiser is that of the sources: Adam at a constant learning rate, with weight decay in the gradient of
every parameter. Its settings are in `explorer.ensemble`.

A ring buffer holds the newest pairs, at most `buffer` of them. The ensemble makes `steps` optimiser steps in
each step of the run, as soon as the buffer has a pair. Each learns from `batch` pairs, or from all if the
buffer has fewer, which are drawn from the buffer without replacement.

Features of the policy change as it learns. So the buffer also keeps the ids of its responses, and the version
of the weights that gave their features. With `explorer.features.refresh_every`, the features of all pairs are
computed again every so many steps, after the policy's update, under the weights that sample next.

Departures from the sources' code:
1. Pairs without a winner are not stored. The sources have a mask of pairs instead, but its shape does not fit
   the loss, so it masks nothing.
2. The ensemble never learns from a pair that it labelled itself.
3. The prior fades with the number of labelled pairs. Recorded pairs, and pairs whose answer was known, count
   too. In the sources the prior fades with the number of queries.
4. The sources make no optimiser step before the buffer has a whole batch.
5. The gradient may be clipped (`max_grad_norm`), and the prior may have the form `map`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from oat.algorithms.base import Forward, Objective, Outputs, View, states_want
from oat.errors import CheckpointError, warn
from oat.explore.pair_buffer import PairBuffer, Sampled
from oat.explore.settings import EnsembleConfig
from oat.lazy import lazily
from oat.types import ENSEMBLE, Batch, Feedback, Item, Loss, Plan, Requires, Segment, Trajectory

if TYPE_CHECKING:
    import torch
else:
    torch = lazily("torch")


__all__ = ["EnsembleConfig", "EnsembleLearning"]

_PAIRS_A_PASS = 16
"""Number of pairs whose features are computed again in one call of the policy."""

_VERSION = 4
"""Version of the state's format. The first format had no version number: it is from a release that learned by
AdamW and with a prior that faded with the number of queries. A run of the second format makes no optimiser
step before its buffer has a whole batch. Up to the third format, its forward passes have the limits of those
of the policy, and its rows no `ensemble/prior_coef`. Runs that began so, go on so."""


class EnsembleLearning(Objective):
    name = "ensemble"
    Config = EnsembleConfig
    requires = Requires(
        feedback="compare", slots=frozenset({"sampler", "ensemble"}), models=frozenset({"ensemble"})
    )
    wants: Mapping[str, set[str]] = {"ensemble": {"rewards", "prior"}}

    def __init__(
        self,
        config: EnsembleConfig,
        features: Mapping[str, Any] | None = None,
        refresh_every: int | None = None,
    ):
        """
        Args:
            features: the identity of the features (`oat.rollout.features.Features`).
            refresh_every: `FeaturesConfig.refresh_every`.
        """
        self.config, self.refresh_every = config, refresh_every
        self.features = dict(features or {})
        self.buffer = PairBuffer(config.buffer)
        self.version = _VERSION

    def plan(self, step: int) -> Plan:
        raise AssertionError("the ensemble learns from what the policy's algorithm asks")

    def prepare(self, feedback: Feedback, forward: Forward, generator: np.random.Generator) -> Batch:
        """Store the feedback's labelled pairs, and draw the batch. Rows 2u (chosen) and 2u + 1 (rejected) are
        pair u; the columns are `features_N` and `labelled_N`."""
        before = self.buffer.seen
        self._remember(feedback)
        if not self.buffer.seen and not self.config.start and _was_labelled_by_ensemble(feedback):
            warn(
                "the ensemble labels pairs, and no pair with a winner has taught it anything yet, so its "
                "labels are noise; set explorer.model_labels.burn_in_pairs, and look at why the oracle's "
                "pairs have no winner (answers/tied_frac, explorer/clash_frac)"
            )
        size = self.buffer.size
        wanted = self.config.batch if self.version < 3 else min(self.config.batch, size)
        metrics = {"ensemble/pairs": float(size), **self._refresh(feedback.step + 1, forward)}
        is_over = self.config.max_pairs is not None and before >= self.config.max_pairs
        if size < wanted or not wanted or is_over:
            return Batch((), np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64), metrics=metrics)
        drawn = np.concatenate(
            [generator.choice(size, wanted, replace=False) for _ in range(self.config.steps)]
        )
        features_N = self.buffer.pairs[torch.from_numpy(drawn)].flatten(0, 1)
        seen = float(self.buffer.seen)
        if self.version >= 4:
            metrics["ensemble/prior_coef"] = self.config.weight_of_prior(seen)
        columns = {"features_N": features_N, "labelled_N": torch.full((len(features_N),), seen)}
        units = np.arange(len(drawn)).repeat(2)
        return Batch(
            (),
            units,
            units,
            columns,
            minibatches=self.config.steps,
            metrics=metrics,
            shuffle=False,
            is_whole=self.version >= 4,
        )

    def losses(self, outputs: Outputs, view: View) -> dict[str, Loss]:
        weight = self.config.weight_of_prior(float(view["labelled_N"][0]))
        terms_U = -torch.nn.functional.logsigmoid(self._margin(outputs)).mean(dim=1)
        return {
            "loss/ensemble": Loss(terms_U, per="pair"),
            "loss/prior": Loss(outputs["ensemble"]["prior"], per="step", coef=weight),
        }

    def metrics(self, outputs: Outputs, view: View) -> dict[str, tuple[torch.Tensor, str]]:
        rewards_NM = outputs["ensemble"]["rewards"]
        return {
            "ensemble/accuracy": ((self._margin(outputs).mean(dim=1) > 0).float(), "U"),
            "ensemble/reward_chosen": (rewards_NM[0::2].mean(dim=1), "U"),
            "ensemble/reward_rejected": (rewards_NM[1::2].mean(dim=1), "U"),
        }

    def _margin(self, outputs: Outputs) -> torch.Tensor:
        rewards_NM = outputs["ensemble"]["rewards"]
        return rewards_NM[0::2] - rewards_NM[1::2]

    def _remember(self, feedback: Feedback) -> None:
        """Store the features of both responses of each labelled pair, those of the chosen response first; and
        the responses, if the policy gave the features."""
        items = [
            item
            for item in feedback.items
            if item.label is not None
            and item.question.oracle != ENSEMBLE
            and item.question.features is not None
        ]
        if not items:
            return
        is_policys = self.features.get("backbone") == "policy"
        pairs = [_pair_of(item) for item in items] if is_policys else []
        self.buffer.add(
            torch.from_numpy(np.stack([_features_of(item) for item in items])),
            [(_sampled(chosen), _sampled(rejected)) for chosen, rejected in pairs],
            [int(chosen.recorded("versions").max()) for chosen, _ in pairs],
        )

    def _refresh(self, version: int, forward: Forward) -> dict[str, float]:
        """Compute features again if this is due, and return the metric of their age. Features of another
        backbone than the policy have none.

        Args:
            version: that of the policy's weights after this step's update.
        """
        if not self.buffer.versions:
            return {}
        if self.refresh_every is not None and version % self.refresh_every == 0:
            places = [*self.buffer.responses]
            for first in range(0, len(places), _PAIRS_A_PASS):
                some = places[first : first + _PAIRS_A_PASS]
                self.buffer.refresh(some, self._features_now(some, forward), version)
        return {"ensemble/feature_age": version - float(np.mean([*self.buffer.versions.values()]))}

    def _features_now(self, places: Sequence[int], forward: Forward) -> torch.Tensor:
        """Return the features of these pairs' responses under the policy's present weights, (P, 2, D)."""
        rows = [_trajectory(sampled) for place in places for sampled in self.buffer.responses[place]]
        want = states_want(self.features["layer"])
        states_KD = forward("policy", rows, {want})[want]
        parts = states_KD.split([row.num_trained for row in rows])
        takes_last = self.features["pooling"] == "last"
        return torch.stack([part[-1] if takes_last else part.mean(dim=0) for part in parts]).unflatten(
            0, (-1, 2)
        )

    @property
    def state(self) -> dict[str, Any]:
        return {**self.buffer.state, "version": self.version, "features": self.features}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore a state.

        Raises:
            CheckpointError: the state's ensemble has learned from other features.
        """
        refuse_other_features(
            state.get("features", self.features), self.features, "this checkpoint's ensemble"
        )
        self.buffer.load_state(state)
        self.version = state.get("version", 2)
        if "version" not in state:
            warn(
                "an earlier version of oat made this checkpoint's ensemble, by AdamW and with a prior that "
                "faded with queries. Now Adam goes on with its moments, and the prior fades with labelled "
                f"pairs, {self.buffer.seen} so far; begin a run of its own if its curve must be of one kind"
            )


def _was_labelled_by_ensemble(feedback: Feedback) -> bool:
    return any(item.question.oracle == ENSEMBLE for item in feedback.items)


def _pair_of(item: Item) -> tuple[Trajectory, Trajectory]:
    """Return the chosen and the rejected response of a labelled pair."""
    assert item.label is not None, "only labelled pairs are stored"
    first, second = (item.group.trajectories[pick] for pick in item.question.picks)
    return (second, first) if item.label else (first, second)


def _features_of(item: Item) -> np.ndarray:
    """Return the features of a labelled pair, (2, D), those of the chosen response first."""
    assert item.question.features is not None, "only pairs with features are stored"
    return item.question.features[::-1] if item.label else item.question.features


def _sampled(response: Trajectory) -> Sampled:
    return Sampled(response.segments[0].ids, response.completion)


def _trajectory(sampled: Sampled) -> Trajectory:
    is_trained = np.ones(len(sampled.response), dtype=bool)
    segments = Segment("context", sampled.prompt), Segment("model", sampled.response, is_trained)
    return Trajectory("policy", segments, "length", "")


def refuse_other_features(
    learned: Mapping[str, Any],
    present: Mapping[str, Any],
    what: str,
    *,
    whose: str = "this run's",
    advice: str = (
        "put explorer.features and the files of its backbone back as they were, or begin a new run"
    ),
) -> None:
    """Refuse an ensemble that has learned from features of another identity.

    Args:
        what: name of the ensemble, for the message.
        whose: says whose features are present, for the message.
        advice: says what to do, for the message.

    Raises:
        CheckpointError: the identities differ.
    """
    for name in sorted({*learned, *present}):
        if learned.get(name) != present.get(name):
            raise CheckpointError(
                f"{what} has learned from features whose {name} is {learned.get(name)!r}, and {whose} is "
                f"{present.get(name)!r}; {advice}"
            )
