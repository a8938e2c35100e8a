"""The cache of keys and values of rows that are decoded together.

It is preallocated and knows two motions: a prefill writes whole prompts into columns 0 to L - 1, a step writes one token a row at the row's
own position. Columns beyond a row's own length hold padding; whoever calls the model masks them. A model of transformers finds in it what its
attention asks of a cache (`update`); everything else it derives from the mask and the positions that it is given.
"""

from typing import Any, TypeAlias

import torch
from torch import Tensor

Rows: TypeAlias = Tensor | slice
"""Which rows: their indices, or a run of them (which is copied faster)."""


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
        self._prompts: tuple[Rows, Rows] | None = None
        self._places: tuple[Tensor, slice, Tensor] | None = None
        self._length = 0

    def expect_prompts(self, targets: Rows, sources: Rows) -> None:
        """The next forward pass carries whole prompts: row `targets[i]` of the cache takes row `sources[i]` of the pass."""
        self._prompts = targets, sources

    def expect_tokens(self, positions_R: Tensor, length: int) -> None:
        """The next forward pass carries one token a row, at these positions, and sees columns 0 to `length` - 1."""
        self._prompts, self._length = None, length
        self._places = torch.arange(self.rows, device=positions_R.device), slice(None), positions_R

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
        if self._prompts is not None:
            targets, sources = self._prompts
            held_keys[targets, :, : keys.shape[2]] = keys[sources]
            held_values[targets, :, : values.shape[2]] = values[sources]
            return keys, values
        assert self._places is not None, "a forward pass that was not announced"
        held_keys[self._places] = keys[:, :, 0]
        held_values[self._places] = values[:, :, 0]
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
