"""Rows of a running batch that have had the same tokens so far.

Samples of a prompt that enter together are equal until their tokens differ. Equal rows have the same hidden
states, keys and values. So a decoding step computes one row of each set of equal rows, and writes its keys
and values for all of them.
"""

from collections.abc import Iterable, Sequence

import numpy as np

_LEAST_ROWS = 64
"""With fewer rows, a step computes every row. Its time then hardly depends on the number of rows."""
_SHARE_FROM = 1.2
"""A step computes every row if there are not more than this many times as many rows as sets."""


class EqualRows:
    """The sets of equal rows. Rows are identified by their indices from 0 to `count` - 1."""

    def __init__(self, count: int):
        self._set_N = np.arange(count)

    def enter(self, groups: Iterable[Sequence[int]]) -> None:
        """Make a set of each group of rows that enter the batch with the same tokens. A row may have been in
        the batch before."""
        for rows in groups:
            self._set_N[rows] = rows[0]

    def divide(self, rows: np.ndarray, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Divide each set by the newest token of its rows.

        Args:
            rows: (R,) indices of all rows in the batch.
            ids: (R,) newest token of each row.

        Returns:
            (C,) places in `rows` of the rows to compute, ascending: the first row of each set, or all rows if
            that would save too little. (R,) for each row, the index among the C of the one that is computed
            for it.
        """
        _, firsts, set_R = np.unique(
            np.stack([self._set_N[rows], ids]), axis=1, return_index=True, return_inverse=True
        )
        set_R = set_R.reshape(-1)
        self._set_N[rows] = rows[firsts][set_R]
        if len(rows) < _LEAST_ROWS or len(rows) <= _SHARE_FROM * len(firsts):
            every = np.arange(len(rows))
            return every, every
        order = np.argsort(firsts)
        return firsts[order], np.argsort(order)[set_R]
