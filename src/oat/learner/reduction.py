"""The reduction of losses over one optimiser step, under gradient accumulation.

A loss has a term x for each token or for each pair, or one term for the optimiser step. `Loss.per` chooses a
row of the table. Masks m (1 counts, 0 does not) and weights w are columns of the batch, so every denominator
is known before the first forward pass. The number of micro-batches therefore changes the gradient only by
rounding. By default the mask of tokens is `mask_K`; a loss may name another column (`Loss.mask`), whose name
ends in `_mask_K`.

| per | numerator | denominator |
| --- | --- | --- |
| token | sum over tokens of w m x | sum over tokens of m |
| sequence | sum over rows of w (sum m x / sum m) | rows with a trained token |
| sequence_sum | sum over rows of w (sum m x) | rows with a trained token |
| prompt | sum over groups of (sum over the group's tokens of w m x / sum m) | groups with a trained token |
| constant | sum over tokens of w m x | rows with a trained token, times `Loss.constant` |
| pair | sum over pairs of w m x | sum over pairs of m |
| step | x, a function of the parameters | 1; added only in the first forward pass |
"""

from dataclasses import dataclass

import torch

from oat.algorithms.base import View
from oat.functional.segments import segment_sum
from oat.learner.batching import view_of
from oat.types import Batch, Loss


@dataclass(frozen=True, eq=False)
class _Counts:
    """What the denominators count of one mask.

    Attributes:
        tokens_of_group: (num_groups,) the sum of the mask over the tokens of each group.
    """

    tokens: float
    tokens_of_group: torch.Tensor
    groups: int
    rows: int

    @classmethod
    def of(cls, view: View, mask: str) -> "_Counts":
        mask_K = _column(view, mask, len(view.row_of_K))
        tokens_of_group = segment_sum(mask_K, view.group_of_N[view.row_of_K], view.num_groups)
        groups, rows = int((tokens_of_group > 0).sum()), int((view.row_sum(mask_K) > 0).sum())
        return cls(float(mask_K.sum()), tokens_of_group, groups, rows)


class Reduction:
    """The denominators of one optimiser step.

    Args:
        step: all rows of the optimiser step.
    """

    def __init__(self, step: Batch):
        view = view_of(step)
        masks = {"mask_K", *(name for name in view.columns if name.endswith("_mask_K"))}
        self.counts = {name: _Counts.of(view, name) for name in masks}
        self.pairs = float(_column(view, "mask_U", view.num_units).sum())

    def __call__(self, loss: Loss, view: View, groups: torch.Tensor, *, first: bool) -> torch.Tensor:
        """Return what one forward pass adds to `loss`, a part of the optimiser step's total loss; a scalar.
        It is not yet multiplied by `Loss.coef`.

        Args:
            view: the view of the forward pass.
            groups: (N,) index of each row's group within the optimiser step.
            first: True for the first forward pass of the optimiser step.
        """
        if loss.per == "step":
            return loss.terms if first else torch.zeros_like(loss.terms)
        if loss.per == "pair":
            kept_U = _column(view, "mask_U", view.num_units)
            return (_masked(loss.terms, kept_U) * _column(view, "weight_U", view.num_units)).sum() / max(
                1.0, self.pairs
            )
        counts = self.counts[loss.mask]
        mask_K, weight_N = (
            _column(view, loss.mask, len(view.row_of_K)),
            _column(view, "weight_N", view.num_rows),
        )
        terms_K = _masked(loss.terms, mask_K)
        if loss.per == "sequence":
            return (weight_N * view.row_sum(terms_K) / view.row_sum(mask_K).clamp(min=1)).sum() / max(
                1, counts.rows
            )
        if loss.per == "sequence_sum":
            return (weight_N * view.row_sum(terms_K)).sum() / max(1, counts.rows)
        weighted_K = terms_K * weight_N[view.row_of_K]
        if loss.per == "prompt":
            tokens_K = counts.tokens_of_group.to(groups.device)[groups[view.row_of_K]]
            return (weighted_K / tokens_K.clamp(min=1)).sum() / max(1, counts.groups)
        if loss.per == "constant":
            assert loss.constant is not None, 'per="constant" needs Loss.constant'
            return weighted_K.sum() / max(1.0, counts.rows * loss.constant)
        return weighted_K.sum() / max(1.0, counts.tokens)


def _column(view: View, name: str, length: int) -> torch.Tensor:
    return view.columns[name] if name in view.columns else torch.ones(length, device=view.unit_of_N.device)


def _masked(terms: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the terms times the mask; 0 where the mask is 0, even if the term is NaN."""
    return torch.where(mask > 0, terms * mask, torch.zeros_like(terms))
