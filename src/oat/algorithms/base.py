"""The protocol of an objective, and `View`, the form of its data in one forward pass.

The last letter of a column's name is its axis: `advantages_N` has one value a row, `old_logps_K` one a
trained token, `mask_U` one a unit. When a batch is cut, every column is cut along its axis. The reduction
reads four names: `mask_K` and `mask_U` (1 counts, 0 does not; they decide every denominator), `weight_N` and
`weight_U` (they multiply numerators only). A missing one is all ones.

An algorithm subclasses `Objective`, so an algorithm without metrics or state says nothing about them.
`numbers` names the columns of the data that it reads as numbers. They are checked in each record when it is
read: a mistake in the data shows before the run, and `on_bad_record` applies.
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
"""Results of a forward pass by model and by what was wanted of it: {"policy": {"sampled": (K,), "entropy":
(K,)}, "critic": {"value": (K,)}}."""


@dataclass(frozen=True, eq=False)
class View:
    """The rows of one forward pass; all indices are local to it.

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
"""Metrics of `step_metrics` that alarms may watch where the policy responds."""


@dataclass(frozen=True)
class StepSettings:
    """Fields of an algorithm's `Config` that the run around it reads too.

    Attributes:
        samples: responses a prompt; None where the algorithm has no such field.
        epochs: passes over the data of a step.
        minibatches: optimiser steps in each pass.
    """

    samples: int | None = None
    epochs: int = 1
    minibatches: int = 1

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> "StepSettings":
        """
        Args:
            options: every field of a `Config`, by name.
        """
        return cls(**{field.name: options[field.name] for field in fields(cls) if field.name in options})


class Forward(Protocol):
    def __call__(self, model: str, rows: Sequence[Trajectory], wants: set[str]) -> dict[str, torch.Tensor]:
        """Compute what is wanted of a model for the trained tokens of the rows, (K,) each, without
        gradient."""


class Objective(Protocol):
    """A learning objective: `prepare` and `losses` are its mathematics, and the learner does everything else.

    An algorithm is a subclass with a dataclass `Config` (its settings, each with a docstring) and
    `__init__(config)`. `oat.types.part` says what else a part may declare. The run around an algorithm reads
    only those fields of its `Config` that `StepSettings` has.

    `prepare`, with what it keeps in `state`, may run in another process than `losses` and `metrics`. So these
    two read only their arguments and the configuration; a value that `prepare` computes for them is a column
    of the batch.
    """

    name: str
    requires: Requires
    wants: Mapping[str, set[str]]
    """The values that `losses` reads of each trained model: "raw", "sampled" or "entropy" of a language
    model, "value" of a critic, "score" of a reward model."""
    recorded_is_old: bool = False
    """True if log-probabilities recorded under the policy's own version are its old ones: engine and learner
    compute in the same precision. The builder of the run sets this."""
    watched: frozenset[str] = OF_RESPONSES
    """Metrics of a step that `alarms` may watch (docs/alarms.md)."""
    reuses: bool = False
    """True if `prepare` also learns from `Feedback.older` (`learner.buffer`): the loss is as sound on samples
    of older weights."""
    reads_answers: bool = True
    """True if `prepare` learns anything from the answers; otherwise only oracles that cost nothing are
    accepted."""
    judges_singly: bool = False
    """True if `prepare` judges each response by itself, by a threshold of its score, so that recorded
    responses need scores or labels."""
    numbers: Mapping[str, str] = {}
    """Columns of the data that `prepare` reads as numbers, each with the setting that names it; a record
    without one is malformed."""
    setting_for: Mapping[str, str] = {}
    """Settings of its own that error messages propose, by what they bring: "answers" (it reads them),
    "held_out" (pairs that are measured and never learned), or a metric that an alarm watches."""

    @staticmethod
    def defaults(config: Any, run: RunFacts) -> Mapping[str, Derived]:
        """Values of settings that `config` leaves open and that follow from the run.

        Raises:
            ConfigError: a setting contradicts the run, or has to be set. The message names it as
                `algorithm.field`.
        """
        return {}

    @staticmethod
    def checks(config: Any, run: RunFacts) -> Iterable[Check]:
        """Checks of settings of other sections against `config`."""
        return ()

    def plan(self, step: int) -> Plan: ...

    def prepare(self, feedback: Feedback, forward: Forward, generator: np.random.Generator) -> Batch:
        """Turn feedback into a batch: its rows, and advantages, masks and weights as columns.

        A batch without rows is counted and skipped. The batch's metrics replace those of the same name in
        `step_metrics`, which every step has.
        """

    def losses(self, outputs: Outputs, view: View) -> dict[str, Loss]:
        """The terms of the loss by metric name (a user's under `user/`); they are summed into one scalar."""

    def metrics(self, outputs: Outputs, view: View) -> dict[str, tuple[torch.Tensor, str]]:
        """Detached values to report, by metric name, each with its reduction over the step: a mean over "K",
        "N" or "U", or "max", "min"."""
        return {}

    def why_no_rows(self, rows: Sequence[Mapping[str, float]]) -> str | None:
        """The likely reason why no step had a row to learn from, where the algorithm's own metrics show it.

        Args:
            rows: the metrics of each step so far.
        """
        return None

    @property
    def state(self) -> dict[str, Any]:
        """State that `prepare` keeps across steps, as tensors and JSON values; `load_state` restores it."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        assert not state, f"{self.name} saved a state and must load it"


def row_index(rows: Sequence[Trajectory]) -> torch.Tensor:
    """(K,) the row of each trained token."""
    counts = torch.tensor([int(row.trained.sum()) for row in rows], dtype=torch.long)
    return torch.arange(len(rows)).repeat_interleave(counts)


def step_metrics(feedback: Feedback) -> dict[str, float]:
    """Metrics of every step, for every algorithm: answers, queries, responses and scores of the step's own
    questions, without older ones."""
    return {**answer_metrics(feedback), **response_metrics(feedback), **score_metrics(feedback)}


def answer_metrics(feedback: Feedback) -> dict[str, float]:
    """Shares of tied, abstained, failed and unpaid questions; answers that came too late; queries and money
    spent so far."""
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
    """True if an oracle has judged a pair and found no winner: its mark says so, or its probability is one
    half."""
    return item.question.kind == "compare" and item.label is None and item.answer.marks[0] in ("tie", "ok")


def response_metrics(feedback: Feedback) -> dict[str, float]:
    """Length, tokens and truncation of the step's responses, and how many versions of the policy ago the
    sampler's tokens were sampled."""
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
    """`reward_metrics` of the step's scores. Comparisons give the scores that they were made of, also where
    only one of the two has one."""
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
    """Mean score, spread within groups, and share of groups without spread; no metrics without a score.

    Args:
        rewards_N: (N,) scores.
        group_of_N: (N,) group of each row.
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
    """Call `prepare`, and check that it returned a batch.

    Raises:
        ContractError: it returned something else.
    """
    batch = objective.prepare(feedback, forward, generator)
    if not isinstance(batch, Batch):
        raise ContractError(
            f"`prepare` of {objective.name} returned {shown(batch)}; return an oat.types.Batch "
            "(docs/extending.md)"
        )
    return batch
