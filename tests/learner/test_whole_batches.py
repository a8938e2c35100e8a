"""A batch that is whole is one forward pass, whatever the limits of a pass are."""

import numpy as np
import pytest
import torch

from oat.learner.batching import micro_batches, select_rows
from oat.types import Batch


@pytest.mark.parametrize(("size", "tokens"), [(1, None), (3, 1), (None, None)])
def test_a_whole_batch_is_not_cut(size: int | None, tokens: int | None) -> None:
    units = np.arange(4).repeat(2)
    batch = Batch((), units, units, {"features_N": torch.zeros(8, 2)}, minibatches=2, is_whole=True)
    assert [rows.tolist() for rows in micro_batches(batch, size, tokens)] == [list(range(8))]
    half = select_rows(batch, np.arange(4))
    assert [rows.tolist() for rows in micro_batches(half, size, tokens)] == [list(range(4))]


def test_other_batches_are() -> None:
    units = np.arange(4).repeat(2)
    batch = Batch((), units, units, {"features_N": torch.zeros(8, 2)})
    assert [len(rows) for rows in micro_batches(batch, 3)] == [2, 2, 2, 2]
