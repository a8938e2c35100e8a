"""Values of learning: the plan of a step, its batch and losses, and the receipt for loaded weights."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np

from oat.types.questions import Kind
from oat.types.sampling import Trajectory

if TYPE_CHECKING:
    import torch

Per = Literal["token", "sequence", "sequence_sum", "prompt", "constant", "pair", "step"]


@dataclass(frozen=True)
class Branching:
    """How the responses of a group are sampled again from within (branches; `Trajectory.branched_at`).

    A response is cut into steps, each of which ends with `delimiter`. The beginning of each step but the
    first is a state, from which branches are sampled. A state that several responses of a group share is
    sampled from once.

    Attributes:
        branches: number of branches from each state.
        delimiter: the string at whose end a step ends.
        most_steps: largest number of steps of a response; the last one has all that is left.
    """

    branches: int
    delimiter: str
    most_steps: int


@dataclass(frozen=True)
class Plan:
    """The plan of one step.

    Attributes:
        prompts: number of prompts in a round.
        samples: number of responses per prompt, by the slot that samples them, such as {"sampler": 8}.
        questions: number of questions that the step learns from.
        branching: how branches are added to each group; None: there are none.
    """

    prompts: int
    samples: dict[str, int]
    questions: int
    branching: Branching | None = None

    @property
    def responses(self) -> int:
        """Number of responses per prompt, without branches."""
        return sum(self.samples.values())

    @property
    def most_candidates(self) -> int:
        """Largest number of trajectories of a group: responses and branches."""
        b = self.branching
        return self.responses * (1 if b is None else 1 + b.branches * (b.most_steps - 1))


@dataclass(frozen=True)
class Requires:
    """The needs of an objective. The run is refused if it does not meet them.

    Attributes:
        feedback: kind of the questions. An objective that reads no answers has "score", and
            `reads_answers = False`.
        slots: engine slots that the objective needs, including those that it samples from.
        models: the learner's models that the objective reads or trains.
        ratio_based: True if the loss has importance ratios. They are ratios of probabilities under the
            distribution that was sampled from, so the run must know this distribution exactly.
    """

    feedback: Kind
    slots: frozenset[str] = frozenset({"sampler"})
    models: frozenset[str] = frozenset({"policy"})
    ratio_based: bool = False


@dataclass(frozen=True, eq=False)
class Probe:
    """A sequence of tokens, and the log-probabilities that it must have after a transfer of weights.

    Attributes:
        ids: (T,) int32.
        logps: (T - 1,) float32, the learner's raw log-probabilities of all tokens except the first, nats.
        tolerance: largest mean absolute difference, nats.
    """

    ids: np.ndarray
    logps: np.ndarray
    tolerance: float


@dataclass(frozen=True)
class Shipment:
    """What a transfer of weights to a slot will bring, and how the holder proves that it computes with it.

    Attributes:
        names: the names of all tensors.
        proof: "all": the receipt has checksums of all bytes that the holder computes with. "sample": it has
            checksums of a sample of them. A probe: it has checksums of what arrived, and the holder compares
            its log-probabilities with those of the probe.
    """

    slot: str
    version: int
    names: tuple[str, ...]
    proof: Literal["all", "sample"] | Probe = "all"


@dataclass(frozen=True, eq=False)
class Bucket:
    """Some of the tensors of a transfer.

    Attributes:
        tensors: by name.
        sums: checksum of each tensor at the sender, by name (`runtime/transfer.py`).
    """

    slot: str
    version: int
    tensors: "dict[str, torch.Tensor]"
    sums: dict[str, int]


@dataclass(frozen=True)
class Receipt:
    """Version and checksums of the weights in a holder's slot after a load.

    Attributes:
        version: the version that the slot now has.
        checksums: by name of the tensor; `Shipment.proof` says of what.
    """

    slot: str
    version: int
    checksums: dict[str, int]


@dataclass(frozen=True, eq=False)
class Batch:
    """The rows of one step and their columns. `prepare` returns them to the learner.

    Attributes:
        rows: N trajectories; the K axis has their trained tokens, in row order. Empty if the models read only
            features.
        unit_of_N: (N,) unit of each row, numbered from 0. Rows of one unit stay in one forward pass, in their
            order.
        group_of_N: (N,) group of each row, numbered from 0.
        columns: tensors by name; the last letter of a name is the tensor's first axis.
        epochs: number of passes over the rows.
        minibatches: number of optimiser steps per pass.
        metrics: numbers about the batch, by metric name.
        shuffle: True: each pass of several mini-batches takes the units in a new random order. False: it
            takes them in the order of their numbers.
        is_whole: True: a mini-batch is one forward pass, whatever the limits of a pass are. For batches of
            features only, which take little memory.
    """

    rows: tuple[Trajectory, ...]
    unit_of_N: np.ndarray
    group_of_N: np.ndarray
    columns: dict[str, "torch.Tensor"] = field(default_factory=dict)
    epochs: int = 1
    minibatches: int = 1
    metrics: dict[str, float] = field(default_factory=dict)
    shuffle: bool = True
    is_whole: bool = False

    @property
    def size(self) -> int:
        """Number of rows, N."""
        return len(self.unit_of_N)


@dataclass(frozen=True, eq=False)
class Loss:
    """The unreduced terms of one part of a loss. The learner masks, weights and reduces them
    (`learner/reduction.py`).

    Attributes:
        terms: () if `per` is step, (U,) if it is pair, otherwise (K,).
        per: name of the reduction.
        coef: factor of the reduced value.
        constant: number of tokens that the denominator counts for each row; only with `per="constant"`.
        mask: name of the column, (K,), that masks the terms and enters the denominators. A number other than
            0 and 1 says how many terms a token stands for: its term then is their mean.
    """

    terms: "torch.Tensor"
    per: Per
    coef: float = 1.0
    constant: float | None = None
    mask: str = "mask_K"
