"""Cuts batches by rows. Each column is cut along its own axis."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from oat.algorithms.base import View, row_index
from oat.types import Batch


def fault_of(batch: Batch) -> str | None:
    """If rows, units, groups and columns of a batch do not agree, return a sentence that says what is wrong
    and what to do. Otherwise return None."""
    features = None if batch.rows else batch.columns.get("features_N")
    count = batch.size
    if np.shape(batch.unit_of_N) != np.shape(batch.group_of_N):
        count = len(batch.rows) if features is None else len(features)
    elif features is None and len(batch.rows) != count:
        return f"there are {len(batch.rows)} rows, and unit_of_N has {count} numbers; give one a row"
    for name, numbers in (("unit_of_N", batch.unit_of_N), ("group_of_N", batch.group_of_N)):
        is_array = isinstance(numbers, np.ndarray) and numbers.shape == (count,)
        if not is_array or {*numbers.tolist()} != {*range(len({*numbers.tolist()}))}:
            return (
                f"{name} is {str(numbers)[:60]}; give one whole number a row, from 0 upward, none left out "
                f"(N is {count})"
            )
    sizes = {
        "N": batch.size,
        "U": len(set(batch.unit_of_N.tolist())),
        "K": sum(row.num_trained for row in batch.rows),
    }
    for name, values in batch.columns.items():
        axis = name[-1]
        if not isinstance(values, torch.Tensor):
            return f"the column {name} is {type(values).__name__}; make it a tensor"
        if values.requires_grad:
            return f"the column {name} carries a gradient; what `prepare` makes is constant: detach it"
        if axis not in sizes:
            return (
                f"the column {name} has no axis; end its name in _N (one value a row), _K (a trained token) "
                "or _U (a unit)"
            )
        if values.ndim < 1 or len(values) != sizes[axis]:
            shape = tuple(values.shape)
            return (
                f"the column {name} has shape {shape}; its axis {axis} has {sizes[axis]} places (N rows, K "
                "trained tokens, U units)"
            )
    return None


def select_rows(batch: Batch, rows: np.ndarray) -> Batch:
    """Return the batch of some rows, in the given order. Units and groups are numbered from 0 again, in the
    order of their old numbers.

    Args:
        rows: (n,) indices of rows. They must form complete units, and the rows of a unit must keep their
            order.
    """
    units, unit_of_N = np.unique(batch.unit_of_N[rows], return_inverse=True)
    _, group_of_N = np.unique(batch.group_of_N[rows], return_inverse=True)
    index = {"N": torch.from_numpy(rows), "U": torch.from_numpy(units)}
    if batch.rows:
        index["K"] = _tokens(batch, rows)
    columns = {name: values[index[name[-1]]] for name, values in batch.columns.items()}
    chosen = tuple(batch.rows[row] for row in rows.tolist()) if batch.rows else ()
    return Batch(chosen, unit_of_N, group_of_N, columns, is_whole=batch.is_whole)


def view_of(batch: Batch, device: torch.device | None = None) -> View:
    """Return the view of a batch that objectives get.

    Args:
        device: where its tensors are; None: the CPU.
    """
    return View(
        row_of_K=row_index(batch.rows).to(device),
        unit_of_N=torch.from_numpy(batch.unit_of_N).to(device),
        group_of_N=torch.from_numpy(batch.group_of_N).to(device),
        num_rows=batch.size,
        num_units=int(batch.unit_of_N.max()) + 1,
        num_groups=int(batch.group_of_N.max()) + 1,
        columns=columns_on(device, batch.columns),
    )


def columns_on(
    device: torch.device | None, columns: Mapping[str, torch.Tensor]
) -> Mapping[str, torch.Tensor]:
    """Return columns whose tensors are on a device; None: as they are."""
    return columns if device is None else {name: values.to(device) for name, values in columns.items()}


class StepPlan(NamedTuple):
    """What an optimiser step computes.

    Attributes:
        rows: indices of its rows in the batch.
        micro_batches: the rows of each forward pass, as indices within `rows`.
    """

    rows: np.ndarray
    micro_batches: list[np.ndarray]


def plan_of(
    batch: Batch, generator: np.random.Generator, *, most: int | None, size: int | None, tokens: int | None
) -> list[StepPlan]:
    """Plan the optimiser steps of an update: one for each mini-batch, pass after pass.

    Args:
        most: largest number of optimiser steps; None: no limit.
        size, tokens: see `micro_batches`.
    """
    units = np.arange(int(batch.unit_of_N.max()) + 1)
    found: list[StepPlan] = []
    for _ in range(batch.epochs):
        order = generator.permutation(units) if batch.shuffle and batch.minibatches > 1 else units
        for rows in split_units(batch, order, batch.minibatches):
            if most is not None and len(found) == most:
                return found
            step = select_rows(replace(batch, columns={}), rows)
            found.append(StepPlan(rows, [*micro_batches(step, size, tokens)]))
    return found


def split_units(batch: Batch, order: np.ndarray, parts: int) -> Iterator[np.ndarray]:
    """Divide the units, in the order `order`, into `parts` nearly equal shares. Yield the row indices of each
    share that has a unit."""
    rows_of_unit = _rows_of_units(batch)
    for units in np.array_split(order, parts):
        if len(units):
            yield np.concatenate([rows_of_unit[unit] for unit in np.sort(units)])


def micro_batches(batch: Batch, size: int | None, tokens: int | None = None) -> Iterator[np.ndarray]:
    """Yield the row indices of each micro-batch. A micro-batch consists of complete units, with at most
    `size` rows and `tokens` tokens in all. A unit that has more is a micro-batch of its own. None means no
    limit. A whole batch (`Batch.is_whole`) is one micro-batch."""
    if batch.is_whole:
        size = tokens = None
    pending: list[np.ndarray] = []
    count = length = 0
    for rows in _rows_of_units(batch):
        more = 0 if tokens is None else sum(len(batch.rows[row].ids) for row in rows) if batch.rows else 0
        count, length = count + len(rows), length + more
        if pending and ((size is not None and count > size) or (tokens is not None and length > tokens)):
            yield np.concatenate(pending)
            pending = []
            count = len(rows)
            length = more
        pending.append(rows)
    yield np.concatenate(pending)


def _rows_of_units(batch: Batch) -> list[np.ndarray]:
    order = np.argsort(batch.unit_of_N, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(batch.unit_of_N[order])) + 1)


def _tokens(batch: Batch, rows: np.ndarray) -> torch.Tensor:
    counts = np.array([row.num_trained for row in batch.rows])
    starts = (np.cumsum(counts) - counts)[rows]
    ends = np.cumsum(counts[rows])
    return torch.from_numpy(np.arange(ends[-1]) + np.repeat(starts - ends + counts[rows], counts[rows]))
