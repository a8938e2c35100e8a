"""The protocol of an objective, and `View`, the data of one forward pass.

The last letter of a column's name is its axis: `advantages_N` has one value per row, `old_logps_K` one per
trained token, `mask_U` one per unit. When a batch is cut, every column is cut along its axis.

The reduction of losses reads four columns; a missing column counts as all ones:
* `mask_K` and `mask_U` select the terms (1 counts, 0 does not). They also enter the denominators.
* `weight_N` and `weight_U` multiply the terms. They do not enter the denominators.
A loss may name another mask than `mask_K` (`Loss.mask`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np

from oat.errors import ContractError, shown
from oat.lazy import lazily
from oat.types import UNASKED, Batch, Feedback, IsUsable, Item, Loss, Plan, Requires, Trajectory
from oat.types.part import Check, Derived, RunFacts

if TYPE_CHECKING:
    import torch

    from oat import functional as F
else:
    torch, F = lazily("torch"), lazily("oat.functional")


Outputs: TypeAlias = "Mapping[str, Mapping[str, torch.Tensor]]"
"""Results of a forward pass, by the name of the model and the name of the value: {"policy": {"sampled": (K,),
"entropy": (K,)}, "critic": {"value": (K,)}}."""


@dataclass(frozen=True, eq=False)
class View:
    """The rows of one forward pass. Rows, units and groups are numbered from 0 within this pass.

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
        """Return the sum over the trained tokens of each row, (N,)."""
        return F.segments.segment_sum(values_K, self.row_of_K, self.num_rows)

    def row_mean(self, values_K: torch.Tensor) -> torch.Tensor:
        """Return the mean over the trained tokens of each row, (N,); 0 for a row without a trained token."""
        return F.segments.segment_mean(values_K, self.row_of_K, self.num_rows)


OF_RESPONSES = frozenset({"response/length", "response/truncated_frac"})
"""Metrics of the policy's responses: the default of `Objective.watched`."""


@dataclass(frozen=True)
class StepSettings:
    """Fields of an algorithm's `Config` that the code around the algorithm also reads.

    Attributes:
        samples: number of responses per prompt; None if the algorithm has no such field.
        epochs: number of passes over the data of a step.
        minibatches: number of optimiser steps in each pass.
        target_kl: the KL above which the objective ends an update early (`Objective.ends_passes`); None if it
            ends none for this reason.
    """

    samples: int | None = None
    epochs: int = 1
    minibatches: int = 1
    target_kl: float | None = None

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> "StepSettings":
        """Take the values from a `Config`. A field that the `Config` lacks gets its default.

        Args:
            options: every field of the `Config`, by name.
        """
        return cls(**{field.name: options[field.name] for field in fields(cls) if field.name in options})


STATES = "states "
"""Beginning of the names of hidden states among a language model's values."""


def states_want(layer: int | str) -> str:
    """Return the name of the hidden states of a layer, or of "all" layers, among a language model's values:
    (K, D), those from which the trained tokens are predicted. They are asked for alone."""
    return f"{STATES}{layer}"


class Forward(Protocol):
    def __call__(self, model: str, rows: Sequence[Trajectory], wants: set[str]) -> dict[str, torch.Tensor]:
        """Compute values of a model for the rows, without gradient.

        Args:
            wants: names of the values, as in `Objective.wants`.
        Returns:
            Each value by name: (K,), one per trained token; the score of a reward model is (N,), one per row.
        """


