"""The protocol of an objective, and `View`, the form of its data in one forward pass.

The last letter of a column's name is its axis: `advantages_N` has one value per row, `old_logps_K` one per
trained token, `mask_U` one per unit. When a batch is cut, every column is cut along its axis. The reduction
reads four columns. `mask_K` and `mask_U` select the terms (1 counts, 0 does not) and enter the denominators.
`weight_N` and `weight_U` multiply numerators only. A missing column counts as all ones.

An algorithm subclasses `Objective`, whose defaults suit an algorithm without metrics or state. Its attribute
`numbers` names the columns of the data that it reads as numbers. These columns are checked when a record is
read. So a mistake in the data is found before the run starts, and `on_bad_record` decides what follows.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

import numpy as np
import torch

from oat.errors import ContractError, shown
from oat.functional.segments import segment_mean, segment_sum
from oat.types import Batch, Feedback, Item, Loss, Plan, Requires, Trajectory
from oat.types.part import Check, Derived, RunFacts

Outputs = Mapping[str, Mapping[str, torch.Tensor]]
"""Results of a forward pass, by the name of the model and the name of the value: {"policy": {"sampled": (K,),
"entropy": (K,)}, "critic": {"value": (K,)}}."""


@dataclass(frozen=True, eq=False)
class View:
    """The rows of one forward pass; all indices are local to it.

    Attributes:
        row_of_K: (K,) index of each trained token's row.
        unit_of_N, group_of_N: (N,) indices of each row's unit and group.
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
        """Return the (N,) sums over the trained tokens of each row."""
        return segment_sum(values_K, self.row_of_K, self.num_rows)

    def row_mean(self, values_K: torch.Tensor) -> torch.Tensor:
        """Return the (N,) means over the trained tokens of each row; 0 for a row without a trained token."""
        return segment_mean(values_K, self.row_of_K, self.num_rows)


OF_RESPONSES = frozenset({"response/length", "response/truncated_frac"})
"""Metrics of `step_metrics` that alarms may watch if the algorithm learns from the policy's responses."""


@dataclass(frozen=True)
class StepSettings:
    """Fields of an algorithm's `Config` that the run around it reads too.

    Attributes:
        samples: number of responses per prompt; None if the algorithm has no such field.
        epochs: number of passes over the data of a step.
        minibatches: number of optimiser steps in each pass.
    """

    samples: int | None = None
    epochs: int = 1
    minibatches: int = 1

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> "StepSettings":
        """Take these fields from the fields of a `Config`.

        Args:
            options: every field of the `Config`, by name.
        """
        return cls(**{field.name: options[field.name] for field in fields(cls) if field.name in options})


class Forward(Protocol):
    def __call__(self, model: str, rows: Sequence[Trajectory], wants: set[str]) -> dict[str, torch.Tensor]:
        """Return the wanted values of a model for the rows, by name, without gradient: (K,) for the trained
        tokens, or (N,) from a reward model."""


