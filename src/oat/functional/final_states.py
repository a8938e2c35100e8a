"""Rows with a final state: one more place after the last token of a row, where no token is sampled.

TRL's PPO counts the state after a response's last token as a place of its own: it has a value, and the score
is its reward. The functions of `returns.py` see it as one more token of the row.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


@dataclass(frozen=True, eq=False)
class FinalStates:
    """The places of tokens and final states. L is the number of tokens and of final states together, row
    after row.

    Attributes:
        row_of_L: index of the row of each place, in [0, num_rows), not decreasing.
        is_token_L: True for a token, False for a final state.
        has_end_N: True for a row with a final state.
    """

    row_of_L: Int[Tensor, " L"]
    is_token_L: Bool[Tensor, " L"]
    has_end_N: Bool[Tensor, " N"]

    def joined(self, values_K: Float[Tensor, " K"], ends_N: Float[Tensor, " N"]) -> Float[Tensor, " L"]:
        """Return the numbers of tokens and of final states, in their order. `ends_N` is ignored for a row
        without a final state."""
        values_L = values_K.new_zeros(len(self.row_of_L))
        values_L[self.is_token_L] = values_K
        values_L[~self.is_token_L] = ends_N[self.has_end_N].to(values_K.dtype)
        return values_L

    def parted(self, values_L: Float[Tensor, " L"]) -> tuple[Float[Tensor, " K"], Float[Tensor, " N"]]:
        """Return the numbers of the tokens, and those of the final states; 0 for a row without one."""
        ends_N = values_L.new_zeros(len(self.has_end_N))
        ends_N[self.has_end_N] = values_L[~self.is_token_L]
        return values_L[self.is_token_L], ends_N


def final_states(row_of_K: Int[Tensor, " K"], has_end_N: Bool[Tensor, " N"]) -> FinalStates:
    """Return the places of the tokens and of the final states.

    Args:
        row_of_K: index of the row of each token, not decreasing.
        has_end_N: True for the rows with a final state; such a row has at least one token.
    """
    lengths_N = row_of_K.bincount(minlength=len(has_end_N)) + has_end_N.to(row_of_K.dtype)
    rows_N = torch.arange(len(has_end_N), dtype=row_of_K.dtype, device=row_of_K.device)
    row_of_L = rows_N.repeat_interleave(lengths_N)
    is_token_L = torch.ones_like(row_of_L, dtype=torch.bool)
    is_token_L[(lengths_N.cumsum(0) - 1)[has_end_N]] = False
    return FinalStates(row_of_L, is_token_L, has_end_N)


def mean_with_end(
    values_K: Float[Tensor, " K"],
    ends_N: Float[Tensor, " N"],
    row_of_K: Int[Tensor, " K"],
    has_end_N: Bool[Tensor, " N"],
) -> Float[Tensor, " K"]:
    """Return the values; at the last token of each row with a final state, the mean of the token's value and
    the final state's. With a mask of 2 there, sums and counts are those over all places."""
    last_N = row_of_K.bincount(minlength=len(has_end_N)).cumsum(0) - 1
    places = last_N[has_end_N]
    return values_K.index_add(0, places, 0.5 * (ends_N[has_end_N] - values_K[places]))