class Objective(Protocol):
    """A learning objective: `prepare` makes a batch of feedback, and `losses` computes the terms of the loss.
    The learner computes gradients and updates.

    An algorithm is a subclass with a dataclass `Config` (its settings, each with a docstring) and
    `__init__(config)`. `oat.types.part` lists the further methods that it may have.

    `prepare` may run in another process than `losses` and `metrics`. So `losses` and `metrics` read only
    their arguments and the configuration. A value that `prepare` computes for them must be a column of the
    batch.
    """

    name: str
    requires: Requires
    wants: Mapping[str, set[str]]
    """Names of the values that `losses` and `metrics` read, by trained model. A language model has "raw",
    "sampled" and "entropy"; a critic, "value" and "value_after"; a reward model, "score"; the ensemble,
    "rewards" and "prior"."""
    recorded_is_old: bool = False
    """True if the engine and the learner compute in the same precision. Log-probabilities recorded under the
    policy's present version can then serve as the old ones. The builder of the run sets this."""
    end_ids: frozenset[int] = frozenset()
    """Ids that end a response. The builder of the run sets this."""
    watched: frozenset[str] = OF_RESPONSES
    """Metrics of a step that `alarms` may watch (docs/alarms.md)."""
    reuses: bool = False
    """True if the algorithm can also learn from `Feedback.older`, the questions of earlier steps
    (`learner.buffer`). Its loss must then be valid for samples from older weights."""
    reads_answers: bool = True
    """True if `prepare` learns from the oracle's answers. False: only oracles that cost nothing are
    accepted."""
    learns: bool = True
    """True if the policy or a reward model learns. False: only the explorer's ensemble does."""
    weighs_winners: bool = False
    """True if the loss of a pair weighs both winners where `prepare` gives weights (column `turned_U`).
    False: soft labels are refused."""
    takes_recorded: bool = False
    """True if a loss with importance ratios (`Requires.ratio_based`) can learn from recorded responses,
    because `prepare` computes the old log-probabilities."""
    judges_singly: bool = False
    """True if `prepare` compares the score of each response with a threshold. Recorded responses then need
    scores or labels."""
    numbers: Mapping[str, str] = {}
    """Columns of the data that `prepare` reads as numbers, each with the setting that names the column. A
    record that lacks a number in such a column is malformed (`prompts.on_bad_record`)."""
    setting_for: Mapping[str, str] = {}
    """For each need, the setting of the algorithm that an error message proposes. The needs are "answers" (to
    learn from answers), "held_out" (to hold out pairs), and names of metrics (to report the metric)."""

    @staticmethod
    def defaults(config: Any, run: RunFacts) -> Mapping[str, Derived]:
        """Return values for settings that `config` leaves open, derived from the facts of the run.

        Raises:
            ConfigError: a setting contradicts the run, or must be set. The message names the setting as
                `algorithm.field`.
        """
        return {}

    @staticmethod
    def checks(config: Any, run: RunFacts) -> Iterable[Check]:
        """Return checks of settings in other sections that may contradict `config`."""
        return ()

    def check_answers(self, gives_steps: bool, sources: Sequence[str] | None) -> None:
        """Check that the oracle's answers have what the settings read.

        Args:
            gives_steps: True if the answers may have rewards of steps.
            sources: labels of the sources whose scores the answers may have; None: not known.

        Raises:
            ConfigError: they have not.
        """
        return None

    def plan(self, step: int) -> Plan: ...

    def prepare(self, feedback: Feedback, forward: Forward, generator: np.random.Generator) -> Batch:
        """Turn feedback into a batch: its rows, and columns such as advantages, masks and weights.

        A batch of size 0 changes no weights. If a metric of the batch has the name of a metric in
        `step_metrics`, the batch's value is reported.
        """

    def is_usable(self, item: Item) -> bool:
        """Return True if this answered question teaches the algorithm something. With
        `sampling.refill_rounds`, a step asks further questions in place of those that do not.

        The result depends only on the item and the configuration. By default, an item is usable if at least
        one of its values is there: a score, or the label of a comparison.
        """
        return item.label is not None or (item.question.kind == "score" and "ok" in item.answer.marks)

    def losses(self, outputs: Outputs, view: View) -> dict[str, Loss]:
        """Return the parts of the loss, by metric name. A user's own objective names its parts under `user/`.
        The learner reduces each part, multiplies it by its coefficient, and adds up the parts."""

    def metrics(self, outputs: Outputs, view: View) -> dict[str, tuple[torch.Tensor, str]]:
        """Return values to report, by metric name, each with its reduction over an optimiser step: "K", "N"
        or "U" for the mean over this axis, "max" or "min"."""
        return {}

    def ends_passes(self, values: Mapping[str, float]) -> bool:
        """Return True if the update ends before an optimiser step, which is then left out with all that were
        to follow it. The result depends only on `values` and the configuration.

        Args:
            values: the losses and metrics of the whole mini-batch of this optimiser step, under the weights
                before it. A metric without values, such as one over tokens if there are none, is absent.
                Every loss is finite: before this call, a step with another loss is left out or ends the run.
                A metric may be infinite, such as the exponential of a large number.
        """
        return False

    def why_no_rows(self, rows: Sequence[Mapping[str, float]]) -> str | None:
        """Return the likely reason why no optimiser step was made; None if the algorithm's metrics do not
        show the reason.

        Args:
            rows: the rows of metrics so far.
        """
        return None

    @property
    def state(self) -> dict[str, Any]:
        """State that `prepare` keeps from step to step, as tensors and JSON values; `load_state` restores
        it."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        assert not state, f"{self.name} saved a state and must load it"


def row_index(rows: Sequence[Trajectory]) -> torch.Tensor:
    """Return the index of each trained token's row, (K,)."""
    counts = torch.tensor([row.num_trained for row in rows], dtype=torch.long)
    return torch.arange(len(rows)).repeat_interleave(counts)


