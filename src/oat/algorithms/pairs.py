"""Batches of pairs: from compared responses to the rows and columns that the losses of pairs read."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

import numpy as np

from oat.algorithms.base import Forward, is_even
from oat.lazy import lazily
from oat.types import ENSEMBLE, UNASKED, Batch, Feedback, Item, Mark, Trajectory

if TYPE_CHECKING:
    import torch
else:
    torch = lazily("torch")


def pair_batch(
    feedback: Feedback,
    forward: Forward,
    *,
    epochs: int = 1,
    minibatches: int = 1,
    keep_ties: bool = False,
    reference: bool = True,
    halved: Collection[Mark] = (),
) -> Batch:
    """Make a batch of pairs. Unit u has row 2u, the chosen response, and row 2u + 1, the rejected one. Column
    `reference_logps_K` has the raw log-probabilities under the reference, nats.

    A halved pair is a learned pair without a winner: its loss is the mean of two losses, one for each
    response as the chosen one. A pair with a soft label is one that an ensemble answered with a probability:
    its loss is the mean of the two losses, each weighted with the probability of its winner. Column
    `turned_U` is the weight of the loss with the rejected response as the chosen one: 1/2 for a halved pair.
    It is left out if it would be 0 for all pairs, and ties are not learned. A pair in which a response has no
    trained token counts as a pair without a winner, and is never halved.

    Args:
        keep_ties: False leaves out the pairs without a winner, except halved ones. True keeps these pairs
            too, with their rows in the order of the candidates; their `mask_U` is 0, so the losses of pairs
            leave them out.
        reference: True if the loss reads the reference.
        halved: if a pair without a winner has one of these marks, it is halved. A probability of one half
            counts as "tie". A pair of equal responses, or one that no oracle was asked about, is never
            halved.
    """
    items, first = feedback.learned, len(feedback.older)
    pairs = [winner_first(item) for item in items]
    empty = [_is_empty(item) for item in items]
    is_halved = [_counts_half(item, halved) for item in items]
    is_learned = [teaches(item, halved) for item in items]
    kept = [number for number, learned in enumerate(is_learned) if learned or keep_ties]
    rows = tuple(row for number in kept for row in pairs[number])
    metrics = {"rows/trained": float(len(rows))}
    metrics["pairs/empty_frac"] = sum(empty[first:]) / max(1, len(feedback.items))
    metrics["pairs/halved_frac"] = sum(is_halved[first:]) / max(1, len(feedback.items))
    columns = {"mask_U": torch.tensor([float(is_learned[number]) for number in kept])} if keep_ties else {}
    turned = [0.5 if is_halved[number] else 1 - believed_share(items[number]) for number in kept]
    if halved or any(turned):
        columns["turned_U"] = torch.tensor(turned)
    if rows and reference:
        columns["reference_logps_K"] = forward("reference", rows, {"raw"})["raw"]
    units = np.arange(len(kept)).repeat(2)
    return Batch(rows, units, units, columns, epochs=epochs, minibatches=minibatches, metrics=metrics)


def teaches(item: Item, halved: Collection[Mark] = ()) -> bool:
    """Return True if a loss of pairs learns from this pair: it has a winner or is halved, and both responses
    have a trained token.

    Args:
        halved: as in `pair_batch`.
    """
    return _counts_half(item, halved) or (item.label is not None and not _is_empty(item))


def believed_share(item: Item) -> float:
    """Return the probability that the chosen response of a pair wins, as an ensemble stated it. If an oracle
    labelled the pair, return 1."""
    if item.question.oracle != ENSEMBLE or item.label is None:
        return 1.0
    p = item.answer.values[0]
    return p if item.label == 0 else 1 - p


def _is_empty(item: Item) -> bool:
    return not all(row.trained.any() for row in winner_first(item))


def _counts_half(item: Item, halved: Collection[Mark]) -> bool:
    mark = "tie" if is_even(item) else item.answer.marks[0]
    if item.label is not None or mark not in halved or item.question.oracle == UNASKED or _is_empty(item):
        return False
    first, second = winner_first(item)
    return not (first.text == second.text and np.array_equal(first.ids, second.ids))


def winner_first(item: Item) -> tuple[Trajectory, Trajectory]:
    """Return the chosen and the rejected trajectory of a compared pair. If the pair has no winner, return the
    trajectories of the first and the second candidate."""
    first, second = (item.group.trajectories[pick] for pick in item.question.picks)
    return (second, first) if item.label == 1 else (first, second)


def halves(values_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Split the values of rows into values of chosen and values of rejected responses, (U,) each."""
    return values_N[0::2], values_N[1::2]
