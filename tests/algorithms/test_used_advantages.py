"""The advantages of a step's responses, as people see them."""

import math

import numpy as np
import torch
from scored_groups import feedback

from oat.algorithms.base import used_advantages
from oat.types import Batch


def batch(rows: list, **columns: torch.Tensor) -> Batch:
    return Batch(tuple(rows), np.arange(len(rows)), np.zeros(len(rows), dtype=int), columns)


def test_each_response_has_the_number_that_the_losses_read() -> None:
    """The batch has other rows too, in another order, and lacks one. Responses have 1, 4 and 2 tokens."""
    items = feedback((1.0, 0.0, 2.0), (1.0, 0.0)).items
    first, _, third = items[0].group.trajectories
    older = feedback((5.0,)).items[0].group.trajectories[0]
    rows = [older, third, *items[1].group.trajectories, first]
    values = torch.tensor([9.0, 0.1, math.inf, -0.3, 0.7])
    used = used_advantages(batch(rows, advantages_N=values), items)
    assert used == [[0.7, None, 0.1], [None, -0.3]]
    assert used_advantages(batch(rows, advantages_N=values), ()) == []
    assert used_advantages(batch(rows), items) is None


def test_advantages_of_tokens_are_averaged() -> None:
    items = feedback((1.0, 0.0, 2.0)).items
    first, second, third = items[0].group.trajectories
    values = torch.tensor([1.0, 2.0, 3.0, 6.0, 0.5, 0.25, 0.0])
    used = used_advantages(batch([second, third, first], advantages_K=values), items)
    assert used == [[0.0, 3.0, 0.375]]
