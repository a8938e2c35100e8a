"""Supervised fine-tuning: the loss is the mean negative log-probability of given responses.

The rows are the responses of a step:
* Recorded demonstrations, of one turn or of a conversation, give plain supervised learning. Each trajectory
  marks the tokens that are trained.
* Samples of the policy with a `threshold` give rejection-sampling fine-tuning (ReST, arXiv:2308.08998; RFT,
  arXiv:2308.01825). Only responses whose score reaches the threshold are learned.

Departures from the papers:
1. If several rows of a step have the same prompt and response, token for token, the step learns one of them
   and counts the others. With `duplicates: run`, a step also leaves out rows that earlier steps learned, as
   in RFT. It recognises these rows by a hash of 64 bits.
2. The threshold is any score, and does not change within a run. RFT accepts correct responses. ReST raises
   its threshold from one improvement step to the next; here, a fork can have a higher threshold.
3. Without `learner.buffer`, each step learns only from its own samples, in `epochs` passes.
   `learner.sync_every` decides which weights draw the samples: the newest, those of some steps ago (ReST), or
   those of the start (RFT).

Not handled: a limit on the responses of one prompt (`reduction: prompt` gives every prompt the same weight).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from oat.algorithms.base import Forward, Objective, Outputs, View
from oat.algorithms.rows import scored_rows
from oat.errors import ConfigError
from oat.lazy import lazily
from oat.types import Batch, Feedback, Item, Loss, Plan, Requires, Trajectory
from oat.types.part import Check, RunFacts

if TYPE_CHECKING:
    import torch
else:
    torch = lazily("torch")


@dataclass(frozen=True)
class SFTConfig:
    prompts: int = 64
    """Prompts per step."""
    samples: int = 1
    """Responses per prompt."""
    threshold: float | None = None
    """Smallest score of a response that is learned. None: every response is learned and no score is read.
    Only oracles that cost nothing (`recorded`, `environment`) are then allowed."""
    reduction: Literal["sequence", "token", "prompt"] = "sequence"
    """Weights in the mean over tokens. `sequence`: every response has the same weight. `token`: every token
    of the step has the same weight. `prompt`: every prompt has the same weight."""
    duplicates: Literal["step", "run"] = "step"
    """Scope in which an accepted response to a prompt is learned only once: each step (`step`), or the
    complete run (`run`). `run` needs a threshold."""
    epochs: int = 1
    """Passes over a step's responses."""
    minibatches: int = 1
    """Optimiser steps per pass."""

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise ConfigError(f"algorithm.samples is {self.samples}; it must be at least 1")
        if self.threshold is not None and not math.isfinite(self.threshold):
            raise ConfigError(
                f"algorithm.threshold is {self.threshold}; give the least score of a response that is "
                "learned, or leave it out"
            )
        if self.duplicates == "run" and self.threshold is None:
            raise ConfigError(
                "algorithm.duplicates is run, and there is no algorithm.threshold: demonstrations are to "
                "come round with every pass over the data; "
                "remove it, or set the threshold"
            )