class Objective(Protocol):
    """A learning objective. `prepare` and `losses` are its mathematics; the learner computes gradients and
    updates.

    An algorithm is a subclass with a dataclass `Config` (its settings, each with a docstring) and
    `__init__(config)`. `oat.types.part` says what else a part may declare. The code around an algorithm reads
    only those fields of its `Config` that `StepSettings` has.

    `prepare` and the state that it keeps may be in another process than `losses` and `metrics`. So `losses`
    and `metrics` read only their arguments and the configuration. A value that `prepare` computes for them
    must be a column of the batch.
    """

    name: str
    requires: Requires
    wants: Mapping[str, set[str]]
    """The values that `losses` reads, by the trained model that gives them: "raw", "sampled" and "entropy"
    from a language model, "value" from a critic, "score" from a reward model, "rewards" and "prior" from the
    ensemble."""
    recorded_is_old: bool = False
    """True if the engine and the learner compute in the same precision, so that log-probabilities recorded
    under the policy's present version can serve as the old ones. The builder of the run sets this."""
    watched: frozenset[str] = OF_RESPONSES
    """Metrics of a step that `alarms` may watch (docs/alarms.md)."""
    reuses: bool = False
    """True if `prepare` also learns from `Feedback.older` (`learner.buffer`), so the loss must be valid for
    samples from older weights."""
    reads_answers: bool = True
    """True if `prepare` learns anything from the answers; otherwise only oracles that cost nothing are
    accepted."""
    judges_singly: bool = False
    """True if `prepare` judges each response by itself, by a threshold for its score, so that recorded
    responses need scores or labels."""
    numbers: Mapping[str, str] = {}
    """Columns of the data that `prepare` reads as numbers, each with the setting that names it. A record that
    lacks such a number is malformed."""
    setting_for: Mapping[str, str] = {}
    """The algorithm's settings that error messages propose, by what the setting provides: "answers" (the
    algorithm reads answers), "held_out" (pairs that are measured and never learned), or a metric that an
    alarm watches."""

    @staticmethod
    def defaults(config: Any, run: RunFacts) -> Mapping[str, Derived]:
        """Return values for settings that `config` leaves open and that follow from the run.

        Raises:
            ConfigError: a setting contradicts the run, or has to be set. The message names it as
                `algorithm.field`.
        """
        return {}

    @staticmethod
    def checks(config: Any, run: RunFacts) -> Iterable[Check]:
        """Return checks of other sections' settings that may contradict `config`."""
        return ()

    def plan(self, step: int) -> Plan: ...

    def prepare(self, feedback: Feedback, forward: Forward, generator: np.random.Generator) -> Batch:
        """Turn feedback into a batch: its rows, and advantages, masks and weights as columns.

        Nothing is learned from a batch without rows. A metric of the batch replaces the one of the same name
        in `step_metrics`.
        """

    def losses(self, outputs: Outputs, view: View) -> dict[str, Loss]:
        """Return the parts of the loss by metric name (a user's own under `user/`). The learner reduces each
        part and adds them up, times their coefficients, to one scalar."""

    def metrics(self, outputs: Outputs, view: View) -> dict[str, tuple[torch.Tensor, str]]:
        """Return values to report, by metric name, each with its reduction over an optimiser step: "K", "N"
        or "U" for the mean over this axis, or "max" or "min"."""
        return {}

    def why_no_rows(self, rows: Sequence[Mapping[str, float]]) -> str | None:
        """Return the likely reason why no step had a row to learn from, if the algorithm's own metrics show
        it; otherwise None.

        Args:
            rows: the metrics of each step so far.
        """
        return None

    @property
    def state(self) -> dict[str, Any]:
        """The state that `prepare` keeps across steps, as tensors and JSON values; `load_state` restores
        it."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        assert not state, f"{self.name} saved a state and must load it"


def row_index(rows: Sequence[Trajectory]) -> torch.Tensor:
    """Return the (K,) indices of the trained tokens' rows."""
    counts = torch.tensor([int(row.trained.sum()) for row in rows], dtype=torch.long)
    return torch.arange(len(rows)).repeat_interleave(counts)


def step_metrics(feedback: Feedback) -> dict[str, float]:
    """Return the metrics that do not depend on the algorithm. They describe the answers, responses and scores
    of the step's own questions, without those of older steps from the replay buffer. But `oracle/queries` and
    `oracle/cost` are totals over all steps so far."""
    return {**answer_metrics(feedback), **response_metrics(feedback), **score_metrics(feedback)}


def answer_metrics(feedback: Feedback) -> dict[str, float]:
    """Return the shares of tied, abstained, failed and unpaid questions of the step, the number of answers
    that came too late for it, and the total queries and money of the answers that all steps so far have
    taken."""
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
    """Return True if an oracle has judged a pair and found no winner: its mark is "tie", or its probability
    is one half."""
    return item.question.kind == "compare" and item.label is None and item.answer.marks[0] in ("tie", "ok")


def response_metrics(feedback: Feedback) -> dict[str, float]:
    """Return the mean length, the number of tokens and the truncated share of the step's responses; and, as a
    mean over the tokens of the slot `sampler`, by how many versions the weights that sampled a token are
    older than the policy."""
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
    """Return the `reward_metrics` of the step's scores. If a comparison was made from scores, these scores
    are included, even if only one of the two responses has a score."""
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
    """Return the mean score, the mean over groups of the standard deviation of a group's scores, and the
    share of groups in which it is 0. It is 0 for a group with fewer than two scores. Without any score,
    return no metrics.

    Args:
        rewards_N: (N,) scores.
        group_of_N: (N,) index of each row's group.
        valid_N: (N,) bool, True if the row has a score.
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
    """Call `prepare`, and check that it returned a batch.

    Raises:
        ContractError: `prepare` returned something else.
    """
    batch = objective.prepare(feedback, forward, generator)
    if not isinstance(batch, Batch):
        raise ContractError(
            f"`prepare` of {objective.name} returned {shown(batch)}; return an oat.types.Batch "
            "(docs/extending.md)"
        )
    return batch
