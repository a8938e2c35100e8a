"""Where within a response its reward is earned: at its end, at the ends of its steps, or of its turns.

| `credit` | rewards of a response | where they are earned |
| --- | --- | --- |
| `response` | its score | at its last trained token |
| `steps` | one for each step that the oracle rewarded (`Answer.steps`) | at the token that completes it |
| `turns` | one for each turn (`Segment.reward`, from the environment) | at the turn's last trained token |

With `steps` and `turns`, a response may have a score that differs from the sum of these rewards. The
difference is earned at its last trained token. So the rewards of a response always add up to its score. If
there is no difference, and no step or turn ends at the last token, nothing is earned there: a 0 in its place
is no reward, and estimators do not compare it with the others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from oat.algorithms.rows import ScoredRows
from oat.algorithms.step_rewards import step_tokens, turn_tokens
from oat.lazy import lazily
from oat.types import Answer, Trajectory

if TYPE_CHECKING:
    import torch
else:
    torch = lazily("torch")


Credit = Literal["response", "steps", "turns"]
_ROUNDING = 1e-6
"""Largest difference of a score and the sum of its steps, relative to them, that is rounding: scores are
float32."""


@dataclass(frozen=True, eq=False)
class CreditedRewards:
    """The E rewards of a step's N rows, row after row. Each row has at least one, and its last one is at its
    last trained token.

    Attributes:
        rewards_E: the rewards.
        row_of_E: index of the row that each belongs to.
        token_of_E: index of the trained token, among the K of all rows, at which each is earned; -1 if its
            row has no trained token.
        lengths_E: number of trained tokens after the row's reward before, or from its beginning, up to this
            one.
        values_E: value of the state before each reward's step, NaN where there is none; None except with the
            estimator `vine`.
        is_earned_E: False for a 0 that only stands at a row's last token, and is no reward; None: all are
            rewards.
    """

    rewards_E: torch.Tensor
    row_of_E: torch.Tensor
    token_of_E: torch.Tensor
    lengths_E: torch.Tensor
    values_E: torch.Tensor | None = None
    is_earned_E: torch.Tensor | None = None

    @property
    def counted_E(self) -> torch.Tensor:
        """True for the numbers that are rewards, (E,)."""
        return torch.ones_like(self.row_of_E) > 0 if self.is_earned_E is None else self.is_earned_E

    def last_of_rows(self) -> torch.Tensor:
        """Return the index, among the E rewards, of each row's last one, (N,)."""
        return self.row_of_E.bincount().cumsum(0) - 1

    def only(self, kept_N: torch.Tensor, lengths_N: torch.Tensor) -> "CreditedRewards":
        """Return the rewards of the rows where `kept_N` is True. Rows and tokens are numbered from 0 again.

        Args:
            lengths_N: (N,) number of trained tokens of each row.
        """
        kept_E = kept_N[self.row_of_E]
        row_of_N = kept_N.cumsum(0) - 1
        token_of_K = kept_N.repeat_interleave(lengths_N).cumsum(0) - 1
        tokens_E = self.token_of_E[kept_E]
        has_token_E = tokens_E >= 0
        tokens_E[has_token_E] = token_of_K[tokens_E[has_token_E]]
        return CreditedRewards(
            self.rewards_E[kept_E],
            row_of_N[self.row_of_E[kept_E]],
            tokens_E,
            self.lengths_E[kept_E],
            None if self.values_E is None else self.values_E[kept_E],
            self.counted_E[kept_E],
        )

    def by_row(self, rewards_E: torch.Tensor) -> torch.Tensor:
        """Return the sum of rewards of each row, (N,)."""
        return torch.zeros(len(self.last_of_rows())).index_add(0, self.row_of_E, rewards_E)

    def by_token(self, rewards_E: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """Return the reward of each of the K trained tokens, (K,); those of rows without tokens are lost."""
        has_token_E = self.token_of_E >= 0
        return torch.zeros(num_tokens).index_add(0, self.token_of_E[has_token_E], rewards_E[has_token_E])


def earned(scored: ScoredRows, credit: Credit) -> CreditedRewards:
    """Return the rewards of rows, of which each has a score, at the places where they are earned."""
    rewards: list[float] = []
    rows: list[int] = []
    tokens: list[int] = []
    lengths: list[int] = []
    are_earned: list[bool] = []
    start = 0
    given = zip(scored.rows, scored.answers, scored.places, scored.rewards_N.tolist(), strict=True)
    for number, (row, answer, place, score) in enumerate(given):
        count = row.num_trained
        before = 0
        for token, reward in _places(row, answer, place, score, count, credit):
            rewards.append(0.0 if reward is None else reward)
            are_earned.append(reward is not None)
            rows.append(number)
            tokens.append(start + token if count else -1)
            lengths.append(token + 1 - before if count else 0)
            before = token + 1
        start += count
    return CreditedRewards(
        torch.tensor(rewards, dtype=torch.float32),
        torch.tensor(rows, dtype=torch.long),
        torch.tensor(tokens, dtype=torch.long),
        torch.tensor(lengths, dtype=torch.float32),
        is_earned_E=torch.tensor(are_earned, dtype=torch.bool),
    )


def turn_ends(rows: Sequence[Trajectory]) -> torch.Tensor:
    """Return True for the last trained token of each turn, (K,) bool. A turn is a segment of the model's."""
    ends = []
    for row in rows:
        turn_of_T = np.arange(len(row.segments)).repeat([len(segment.ids) for segment in row.segments])
        turns = turn_of_T[row.trained]
        ends.append(np.append(turns[1:] != turns[:-1], True)[: len(turns)])
    return torch.from_numpy(np.concatenate(ends)) if ends else torch.zeros(0, dtype=torch.bool)


def _places(
    row: Trajectory, answer: Answer, place: int, score: float, count: int, credit: Credit
) -> list[tuple[int, float | None]]:
    """Return the rewards of a response, each with the index of its token among the `count` trained ones, in
    ascending order. The last one is at the last token, and is None if nothing is earned there."""
    if credit == "steps" and answer.steps and answer.steps[place]:
        indices, found = step_tokens(row, answer.steps[place], answer.step_unit)
    elif credit == "turns":
        indices, found = turn_tokens(row)
    else:
        return [(max(0, count - 1), score)]
    sums: dict[int, float | None] = dict(zip(indices.tolist(), found.tolist(), strict=True))
    rest = score - math.fsum(found)
    last = max(0, count - 1)
    if abs(rest) > _ROUNDING * max(1.0, abs(score), *np.abs(found)) or not sums:
        sums[last] = (sums.get(last) or 0.0) + rest
    else:
        sums.setdefault(last, None)
    return sorted(sums.items())
