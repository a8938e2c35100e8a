"""The rows of a step for algorithms that learn from scores, and the models' values for them before the step's
update."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np

from oat.algorithms.base import Forward, row_index
from oat.lazy import lazily
from oat.types import Answer, Feedback, Trajectory

if TYPE_CHECKING:
    import torch

    from oat import functional as F
else:
    torch, F = lazily("torch"), lazily("oat.functional")


Rows = tuple[Trajectory, ...]


@dataclass(frozen=True, eq=False)
class ScoredRows:
    """The responses that a step's questions are about, with their scores, group after group. The groups of
    earlier steps (`Feedback.older`) come first.

    Attributes:
        rows: the N trajectories.
        group_of_N: (N,) index of each row's group, in [0, num_groups).
        rewards_N: (N,) float32 scores; NaN where a score is missing.
        valid_N: (N,) bool, True if the row has a score.
        answers: the answer about each row, N.
        places: the place of each row among the values of its answer, N.
    """

    rows: Rows
    group_of_N: torch.Tensor
    num_groups: int
    rewards_N: torch.Tensor
    valid_N: torch.Tensor
    answers: tuple[Answer, ...]
    places: tuple[int, ...]

    @property
    def lengths_N(self) -> torch.Tensor:
        """Number of trained tokens of each row, (N,). A branch counts the tokens that it begins with too."""
        lengths = [float(row.num_trained) + row.branched_at for row in self.rows]
        return torch.tensor(lengths, dtype=self.rewards_N.dtype)

    def only(self, kept_N: torch.Tensor) -> "ScoredRows":
        """Return the rows where `kept_N` is True, in their order. Groups are numbered from 0 again; a group
        without rows is left out."""
        places = kept_N.nonzero().flatten().tolist()
        found, group_of_N = self.group_of_N[kept_N].unique(return_inverse=True)
        return ScoredRows(
            tuple(self.rows[place] for place in places),
            group_of_N,
            len(found),
            self.rewards_N[kept_N],
            self.valid_N[kept_N],
            tuple(self.answers[place] for place in places),
            tuple(self.places[place] for place in places),
        )

    def with_rewards(self, rewards_N: torch.Tensor) -> "ScoredRows":
        return replace(self, rewards_N=rewards_N)


def scored_rows(feedback: Feedback) -> ScoredRows:
    """Return the responses of a step's feedback with their scores."""
    rows: list[Trajectory] = []
    groups: list[int] = []
    rewards: list[float] = []
    valid: list[bool] = []
    answers: list[Answer] = []
    places: list[int] = []
    for number, item in enumerate(feedback.learned):
        values = zip(item.question.picks, item.answer.values, item.answer.marks, strict=True)
        for place, (pick, value, mark) in enumerate(values):
            rows.append(item.group.trajectories[pick])
            groups.append(number)
            rewards.append(value if mark == "ok" else float("nan"))
            valid.append(mark == "ok")
            answers.append(item.answer)
            places.append(place)
    return ScoredRows(
        tuple(rows),
        torch.tensor(groups, dtype=torch.long),
        len(feedback.learned),
        torch.tensor(rewards, dtype=torch.float32),
        torch.tensor(valid, dtype=torch.bool),
        tuple(answers),
        tuple(places),
    )


