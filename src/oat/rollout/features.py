"""Features of responses: the hidden states of a backbone, from which an ensemble computes rewards
(`explorer.features`).

There are four kinds of backbones:

* `SecondPass`: a causal model of the run, the reference. A pass over prompt and response; a prompt that
  responses share is computed once.
* `FromSampling`: the policy. The engine keeps the hidden states while it samples, so there is no pass.
* `OwnBackbone`: a causal model or an encoder that is loaded for the features alone. It reads the texts of
  prompt and response in its own tokens (`oat.rollout.backbones`).
* `PairRMFeatures`: a PairRM (LLM-Blender, arXiv:2306.02561) that is loaded for the features alone. It reads
  prompt and response behind two markers (`oat.rollout.backbones`). The feature is the two markers' hidden
  states, one after the other.

With `pooling: mean`, a causal model's feature is the mean of the hidden states from which the response's
tokens are predicted: those of the last token of the prompt and of all tokens of the response but the last. So
`FromSampling` and `SecondPass` with equal weights give equal features. With `pooling: last`, `FromSampling`
has the state from which the last token was drawn, and other causal models have the state at the last token;
an encoder has the state at its first token.

Departures from the sources (SEA and EE4LLM, which read the last token): the mean, and layers other than the
last. On the story model the mean predicts rewards better (docs/exploration.md).
"""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from oat.engines.shapes import PASS_TOKENS
from oat.models.causal_lm import CausalLM, Layer
from oat.types import Group, Trajectory


class Features(Protocol):
    """A backbone of features.

    Attributes:
        width: number of features of a response, D.
        identity: the facts that decide what the features are, as plain data. An ensemble that learned on
            features of another identity is refused.
    """

    width: int
    identity: dict[str, Any]

    def of(self, groups: Sequence[Group]) -> list[np.ndarray]:
        """Return the features of each group's responses, (G, D) float32."""


class SecondPass:
    """Features of a causal model of the run. See the module's docstring.

    Args:
        weights: a checksum of the model's weights, for `identity`.
        is_policy: True: with `pooling="last"`, the state from which the last token was drawn, as
            `FromSampling` has it.
        is_former: True: no prompt is shared, as in runs that began before prompts were.
    """

    def __init__(
        self,
        lm: CausalLM,
        layer: Layer,
        pooling: str,
        *,
        name: str,
        weights: int,
        is_policy: bool = False,
        is_former: bool = False,
    ):
        self.lm, self.layer, self.pooling = lm, layer, pooling
        self.is_policy, self.is_former = is_policy, is_former
        self.width = lm.width_of(layer)
        self.identity = {
            "backbone": name,
            "layer": layer,
            "pooling": pooling,
            "width": self.width,
            "weights": weights,
        }

    @torch.no_grad()
    def of(self, groups: Sequence[Group]) -> list[np.ndarray]:
        rows = [trajectory for group in groups for trajectory in group.trajectories]
        found = [self._features([rows[number] for number in some]) for some in _passes(rows)]
        return by_group(torch.cat(found).numpy(), groups)

    def _features(self, rows: Sequence[Trajectory]) -> Tensor:
        prefixes = (
            None
            if self.is_former
            else [len(row.segments[0].ids) if len(row.segments) > 1 else 0 for row in rows]
        )
        hidden_TD, places = self.lm.hidden_of([row.ids for row in rows], prefixes, also=self.layer)
        states_TD = self.lm.features(hidden_TD, self.layer)
        return torch.stack(
            [
                pooled(states_TD, read_at(row, self.pooling, place, is_policy=self.is_policy))
                for row, place in zip(rows, places, strict=True)
            ]
        ).cpu()


class FromSampling:
    """Features that the engine kept while it sampled (`Trajectory.features`)."""

    def __init__(self, lm: CausalLM, layer: Layer, pooling: str):
        self.width = lm.width_of(layer)
        self.identity = {"backbone": "policy", "layer": layer, "pooling": pooling, "width": self.width}

    def of(self, groups: Sequence[Group]) -> list[np.ndarray]:
        return [np.stack([self._of(trajectory) for trajectory in group.trajectories]) for group in groups]

    def _of(self, trajectory: Trajectory) -> np.ndarray:
        if trajectory.num_trained == 0:  # no room for a token; such a response is no candidate
            return np.zeros(self.width, dtype=np.float32)
        assert trajectory.features is not None, "assemble/engine.py makes an engine that keeps features"
        return trajectory.features


def read_at(row: Trajectory, pooling: str, places: np.ndarray, *, is_policy: bool = False) -> np.ndarray:
    """Return the indices of the hidden states that make a feature.

    Args:
        places: (T,) for each token of the row, the index of its hidden state.
        is_policy: as in `SecondPass`.
    """
    read = places[np.flatnonzero(row.trained) - 1]
    if pooling == "last" and is_policy:
        return read[-1:] if len(read) else places[-1:]
    return read if len(read) and pooling == "mean" else places[-1:]


def pooled(states_TD: Tensor, places: np.ndarray) -> Tensor:
    """Return the mean of the hidden states at these places, (D,) float32."""
    return states_TD[torch.from_numpy(places).to(states_TD.device)].float().mean(dim=0)


def by_group(features_ND: np.ndarray, groups: Sequence[Group]) -> list[np.ndarray]:
    """Divide the features of all responses among their groups."""
    sizes = [len(group.trajectories) for group in groups]
    return np.split(features_ND, np.cumsum(sizes)[:-1])


def _passes(rows: Sequence[Trajectory]) -> Iterator[list[int]]:
    """Yield the indices of the rows of each pass. A pass has at most `PASS_TOKENS` tokens, where a prompt
    that follows itself counts once; a longer row is a pass of its own."""
    some: list[int] = []
    total = 0
    prompt = b""
    for number, row in enumerate(rows):
        first = row.segments[0].ids
        is_shared = some and first.tobytes() == prompt
        size = len(row.ids) - (len(first) if is_shared else 0)
        if some and total + size > PASS_TOKENS:
            yield some
            some, total, size = [], 0, len(row.ids)
        some.append(number)
        total += size
        prompt = first.tobytes()
    if some:
        yield some
