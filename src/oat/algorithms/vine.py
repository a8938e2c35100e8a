"""Advantages of steps by Monte-Carlo values: VinePPO, arXiv:2410.01679, Section 4 (`algorithm.advantage:
vine`).

A response is cut into steps. From the beginning of each step but the first, a state, branches are sampled:
further responses that go on by themselves (`Plan.branching`). The oracle scores them like all responses.

    V(state) = mean reward of the group's other trajectories that were sampled from this state
    A(step)  = V(state after the step) - V(state before it);   after the last step, the response's reward

"Other trajectories" are the branches from the state and the other responses that begin with the same tokens.
So the value of the prompt is the mean reward of the other responses, as in RLOO, and no branch is sampled
from it. A response's own reward is never part of its values, so that they are baselines without bias. All
tokens of a step have its advantage. The advantages of a response add up to its reward minus the prompt's
value. Branches are not trained.

Departures from the paper:
1. It samples K branches from the prompt too, and uses branches only. Here other responses serve as well.
2. A state that two responses share is sampled from once.
3. A step whose end has no value (all of its branches lack a score) is one step with the next. A first step
   without a value before it learns nothing: its advantage is 0.
4. The number of steps of a response has a bound, `most_steps`, so that the price of a step of the run has
   one. The last step has all that is left.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from oat.algorithms.credit import CreditedRewards
from oat.algorithms.rows import ScoredRows
from oat.errors import ConfigError
from oat.lazy import lazily
from oat.types import Branching, Trajectory

if TYPE_CHECKING:
    import torch

    from oat import functional as F
else:
    torch, F = lazily("torch"), lazily("oat.functional")


@dataclass(frozen=True)
class VineConfig:
    """The branches of `advantage: vine`."""

    branches: int = 3
    """Number of branches from the beginning of each step of a response, except the first step. The paper has
    9, and measures 1 and 3 too."""
    delimiter: str = "\n"
    """The string at whose end a step ends."""
    most_steps: int = 8
    """Largest number of steps of a response; the last one has all that is left. A prompt costs at most
    samples * (1 + branches * (most_steps - 1)) queries."""

    def __post_init__(self) -> None:
        if self.branches < 1:
            raise ConfigError(f"algorithm.vine.branches is {self.branches}; it must be at least 1")
        if not self.delimiter:
            raise ConfigError("algorithm.vine.delimiter is empty; give the string that ends a step")
        if self.most_steps < 2:
            raise ConfigError(
                f"algorithm.vine.most_steps is {self.most_steps}, and one step has nothing to branch from; "
                "set it to at least 2, or choose another algorithm.advantage"
            )

    @property
    def branching(self) -> Branching:
        return Branching(self.branches, self.delimiter, self.most_steps)


def are_responses(scored: ScoredRows) -> torch.Tensor:
    """Return True for the rows that are trained, False for branches, (N,)."""
    return torch.tensor([row.branched_at == 0 for row in scored.rows], dtype=torch.bool)


def earned_by_steps(scored: ScoredRows) -> tuple[ScoredRows, CreditedRewards, dict[str, float]]:
    """Return the rows that are trained, the rewards of their steps, and metrics. A row's reward is that of
    its last step, and the other steps have 0. `CreditedRewards.values_E` has the values of the states before
    the steps.

    Args:
        scored: rows that all have a reward, among them branches.
    """
    responses_N = are_responses(scored)
    trained, sizes_of = scored.only(responses_N), _states(scored)
    members: list[Sequence[int]] = []
    rows: list[int] = []
    lengths: list[int] = []
    for number, index in enumerate(responses_N.nonzero().flatten().tolist()):
        states = {0: (), **sizes_of[index]}
        sizes = sorted(states)
        ends = [*sizes[1:], len(scored.rows[index].completion)]
        members += [states[size] for size in sizes]
        rows += [number] * len(sizes)
        lengths += [end - size for end, size in zip(ends, sizes, strict=True)]
    row_of_E, lengths_E = torch.tensor(rows, dtype=torch.long), torch.tensor(lengths, dtype=torch.long)
    last_N = row_of_E.bincount().cumsum(0) - 1
    values_E = _values(scored.rewards_N, members)
    found = CreditedRewards(
        torch.zeros(len(rows)).index_copy(0, last_N, trained.rewards_N),
        row_of_E,
        torch.where(lengths_E > 0, lengths_E.cumsum(0) - 1, -1),
        lengths_E.to(trained.rewards_N.dtype),
        values_E,
    )
    metrics = {
        "vine/branches": float((~responses_N).sum()),
        "vine/steps": len(rows) / max(1, len(trained.rows)),
        "vine/unvalued_frac": float(values_E.isnan().float().mean()) if len(rows) else 0.0,
    }
    return trained, found, metrics


def _states(scored: ScoredRows) -> dict[int, dict[int, list[int]]]:
    """Return, for each row that is no branch, its states that have a value: by the number of tokens before
    the state, the rows from whose rewards the value is made."""
    of_group: dict[int, list[int]] = defaultdict(list)
    for index, group in enumerate(scored.group_of_N.tolist()):
        of_group[group].append(index)
    found: dict[int, dict[int, list[int]]] = {}
    for indices in of_group.values():
        found |= _states_of_group({index: scored.rows[index] for index in indices})
    return found


def _states_of_group(rows: Mapping[int, Trajectory]) -> dict[int, dict[int, list[int]]]:
    """Do what `_states` does for the rows of one group, which have their indices as keys."""
    branches: dict[bytes, list[int]] = defaultdict(list)
    for index, row in rows.items():
        if row.branched_at:
            branches[_start(row, row.branched_at)].append(index)
    sizes = sorted({0, *(row.branched_at for row in rows.values())})
    passing: dict[bytes, list[int]] = defaultdict(list)
    starts: dict[int, dict[int, bytes]] = {}
    for index, row in rows.items():
        if not row.branched_at:
            inner = {size: _start(row, size) for size in sizes if 0 < size < len(row.completion)}
            starts[index] = {0: b"", **{n: start for n, start in inner.items() if start in branches}}
            for start in starts[index].values():
                passing[start].append(index)
    found: dict[int, dict[int, list[int]]] = {}
    for index, own in starts.items():
        members = {
            size: branches.get(start, []) + [other for other in passing[start] if other != index]
            for size, start in own.items()
        }
        found[index] = {size: others for size, others in members.items() if others}
    return found


def _start(row: Trajectory, size: int) -> bytes:
    return row.completion[:size].tobytes()


def _values(rewards_N: torch.Tensor, members: Sequence[Sequence[int]]) -> torch.Tensor:
    """Return the value of each state, (S,), from the rows that were sampled from it."""
    most = max(map(len, members), default=0)
    index_SG = torch.tensor([[*each, *[-1] * (most - len(each))] for each in members], dtype=torch.long)
    index_SG = index_SG.reshape(len(members), most)
    return F.values.monte_carlo_values(rewards_N[index_SG], index_SG >= 0)
