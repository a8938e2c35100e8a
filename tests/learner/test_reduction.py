"""Reduction: which terms count, their divisor, and how a batch is divided."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from objectives import row

from oat.learner.batching import micro_batches, select_rows, split_units, view_of
from oat.learner.reduction import Reduction
from oat.types import (
    Batch,
    Loss,
)


@pytest.mark.inventory(93)
def test_rows_are_shared_out_to_steps_and_passes() -> None:
    """128 rows in 2 mini-batches, with 32 rows per pass, give 2 optimiser steps of 2 passes each."""
    rows = tuple(row(np.random.default_rng(i), 2, 2) for i in range(128))
    batch = Batch(rows, np.arange(128), np.arange(128) // 8)
    steps = [
        select_rows(batch, part) for part in split_units(batch, np.random.default_rng(0).permutation(128), 2)
    ]
    assert [[len(part) for part in micro_batches(step, 32)] for step in steps] == [[32, 32], [32, 32]]


def hand_batch() -> tuple[Batch, torch.Tensor]:
    """Return three rows of 2, 1 and 3 trained tokens, with terms 1 2 | 3 | 4 5 6. Rows 0 and 1 are a pair;
    the groups are {0, 2} and {1}."""
    generator = np.random.default_rng(0)
    rows = tuple(row(generator, 2, size) for size in (2, 1, 3))
    return Batch(rows, np.array([0, 0, 1]), np.array([0, 1, 0])), torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])


HAND = {
    # per: (no mask, second token of row 0 masked, weight of row 2 doubled)
    "token": (21 / 6, 19 / 5, (6 + 30) / 6),
    "sequence": ((1.5 + 3 + 5) / 3, (1 + 3 + 5) / 3, (1.5 + 3 + 10) / 3),
    "sequence_sum": ((3 + 3 + 15) / 3, (1 + 3 + 15) / 3, (3 + 3 + 30) / 3),
    "prompt": ((18 / 5 + 3) / 2, (16 / 4 + 3) / 2, ((3 + 30) / 5 + 3) / 2),
    "constant": (21 / 30, 19 / 30, 36 / 30),
}


def reduced(batch: Batch, loss: Loss, micro: int = 64) -> float:
    reduction, total = Reduction(batch), torch.zeros(())
    offset = 0
    for number, rows in enumerate(micro_batches(batch, micro)):
        part = select_rows(batch, rows)
        view = view_of(part)
        size = {"pair": view.num_units, "step": None}.get(loss.per, len(view.row_of_K))
        terms = loss.terms if size is None else loss.terms[offset : offset + size]
        offset += size or 0
        total = total + reduction(
            replace(loss, terms=terms),
            view,
            torch.from_numpy(batch.group_of_N[rows]),
            first=number == 0,
        )
    return float(total)


@pytest.mark.parametrize("micro", [64, 1])
@pytest.mark.parametrize("per", HAND)
def test_reduction_by_hand(per: Any, micro: int) -> None:
    batch, terms = hand_batch()
    masked = Batch(
        batch.rows, batch.unit_of_N, batch.group_of_N, {"mask_K": torch.tensor([1.0, 0, 1, 1, 1, 1])}
    )
    weighted = Batch(batch.rows, batch.unit_of_N, batch.group_of_N, {"weight_N": torch.tensor([1.0, 1, 2])})
    for case, expected in zip((batch, masked, weighted), HAND[per], strict=True):
        assert reduced(case, Loss(terms, per, constant=10.0), micro) == pytest.approx(expected, rel=1e-6)


def test_pairs_and_steps_by_hand() -> None:
    batch, _ = hand_batch()
    terms_U = torch.tensor([1.0, 5.0])
    assert reduced(batch, Loss(terms_U, "pair"), 1) == 3.0
    masked = Batch(
        batch.rows,
        batch.unit_of_N,
        batch.group_of_N,
        {"mask_U": torch.tensor([1.0, 0.0]), "weight_U": torch.tensor([3.0, 1.0])},
    )
    assert reduced(masked, Loss(terms_U, "pair"), 1) == 3.0
    assert reduced(batch, Loss(torch.tensor(7.0), "step"), 1) == 7.0


def test_masked_terms_do_not_count_whatever_they_are() -> None:
    batch, terms = hand_batch()
    masked = Batch(
        batch.rows, batch.unit_of_N, batch.group_of_N, {"mask_K": torch.tensor([1.0, 0, 1, 1, 1, 1])}
    )
    for per in ("token", "sequence", "prompt"):
        terms[1] = math.nan
        assert math.isfinite(reduced(masked, Loss(terms, per)))


def test_rows_without_trained_tokens_are_in_no_denominator() -> None:
    batch, terms = hand_batch()
    rows = (*batch.rows, row(np.random.default_rng(1), 4, 0))
    wider = Batch(rows, np.array([0, 0, 1, 2]), np.array([0, 1, 0, 2]))
    for per in ("token", "sequence", "sequence_sum", "prompt"):
        assert reduced(wider, Loss(terms, per)) == pytest.approx(HAND[per][0], rel=1e-6)


def test_minibatches_cover_every_unit_once_an_epoch() -> None:
    batch, _ = hand_batch()
    rows = tuple(row(np.random.default_rng(i), 2, 2) for i in range(14))
    batch = Batch(rows, np.arange(7).repeat(2), np.arange(7).repeat(2))
    parts = list(split_units(batch, np.random.default_rng(0).permutation(7), 3))
    assert sorted(np.concatenate(parts).tolist()) == list(range(14))
    assert [len(part) for part in parts] == [6, 4, 4]
    for part in parts:
        assert (part[0::2] + 1 == part[1::2]).all()
    assert [len(part) for part in micro_batches(batch, 5)] == [4, 4, 4, 2]


def test_a_loss_with_a_mask_of_its_own() -> None:
    """The mask of the critic's loss counts the last token of row 0 twice, and leaves row 1 out. The other
    loss keeps the mask of all losses."""
    batch, terms = hand_batch()
    columns = {
        "mask_K": torch.tensor([1.0, 0.0, 1.0, 1.0, 1.0, 1.0]),
        "value_mask_K": torch.tensor([1.0, 2.0, 0.0, 1.0, 1.0, 1.0]),
    }
    own = replace(batch, columns=columns)
    expected = {
        "token": (1 + 4 + 15) / 6,
        "sequence": ((1 + 4) / 3 + 5) / 2,
        "sequence_sum": (5 + 15) / 2,
        "prompt": 20 / 6,
        "constant": 20 / (2 * 10),
    }
    for micro in (64, 2):
        for per, value in expected.items():
            loss = Loss(terms, per, constant=10.0 if per == "constant" else None)  # type: ignore[arg-type]
            assert reduced(own, replace(loss, mask="value_mask_K"), micro) == pytest.approx(value), per
            assert reduced(own, loss, micro) == pytest.approx(HAND[per][1]), per