@dataclass(frozen=True, eq=False)
class OldValues:
    """Values of the rows' K trained tokens under the weights before the step's update.

    Attributes:
        recorded_K: sampled log-probabilities, recorded at sampling, nats.
        old_K: those of the old policy, nats: the denominators of importance ratios.
        raw_K, entropy_K: the policy's raw log-probabilities and entropies, nats; None if nothing reads them.
        reference_K: the reference's raw log-probabilities, nats; None if nothing reads them.
        are_recorded: True if `old_K` is `recorded_K`.
        are_policys: True if `old_K` is of the policy before the update.
        num_rows: N.
        is_sampled_K: True for the tokens that an engine sampled, so that log-probabilities were recorded.
    """

    recorded_K: torch.Tensor
    old_K: torch.Tensor
    raw_K: torch.Tensor | None
    entropy_K: torch.Tensor | None
    reference_K: torch.Tensor | None
    are_recorded: bool
    are_policys: bool
    num_rows: int
    is_sampled_K: torch.Tensor

    def read(self, name: Literal["raw_K", "entropy_K", "reference_K"]) -> torch.Tensor:
        """Return a value that `start_values` was asked for."""
        values: torch.Tensor | None = getattr(self, name)
        assert values is not None, f"start_values was not asked for {name}"
        return values

    def metrics(self) -> dict[str, float]:
        """Return `logps/recomputed` and, if the policy computed the old log-probabilities, how far the
        recorded ones of sampled tokens are from them, in nats per token."""
        if self.are_recorded:
            return {"logps/recomputed": 0.0}
        kept_K = self.is_sampled_K
        if not self.are_policys or (len(kept_K) and not kept_K.any()):
            return {"logps/recomputed": 1.0}
        mean, largest = F.corrections.recorded_gap(self.old_K[kept_K], self.recorded_K[kept_K])
        return {"logps/recomputed": 1.0, "logps/recorded_gap": mean, "logps/recorded_gap_max": largest}


def start_values(
    rows: Rows,
    step: int,
    forward: Forward,
    *,
    is_same_precision: bool,
    wants: Collection[Literal["raw", "entropy", "reference"]],
    old_from: Literal["policy", "sampler", "reference"] = "policy",
) -> OldValues:
    """Return the values of the models for the rows of a step, with at most one pass of the policy.

    The recorded log-probabilities are those of the policy if exactly these weights sampled every token, in
    the learner's precision. Then no pass computes them.

    Args:
        is_same_precision: `Objective.recorded_is_old`.
        wants: the optional values that are read.
        old_from: "policy": the old policy is the policy before the update. "sampler": it is the sampler, so
            the recorded log-probabilities serve in any case. "reference": it is the reference.
    """
    is_fresh = are_fresh(rows, step, is_same_precision)
    needed: set[str] = {"entropy"} & {*wants}
    if not is_fresh:
        needed |= {"raw"} & {*wants}
    if not is_fresh and old_from == "policy":
        needed.add("sampled")
    found: Mapping[str, torch.Tensor] = forward("policy", rows, needed) if needed else {}
    of_reference = {"raw"} if "reference" in wants else set()
    of_reference |= {"sampled"} if old_from == "reference" else set()
    reference = forward("reference", rows, of_reference) if of_reference else {}
    recorded_K = recorded_logps(rows)
    old_K = reference.get("sampled", found.get("sampled", recorded_K))
    raw_K = recorded_logps(rows, "raw_logps") if is_fresh and "raw" in wants else found.get("raw")
    return OldValues(
        recorded_K,
        old_K,
        raw_K,
        found.get("entropy"),
        reference.get("raw"),
        are_recorded=old_K is recorded_K,
        are_policys=old_from == "policy",
        num_rows=len(rows),
        is_sampled_K=torch.tensor([row.slot == "sampler" for row in rows], dtype=torch.bool)[row_index(rows)],
    )


def recorded_logps(rows: Rows, name: Literal["raw_logps", "sampled_logps"] = "sampled_logps") -> torch.Tensor:
    """Return the log-probabilities recorded at sampling, (K,)."""
    return torch.from_numpy(np.concatenate([row.recorded(name) for row in rows]).astype(np.float32))


def old_logps(
    rows: Rows,
    recorded_K: torch.Tensor,
    step: int,
    forward: Forward,
    *,
    is_same_precision: bool,
) -> torch.Tensor:
    """Return the policy's sampled log-probabilities at the start of this step, (K,).

    They are `recorded_K` if exactly these weights sampled every token, in the learner's precision
    (`Objective.recorded_is_old`). Otherwise a forward pass computes them.
    """
    is_fresh = are_fresh(rows, step, is_same_precision)
    return recorded_K if is_fresh else forward("policy", rows, {"sampled"})["sampled"]


def are_fresh(rows: Rows, step: int, is_same_precision: bool) -> bool:
    """Return True if the log-probabilities recorded at sampling are those that the policy gives now."""
    return is_same_precision and all(
        row.slot == "sampler" and (row.recorded("versions") == step).all() for row in rows
    )
