"""Direct preference optimisation, online.

Two responses a prompt are sampled, an oracle says which is better, and the policy's log-ratio margin is pushed towards that answer:
DPO (arXiv:2305.18290, Eq. 7), with label smoothing (cDPO, E. Mitchell's note).

Departures:
1. A pair without a winner (equal texts, equal rewards, abstention, failure) is left out and counted; it is never "the second wins".
2. The loss is the mean over the pairs that remain, over the whole optimiser step.
3. Log-probabilities are raw and summed over the tokens that were really sampled, the end-of-text token among them if it was sampled.

Not handled: more than one pair a group.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from oat.algorithms.base import Forward, Objective, Outputs, View, answer_metrics, response_metrics, row_index
from oat.errors import ConfigError
from oat.functional.preference import dpo_loss, dpo_margin
from oat.functional.segments import segment_sum
from oat.types import Batch, Feedback, Item, Loss, Plan, Requires, Trajectory


@dataclass(frozen=True)
class DPOConfig:
    prompts: int
    """Prompts a step."""
    samples: int = 2
    """Responses a prompt; more than two need an explorer."""
    beta: float = 0.1
    """Strength of the tie to the reference."""
    label_smoothing: float = 0.0
    """Probability that a label is wrong, in [0, 0.5)."""
    epochs: int = 1
    """Passes over a step's pairs."""
    minibatches: int = 1
    """Optimiser steps a pass."""

    def __post_init__(self) -> None:
        if not 0 <= self.label_smoothing < 0.5:
            raise ConfigError(f"algorithm.label_smoothing is {self.label_smoothing}; it is a probability below one half")
        if not self.beta > 0:
            raise ConfigError(f"algorithm.beta is {self.beta}; it must be positive")
        if self.samples < 2:
            raise ConfigError(f"algorithm.samples is {self.samples}; a pair needs at least 2")


class DPO(Objective):
    name = "dpo"
    Config = DPOConfig
    requires = Requires(feedback="compare", models=frozenset({"policy", "reference"}))
    wants: Mapping[str, set[str]] = {"policy": {"raw"}}

    def __init__(self, config: DPOConfig):
        self.config = config

    def plan(self, step: int) -> Plan:
        return Plan(self.config.prompts, {"sampler": self.config.samples}, self.config.prompts)

    def prepare(self, feedback: Feedback, forward: Forward, generator: np.random.Generator) -> Batch:
        return pair_batch(feedback, forward, epochs=self.config.epochs, minibatches=self.config.minibatches)

    def losses(self, outputs: Outputs, view: View) -> dict[str, Loss]:
        margin_U = self._margin(outputs, view)
        terms_U = dpo_loss(margin_U, beta=self.config.beta, label_smoothing=self.config.label_smoothing)
        return {"loss/preference": Loss(terms_U, per="pair")}

    def metrics(self, outputs: Outputs, view: View) -> dict[str, tuple[torch.Tensor, str]]:
        margin_U, logps_N = self._margin(outputs, view), view.row_sum(outputs["policy"]["raw"])
        return {
            "pairs/margin": (self.config.beta * margin_U, "U"),
            "pairs/accuracy": ((margin_U > 0).float(), "U"),
            "logps/chosen": (logps_N[0::2], "U"),
            "logps/rejected": (logps_N[1::2], "U"),
        }

    def _margin(self, outputs: Outputs, view: View) -> torch.Tensor:
        policy_N, reference_N = view.row_sum(outputs["policy"]["raw"]), view["reference_logps_N"]
        return dpo_margin(policy_N[0::2], policy_N[1::2], reference_N[0::2], reference_N[1::2])


def pair_batch(feedback: Feedback, forward: Forward, *, epochs: int = 1, minibatches: int = 1, keep_ties: bool = False) -> Batch:
    """Pairs as a batch: rows 2u (chosen) and 2u + 1 (rejected) are unit u; column `reference_logps_N` holds summed raw log-probabilities
    under the reference, nats.

    Args:
        keep_ties: keep pairs without a winner, in the order they were asked, for losses that need no winner; column `mask_U` takes them out
            of the losses of pairs. Otherwise they are left out.
    """
    items = [item for item in feedback.items if keep_ties or item.label is not None]
    rows = tuple(row for item in items for row in winner_first(item))
    metrics = {**answer_metrics(feedback), **response_metrics(feedback), "rows/trained": float(len(rows))}
    columns = {"mask_U": torch.tensor([float(item.label is not None) for item in items])} if keep_ties else {}
    if rows:
        reference_K = forward("reference", rows, {"raw"})["raw"]
        columns["reference_logps_N"] = segment_sum(reference_K, row_index(rows), len(rows))
    units = np.arange(len(items)).repeat(2)
    return Batch(rows, units, units, columns, epochs=epochs, minibatches=minibatches, metrics=metrics)


def winner_first(item: Item) -> tuple[Trajectory, Trajectory]:
    """The chosen and the rejected trajectory of a compared pair; without a winner, the first and the second."""
    first, second = (item.group.trajectories[pick] for pick in item.question.picks)
    return (second, first) if item.label == 1 else (first, second)