def step_metrics(feedback: Feedback) -> dict[str, float]:
    """Return the metrics that do not depend on the algorithm. They describe the answers, responses and scores
    of the step's own questions, also of those that were thrown away. Questions of earlier steps (the
    replay buffer) do not count. `oracle/queries` and `oracle/cost` are totals over all steps so far."""
    scores = {**score_metrics(feedback), **source_metrics(feedback)}
    return {**answer_metrics(feedback), **response_metrics(feedback), **scores}


def refill_metrics(feedback: Feedback, is_usable: IsUsable) -> dict[str, float]:
    """Return the metrics of a step with dynamic sampling: its number of rounds, the share of its questions
    that are not usable, and the number of questions that it throws away. Questions that were asked of no
    oracle do not count."""
    asked = [item for item in feedback.asked if item.question.oracle != UNASKED]
    unusable = sum(not is_usable(item) for item in asked)
    return {
        "refill/rounds": float(1 + max((item.question.key.round for item in feedback.asked), default=-1)),
        "refill/unusable_frac": unusable / max(1, len(asked)),
        "refill/thrown_away": float(len(feedback.thrown_away)),
    }


def answer_metrics(feedback: Feedback) -> dict[str, float]:
    """Return the metrics `answers/*` of the step, and the totals `oracle/queries` and `oracle/cost` over all
    steps so far."""
    marks = [{"tie"} if is_even(item) else set(item.answer.marks) for item in feedback.asked]
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
        **({"oracle/pairs": float(feedback.pairs)} if feedback.pairs else {}),
        **({"oracle/cost": feedback.cost} if feedback.cost else {}),
    }


def is_even(item: Item) -> bool:
    """Return True if the answer about a pair names no winner: its mark is "tie", or its probability is one
    half."""
    return item.question.kind == "compare" and item.label is None and item.answer.marks[0] in ("tie", "ok")


def response_metrics(feedback: Feedback) -> dict[str, float]:
    """Return the metrics `response/*` of the step's responses, `lag/versions`, and, if an environment has
    rewarded responses, `episode/turns`. The lag of a token is the number of versions between the weights that
    sampled it and the policy. `lag/versions` is the mean lag of the tokens from the slot `sampler`. Branches
    do not count."""
    trajectories = [
        trajectory
        for item in feedback.asked
        for trajectory in item.group.trajectories
        if not trajectory.branched_at
    ]
    if not trajectories:
        return {}
    lengths = [trajectory.num_trained for trajectory in trajectories]
    ours = [trajectory.recorded("versions") for trajectory in trajectories if trajectory.slot == "sampler"]
    versions = np.concatenate(ours) if ours else np.zeros(0)
    answered = [[turn for turn in each.segments if turn.author == "model"] for each in trajectories]
    is_episode = any(turn.reward is not None for turns in answered for turn in turns)
    return {
        **({"episode/turns": float(np.mean([len(turns) for turns in answered]))} if is_episode else {}),
        "response/length": float(np.mean(lengths)),
        "response/tokens": float(np.sum(lengths)),
        "response/truncated_frac": float(
            np.mean([trajectory.finish_reason == "length" for trajectory in trajectories])
        ),
        "lag/versions": float(np.mean(feedback.step - versions)) if len(versions) else 0.0,
    }


def score_metrics(feedback: Feedback) -> dict[str, float]:
    """Return the `reward_metrics` of the step's scores. They include the scores that came with answers about
    pairs. Of such a pair, one response may lack a score. The scores of branches do not count."""
    scores: list[list[float]] = []
    for item in feedback.asked:
        if item.question.kind == "score":
            scores.append(
                [
                    value if mark == "ok" else math.nan
                    for pick, value, mark in zip(
                        item.question.picks, item.answer.values, item.answer.marks, strict=True
                    )
                    if not item.group.trajectories[pick].branched_at
                ]
            )
        elif item.answer.scores:
            scores.append([math.nan if score is None else score for score in item.answer.scores])
    scores_N = torch.tensor([score for own in scores for score in own], dtype=torch.float32)
    group_of_N = torch.tensor([number for number, own in enumerate(scores) for _ in own], dtype=torch.long)
    return reward_metrics(scores_N, group_of_N, ~scores_N.isnan())


