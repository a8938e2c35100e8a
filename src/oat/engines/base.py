"""The engine's protocol: token ids in, token ids out, from several sets of weights at once."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from oat.types import Completion, Request, Work

if TYPE_CHECKING:
    import torch


class Engine(Protocol):
    """Samples and scores with the weights of named slots: `sampler`, `policy` (for evaluation),
    `reference`.

    Attributes:
        threads: number of threads of the computation; None: no number of its own.
    """

    threads: int | None

    def generate(self, requests: Sequence[Request], slot: str) -> Iterator[Completion]:
        """Yield completions as they finish, in any order. `Completion.index` is the index of the request.

        For a request that `keeps`, the engine may keep the keys and values of its ids and its response until
        a load of the slot, until `release`, or as long as it has memory for them. If a later request has the
        same key, and its ids begin with these, the engine need not compute them again. Kept or not, the
        tokens that it draws are the same, up to rounding of the logits (docs/decisions/024)."""

    def release(self, slot: str, keys: Sequence[int]) -> None:
        """Drop what is kept for requests with these keys. Keys for which nothing is kept have no effect."""

    def logps(self, sequences: Sequence[np.ndarray], slot: str) -> list[np.ndarray]:
        """Return, for each sequence, the raw log-probabilities of all its tokens except the first: (T - 1,)
        float32, nats. They are computed as `generate` computes, with the same weights and the same cached
        keys and values: a proof of new weights may compare them with the learner's (`runtime/probe.py`)."""

    def load(self, slot: str, version: int, tensors: "Mapping[str, torch.Tensor]") -> None:
        """Set the slot's weights, and drop keys and values that were cached under the old weights."""

    def tensors(self, slot: str) -> "Mapping[str, torch.Tensor]":
        """Return the tensors that the slot computes with, by the names under which they were loaded; not
        copies of what was loaded. Only an engine with `Capabilities.readable_weights` is asked."""

    def version(self, slot: str) -> int:
        """Return the version of the slot's weights."""

    def work(self) -> Work:
        """Return the work of `generate` since the first call of this method."""

    def choose_threads(self, rows: int) -> None:
        """If the engine may have threads of its own, measure with `rows` short requests how many are fastest,
        and set `threads` to this number."""
