"""The objective's protocol, and the form its data take in one forward pass: a `View`.

The last letter of a column's name is its axis: `advantages_N` has one value a row, `old_logps_K` one a
trained token, `mask_U` one a unit. Whoever cuts a batch cuts every column by its axis. Four names are read by
the reduction as well: `mask_K` and `mask_U` (1 counts, 0 does not; they decide every denominator), `weight_N`
and `weight_U` (multiply numerators only). A missing one is all ones.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from oat.errors import ContractError, shown
from oat.functional.segments import segment_mean, segment_sum
from oat.types import Batch, Feedback, Item, Loss, Plan, Requires, Trajectory

Outputs = Mapping[str, Mapping[str, torch.Tensor]]
"""By model, then by what was wanted of it: {"policy": {"sampled": (K,), "entropy": (K,)}, "critic": {"value":
(K,)}}."""


@dataclass(frozen=True, eq=False)
class View:
    """The index of the rows in one forward pass; indices are local to it.

    Attributes:
        row_of_K: (K,) row of each trained token.
        unit_of_N, group_of_N: (N,) unit and group of each row.
        columns: the batch's columns, cut to these rows.
    """

    row_of_K: torch.Tensor
    unit_of_N: torch.Tensor
    group_of_N: torch.Tensor
    num_rows: int
    num_units: int
    num_groups: int
    columns: Mapping[str, torch.Tensor]

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.columns[name]

    def row_sum(self, values_K: torch.Tensor) -> torch.Tensor:
        """(N,) sums over the trained tokens of each row."""
        return segment_sum(values_K, self.row_of_K, self.num_rows)

    def row_mean(self, values_K: torch.Tensor) -> torch.Tensor:
        """(N,) means over the trained tokens of each row; 0 for a row without one."""
        return segment_mean(values_K, self.row_of_K, self.num_rows)


OF_RESPONSES = frozenset({"response/length", "response/truncated_frac"})
"""What alarms watch of `step_metrics`, where the policy responds."""


class Forward(Protocol):
    def __call__(self, model: str, rows: Sequence[Trajectory], wants: set[str]) -> dict[str, torch.Tensor]:
        """What is wanted of a model for the trained tokens of these rows, (K,) each, without gradient."""


class Objective(Protocol):
    """What is learned, and from which feedback. `prepare` and `losses` are its mathematics; everything around
    them is the learner's.

    An algorithm is a subclass with a dataclass `Config` (its settings, each with a docstring) and
    `__init__(config)`.

    `prepare`, with what it keeps in `state`, may run in another process than `losses` and `metrics`. So these
    two read their arguments and the configuration, nothing that `prepare` left in the objective; what it
    found and they need is a column of the batch.
    """

    name: str
    requires: Requires
    wants: Mapping[str, set[str]]
    """What `losses` reads of each trained model: of a language model "raw", "sampled", "entropy"; of a critic
    "value"."""
    recorded_is_old: bool = False
    """Whether log-probabilities recorded under the policy's own version are its old ones, since engine and
    learner compute in the same precision; `build/resolve.py` knows and says so."""
    watched: frozenset[str] = OF_RESPONSES
    """Of the metrics of a step, those that `alarms` may watch (docs/alarms.md)."""
    reuses: bool = False
    """Whether `prepare` also learns from `Feedback.older`: its loss is as sound on what older weights sampled
    (`learner.buffer`)."""
    reads_answers: bool = True
    """Whether `prepare` learns anything from the answers; where it does not, an oracle that has to be asked
    is refused."""
    numbers: Mapping[str, str] = {}
    """Columns of the data that `prepare` reads as numbers, each with the setting that names it; a record
    without one is malformed."""

    def plan(self, step: int) -> Plan: ...

    def prepare(self, feedback: Feedback, forward: Forward, generator: np.random.Generator) -> Batch:
        """Advantages, pairs, masks and weights as columns. A batch without rows is counted and skipped. Its
        metrics go over those of the same name in `step_metrics`, which every step has."""

    def losses(self, outputs: Outputs, view: View) -> dict[str, Loss]:
        """The parts of the loss by metric name, your own under `user/`; they are summed into one scalar."""

    def metrics(self, outputs: Outputs, view: View) -> dict[str, tuple[torch.Tensor, str]]:
        """Detached values to report, by metric name, each with how to join it over the step: a mean over "K",
        "N" or "U", or "max", "min"."""
        return {}

    @property
    def state(self) -> dict[str, Any]:
        """What it must remember across steps, tensors and JSON values; loaded back by `load_state`."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        assert not state, f"{self.name} saved a state and must load it"


