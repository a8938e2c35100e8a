"""The cache of keys and values of rows that are decoded together.

It is preallocated and knows two motions: a prefill writes whole prompts into columns 0 to L - 1, a step writes one token a row at the row's
own position. Columns beyond a row's own length hold padding; whoever calls the model masks them. A model of transformers finds in it what its
attention asks of a cache (`update`); everything else it derives from the mask and the positions that it is given.
"""

from typing import Any

import torch
from torch import Tensor


class KeyValueCache:
    """Keys and values of `rows` rows, (R, heads, capacity, head width) for each layer, allocated when the layer first writes.

    Attributes:
        rows: R.
        capacity: most tokens a row can hold.
    """

    def __init__(self, rows: int, capacity: int):
        self.rows = rows
        self.capacity = capacity
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        self._prefill: tuple[Tensor, Tensor] | None = None
        self._positions_R = torch.empty(0)
        self._all_R = torch.empty(0)
        self._length = 0

    def expect_prompts(self, targets: Tensor, sources: Tensor) -> None:
        """The next forward pass carries whole prompts: row `targets[i]` of the cache takes row `sources[i]` of the pass."""
        self._prefill = (targets, sources)

    def expect_tokens(self, positions_R: Tensor, length: int) -> None:
        """The next forward pass carries one token a row, at these positions, and sees columns 0 to `length` - 1."""
        self._prefill, self._positions_R, self._length = None, positions_R, length
        self._all_R = torch.arange(self.rows, device=positions_R.device)

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write a layer's new keys and values, and return those that its queries see.

        Args:
            keys, values: (P, heads, L, head width) in a prefill, (R, heads, 1, head width) in a step.
        Returns:
            A prefill's own keys and values, or the first `length` columns of the cache.
        """
        if layer_idx not in self._layers:
            self._layers[layer_idx] = (self._allocate(keys), self._allocate(values))
        held_keys, held_values = self._layers[layer_idx]
        if self._prefill is not None:
            targets, sources = self._prefill
            held_keys[targets, :, : keys.shape[2]] = keys[sources]
            held_values[targets, :, : values.shape[2]] = values[sources]
            return keys, values
        held_keys[self._all_R, :, self._positions_R] = keys[:, :, 0]
        held_values[self._all_R, :, self._positions_R] = values[:, :, 0]
        return held_keys[:, :, : self._length], held_values[:, :, : self._length]

    def keep(self, rows: Tensor) -> None:
        """Drop all rows but these, in this order."""
        self._layers = {index: (keys[rows], values[rows]) for index, (keys, values) in self._layers.items()}
        self.rows = len(rows)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Some models ask, then use the positions that they are given."""
        return self._length

    def _allocate(self, like: Tensor) -> Tensor:
        return like.new_zeros(self.rows, like.shape[1], self.capacity, like.shape[3])
