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
        prompts: prompts a round.
        samples: responses a prompt, by the slot that produces them, for example {"sampler": 8}.
        questions: questions that the step learns from.
    """

    prompts: int
    samples: dict[str, int]
    questions: int


@dataclass(frozen=True)
class Requires:
    """What an objective needs of a run.

    Attributes:
        feedback: the kind of answers. An objective that learns from recorded responses alone has "score", and
            `reads_answers = False`.
        slots: engine slots that it samples from.
        models: models of the learner that it reads or trains.
        ratio_based: its loss has importance ratios, which divide by the probability of sampling, so it needs
            the sampled distribution exactly.
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
        rows: N trajectories, whose trained tokens, in row order, are the K axis; empty if the models read
        features only.
        unit_of_N: (N,) from 0 upward; rows of one unit stay in one forward pass, in their order.
        group_of_N: (N,) from 0 upward.
        columns: by name; the last letter of a name is its axis.
        epochs: passes over the rows.
        minibatches: optimiser steps a pass.
        metrics: numbers about the batch, by metric name.
        shuffle: each pass takes the units in a new order; otherwise in the order of their numbers.
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
        """N."""
        return len(self.unit_of_N)


@dataclass(frozen=True, eq=False)
class Loss:
    """The unreduced terms of one part of a loss; the learner masks, weights and reduces them
    (`learner/reduction.py`).

    Attributes:
        terms: (K,) for token, sequence, sequence_sum, prompt and constant; (U,) for pair; () for step.
        per: the reduction.
        coef: multiplies the reduced value.
        constant: the length, in tokens, that `per="constant"` divides by.
    """

    terms: "torch.Tensor"
    per: Per
    coef: float = 1.0
    constant: float | None = None