def row_index(rows: Sequence[Trajectory]) -> torch.Tensor:
    """(K,) the row of each trained token."""
    counts = torch.tensor([int(row.trained.sum()) for row in rows], dtype=torch.long)
    return torch.arange(len(rows)).repeat_interleave(counts)


def step_metrics(feedback: Feedback) -> dict[str, float]:
    """What every step reports, whatever learns from it: of its own questions answers, queries, responses and
    scores, and no older ones."""
    return {**answer_metrics(feedback), **response_metrics(feedback), **score_metrics(feedback)}


def answer_metrics(feedback: Feedback) -> dict[str, float]:
    """Shares of tied, abstained, failed and unpaid questions, answers that came too late, and the queries,
    and the money, so far."""
    marks = [{"tie"} if is_even(item) else set(item.answer.marks) for item in feedback.items]
    share = {
        mark: sum(mark in m for m in marks) / max(1, len(marks))
        for mark in ("tie", "abstain", "failed", "unpaid")
    }
    return {
        "answers/tied_frac": share["tie"],
        "answers/abstained_frac": share["abstain"],
        "answers/failed_frac": share["failed"],
        "answers/unpaid_frac": share["unpaid"],
        "answers/expired": float(feedback.expired),
        "oracle/queries": float(feedback.queries),
        **({"oracle/cost": feedback.cost} if feedback.cost else {}),
    }


def is_even(item: Item) -> bool:
    """Whether an oracle has judged a pair and found no winner: its mark says so, or its probability is one
    half."""
    return item.question.kind == "compare" and item.label is None and item.answer.marks[0] in ("tie", "ok")


def response_metrics(feedback: Feedback) -> dict[str, float]:
    """Length, tokens and truncation of the step's responses, and the age of the policy's own tokens in
    versions."""
    trajectories = [trajectory for item in feedback.items for trajectory in item.group.trajectories]
    if not trajectories:
        return {}
    lengths = [int(trajectory.trained.sum()) for trajectory in trajectories]
    ours = [trajectory.recorded("versions") for trajectory in trajectories if trajectory.slot == "sampler"]
    versions = np.concatenate(ours) if ours else np.zeros(0)
    return {
        "response/length": float(np.mean(lengths)),
        "response/tokens": float(np.sum(lengths)),
        "response/truncated_frac": float(
            np.mean([trajectory.finish_reason == "length" for trajectory in trajectories])
        ),
        "lag/versions": float(np.mean(feedback.step - versions)) if len(versions) else 0.0,
    }


def score_metrics(feedback: Feedback) -> dict[str, float]:
    """`reward_metrics` of the step's scores; of comparisons those that they were made of, also where only one
    of the two has one."""
    scores: list[list[float]] = []
    for item in feedback.items:
        if item.question.kind == "score":
            scores.append(
                [
                    value if mark == "ok" else math.nan
                    for value, mark in zip(item.answer.values, item.answer.marks, strict=True)
                ]
            )
        elif item.answer.scores:
            scores.append([math.nan if score is None else score for score in item.answer.scores])
    scores_N = torch.tensor([score for own in scores for score in own], dtype=torch.float32)
    group_of_N = torch.tensor([number for number, own in enumerate(scores) for _ in own], dtype=torch.long)
    return reward_metrics(scores_N, group_of_N, ~scores_N.isnan())


def reward_metrics(
    rewards_N: torch.Tensor, group_of_N: torch.Tensor, valid_N: torch.Tensor
) -> dict[str, float]:
    """Mean score, spread within groups, and the share of groups without spread; nothing without a score.

    Args:
        rewards_N: (N,) scores.
        group_of_N: (N,) the group of each.
        valid_N: (N,) bool, whether there is a score.
    """
    groups = [rewards_N[(group_of_N == g) & valid_N] for g in group_of_N.unique()]
    spreads = [float(group.std()) if len(group) > 1 else 0.0 for group in groups]
    if not valid_N.any():
        return {}
    return {
        "reward/mean": float(rewards_N[valid_N].mean()),
        "reward/std_within": float(np.mean(spreads)),
        "reward/zero_spread_frac": float(np.mean([spread < 1e-8 for spread in spreads])),
    }


def prepared(
    objective: Objective, feedback: Feedback, forward: Forward, generator: np.random.Generator
) -> Batch:
    """What an objective makes of feedback.

    Raises:
        ContractError: it is no batch.
    """
    batch = objective.prepare(feedback, forward, generator)
    if not isinstance(batch, Batch):
        raise ContractError(
            f"`prepare` of {objective.name} returned {shown(batch)}; return an oat.types.Batch "
            "(docs/extending.md)"
        )
    return batch
