"""Sums and means over the tokens of each row. One flat tensor, (K,), has the values of all rows."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from oat.errors import ShapeError


def segment_sum(
    values_K: Float[Tensor, " K"], row_of_K: Int[Tensor, " K"], num_rows: int
) -> Float[Tensor, " N"]:
    """Return the sum of the values of each row, (N,); 0 for a row without values.

    out_n = sum of values_k over the k with row_of_k = n.

    Args:
        values_K: any unit; the gradient flows back to it.
        row_of_K: index of the row of each value, in [0, num_rows).
        num_rows: N.

    Raises:
        ShapeError: the first two arguments differ in shape.
    """
    if values_K.shape != row_of_K.shape:
        raise ShapeError(
            f"values_K has shape {tuple(values_K.shape)} and row_of_K {tuple(row_of_K.shape)}; give one row "
            "index a value"
        )
    return values_K.new_zeros(num_rows).index_add(0, row_of_K, values_K)


def segment_mean(
    values_K: Float[Tensor, " K"], row_of_K: Int[Tensor, " K"], num_rows: int
) -> Float[Tensor, " N"]:
    """Return the mean of the values of each row, (N,); 0 for a row without values.

    Arguments as in `segment_sum`.

    Raises:
        ShapeError: the first two arguments differ in shape.
    """
    totals = segment_sum(values_K, row_of_K, num_rows)
    counts = segment_sum(torch.ones_like(values_K), row_of_K, num_rows)
    return totals / counts.clamp(min=1)