class SFT(Objective):
    name = "sft"
    Config = SFTConfig
    requires = Requires(feedback="score")
    wants: Mapping[str, set[str]] = {"policy": {"raw"}}
    reuses = True
    setting_for: Mapping[str, str] = {"answers": "threshold"}

    def __init__(self, config: SFTConfig):
        self.config = config
        self.reads_answers = self.judges_singly = config.threshold is not None
        self.learned: dict[int, None] = {}

    @staticmethod
    def checks(config: SFTConfig, run: RunFacts) -> Iterator[Check]:
        yield Check(
            "learner.buffer",
            run.has_buffer and config.duplicates == "run",
            "algorithm.duplicates is run, so nothing is learned twice, and a buffer would bring nothing; "
            "remove one of them",
        )

    def is_usable(self, item: Item) -> bool:
        """Return True if one of the responses reaches the threshold."""
        scored = scored_rows(Feedback(0, (item,), queries=0))
        return bool(self._accepted(scored.rewards_N, scored.valid_N).any())

    def plan(self, step: int) -> Plan:
        return Plan(self.config.prompts, {"sampler": self.config.samples}, self.config.prompts)

    def prepare(self, feedback: Feedback, forward: Forward, generator: np.random.Generator) -> Batch:
        scored = scored_rows(feedback)
        rows, group_of_N = scored.rows, scored.group_of_N
        accepted_N = self._accepted(scored.rewards_N, scored.valid_N)
        accepted = accepted_N.nonzero().flatten().tolist()
        kept = self._unlearned(rows, first_of_equals(rows, accepted))
        is_new_N = group_of_N >= len(feedback.older)
        new_N = accepted_N & is_new_N
        metrics = {
            "sft/accepted_frac": int(new_N.sum()) / max(1, int(is_new_N.sum())),
            "sft/solved_frac": len(group_of_N[new_N].unique()) / max(1, len(feedback.items)),
            "sft/duplicates": float(sum(bool(rows[number].trained.any()) for number in accepted) - len(kept)),
            "rows/trained": float(len(kept)),
        }
        units = np.arange(len(kept))
        chosen = tuple(rows[number] for number in kept)
        groups = group_of_N[kept].unique(return_inverse=True)[1].numpy()
        return Batch(
            chosen,
            units,
            groups,
            epochs=self.config.epochs,
            minibatches=self.config.minibatches,
            metrics=metrics,
        )

    def losses(self, outputs: Outputs, view: View) -> dict[str, Loss]:
        return {"loss/sft": Loss(-outputs["policy"]["raw"], per=self.config.reduction)}

    def why_no_rows(self, rows: Sequence[Mapping[str, float]]) -> str | None:
        accepted = [row["sft/accepted_frac"] for row in rows if "sft/accepted_frac" in row]
        if any(accepted):
            return "every accepted response had been learned before (algorithm.duplicates), or was empty"
        return f"no response reached algorithm.threshold, {self.config.threshold}" if accepted else None

    @property
    def state(self) -> dict[str, Any]:
        """With `duplicates: run`, the hashes of all learned responses; otherwise empty. After a roll back,
        responses that were learned after the checkpoint no longer count as learned."""
        return (
            {"learned": torch.tensor(list(self.learned), dtype=torch.int64)}
            if self.config.duplicates == "run"
            else {}
        )

    def load_state(self, state: dict[str, Any]) -> None:
        self.learned = dict.fromkeys(state["learned"].tolist()) if "learned" in state else {}

    def _accepted(self, rewards_N: torch.Tensor, valid_N: torch.Tensor) -> torch.Tensor:
        threshold = self.config.threshold
        # a missing score is NaN, and NaN >= threshold is False
        return torch.ones_like(valid_N) if threshold is None else rewards_N >= threshold

    def _unlearned(self, rows: Sequence[Trajectory], numbers: Sequence[int]) -> list[int]:
        """Return those of `numbers` (indices into `rows`) whose rows no step has learned before, and count
        these rows as learned. With `duplicates: step`, return all `numbers`."""
        if self.config.duplicates == "step":
            return list(numbers)
        marks = {number: _mark(rows[number]) for number in numbers}
        new = [number for number in numbers if marks[number] not in self.learned]
        self.learned |= dict.fromkeys(marks[number] for number in new)
        return new


def first_of_equals(rows: Sequence[Trajectory], numbers: Iterable[int]) -> list[int]:
    """Return those of `numbers` (indices into `rows`) whose row has a trained token, ascending.

    Of several equal rows only the first is returned. Two rows are equal if they have the same ids, and the
    same tokens are trained.
    """
    first = {_told(rows[number]): number for number in reversed(list(numbers)) if rows[number].trained.any()}
    return sorted(first.values())


def _told(row: Trajectory) -> tuple[bytes, bytes]:
    """Return the identity of a row: the ids of prompt and response, and for each id whether it is trained."""
    return row.ids.tobytes(), row.trained.tobytes()


def _mark(row: Trajectory) -> int:
    """Return a 64-bit hash of a row's identity. Among a million different rows, the probability that two
    have the same hash is 3e-8."""
    ids, trained = _told(row)
    return int.from_bytes(hashlib.blake2b(ids + trained, digest_size=8).digest(), "little", signed=True)