def source_metrics(feedback: Feedback) -> dict[str, float]:
    """Return the mean of the scores that each source of a mixture gave in the step, `oracle/source/LABEL`,
    before any weight and normalisation."""
    given: dict[str, list[float]] = {}
    for item in feedback.asked:
        for label, scores in item.answer.sources.items():
            given.setdefault(label, []).extend(score for score in scores if score is not None)
    return {f"oracle/source/{label}": float(np.mean(scores)) for label, scores in given.items() if scores}


def reward_metrics(
    rewards_N: torch.Tensor, group_of_N: torch.Tensor, valid_N: torch.Tensor
) -> dict[str, float]:
    """Return the metrics of scores; no metrics if no row has a score.

    * `reward/mean`: the mean score.
    * `reward/std_within`: the mean over groups of the standard deviation of the group's scores. A group with
      fewer than two scores has a standard deviation of 0.
    * `reward/zero_spread_frac`: the share of groups whose standard deviation is 0.

    Args:
        rewards_N: (N,) scores.
        group_of_N: (N,) index of each row's group.
        valid_N: (N,) bool, True if the row has a score.
    """
    order_N = group_of_N.argsort(stable=True)
    sizes = group_of_N.unique(return_counts=True)[1].tolist()
    parts = zip(rewards_N[order_N].split(sizes), valid_N[order_N].split(sizes), strict=True)
    groups = [rewards[valid] for rewards, valid in parts]
    spreads = [float(group.std()) if len(group) > 1 else 0.0 for group in groups]
    if not valid_N.any():
        return {}
    return {
        "reward/mean": float(rewards_N[valid_N].mean()),
        "reward/std_within": float(np.mean(spreads)),
        "reward/zero_spread_frac": float(np.mean([spread < 1e-8 for spread in spreads])),
    }


def used_advantages(batch: Batch, items: Sequence[Item]) -> list[list[float | None]] | None:
    """Return the advantages that the losses read, a list for each question with the advantage of each of its
    candidates. Return None if the batch has no advantages, as with losses of pairs.

    They are the columns `advantages_N` or `advantages_K`. A response whose tokens have advantages of their
    own gets the mean of these. It gets None if it is not in the batch (without a score, masked, a branch), if
    no token of it is trained, or if its advantage is not finite.

    Args:
        items: the questions; other responses of the batch are left out.
    """
    columns, rows = batch.columns, batch.rows
    if "advantages_N" in columns:
        values_N = columns["advantages_N"]
    elif "advantages_K" in columns:
        values_N = F.segments.segment_mean(columns["advantages_K"], row_index(rows), len(rows))
    else:
        return None
    # numpy's text of a float32 is the shortest one that gives the number back
    texts = map(str, values_N.detach().to("cpu", torch.float32).numpy())
    found = {id(row): float(text) for row, text in zip(rows, texts, strict=True) if row.num_trained}
    given = ([found.get(id(item.group.trajectories[pick])) for pick in item.question.picks] for item in items)
    return [[value if value is None or math.isfinite(value) else None for value in own] for own in given]


def usable_by(objective: Objective) -> IsUsable:
    """Return a function that calls `is_usable` and checks that it returns a bool.

    Raises (the function):
        ContractError: `is_usable` returned something else.
    """

    def is_usable(item: Item) -> bool:
        found = objective.is_usable(item)
        if not isinstance(found, bool | np.bool_):
            raise ContractError(
                f"`is_usable` of {objective.name} returned {shown(found)}; return True or False "
                "(docs/extending.md)"
            )
        return bool(found)

    return is_usable


def ends_update(objective: Objective, values: Mapping[str, float]) -> bool:
    """Call `ends_passes`, and check that it returned a bool.

    Raises:
        ContractError: `ends_passes` returned something else.
    """
    found = objective.ends_passes(MappingProxyType(dict(values)))
    if not isinstance(found, bool | np.bool_):
        raise ContractError(
            f"`ends_passes` of {objective.name} returned {shown(found)}; return True or False "
            "(docs/extending.md)"
        )
    return bool(found)


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
