"""Learning: the plan of a step, its batch and losses, and the receipt for new weights."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np

from oat.types.questions import Kind
from oat.types.sampling import Trajectory

if TYPE_CHECKING:
    import torch

Per = Literal["token", "sequence", "sequence_sum", "prompt", "constant", "pair", "step"]


@dataclass(frozen=True)
class Plan:
    """The plan of one step.

    Attributes:
        prompts: number of prompts in a round.
        samples: number of responses per prompt, by the slot that produces them, for example {"sampler": 8}.
        questions: number of questions that the step learns from.
    """

    prompts: int
    samples: dict[str, int]
    questions: int


@dataclass(frozen=True)
class Requires:
    """The needs of an objective, which the run has to meet.

    Attributes:
        feedback: the kind of its questions. An objective that reads no answers has "score", and
            `reads_answers = False`.
        slots: the slots that the run needs for it, among them every slot that it samples from.
        models: models of the learner that it reads or trains.
        ratio_based: True if its loss has importance ratios. They divide by the probability with which a token
            was sampled, so the run must know the sampled distribution exactly.
    """

    feedback: Kind
    slots: frozenset[str] = frozenset({"sampler"})
    models: frozenset[str] = frozenset({"policy"})
    ratio_based: bool = False


@dataclass(frozen=True)
class Receipt:
    """The weights that an engine holds after a load, read back from the tensors it generates with.

    Attributes:
        version: the version that the slot now has.
        checksums: CRC-32 of the bytes of every tensor, by name.
    """

    slot: str
    version: int
    checksums: dict[str, int]


@dataclass(frozen=True, eq=False)
class Batch:
    """The rows of one step and their columns, as `prepare` hands them to the learner.

    Attributes:
        rows: N trajectories. Their trained tokens, in row order, are the K axis. Empty if the models read
            only features.
        unit_of_N: (N,) unit of each row, numbered from 0; rows of one unit stay in one forward pass, in their
            order.
        group_of_N: (N,) group of each row, numbered from 0.
        columns: tensors by name; the last letter of a name is the tensor's first axis.
        epochs: number of passes over the rows.
        minibatches: number of optimiser steps per pass.
        metrics: numbers about the batch, by metric name.
        shuffle: True if each pass of several mini-batches takes the units in a new random order; otherwise
            they are taken in the order of their numbers.
    """

    rows: tuple[Trajectory, ...]
    unit_of_N: np.ndarray
    group_of_N: np.ndarray
    columns: dict[str, "torch.Tensor"] = field(default_factory=dict)
    epochs: int = 1
    minibatches: int = 1
    metrics: dict[str, float] = field(default_factory=dict)
    shuffle: bool = True

    @property
    def size(self) -> int:
        """The number of rows, N."""
        return len(self.unit_of_N)


@dataclass(frozen=True, eq=False)
class Loss:
    """The unreduced terms of one part of a loss; the learner masks, weights and reduces them
    (`learner/reduction.py`).

    Attributes:
        terms: (K,) for token, sequence, sequence_sum, prompt and constant; (U,) for pair; () for step.
        per: the name of the reduction.
        coef: multiplies the reduced value.
        constant: with `per="constant"`, the number of tokens that the denominator counts for each row.
    """

    terms: "torch.Tensor"
    per: Per
    coef: float = 1.0
    constant: float | None = None
