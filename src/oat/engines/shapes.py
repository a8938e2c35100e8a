"""The shapes of an engine's passes: how many tokens and rows one has. Those of a deterministic engine do not
depend on how requests are batched."""

from collections.abc import Iterator

import numpy as np

PASS_TOKENS = 16_384
"""Largest number of tokens of a forward pass over several complete sequences."""
_STEP = 16
"""Unit of the number of rows in a decoding step. Up to this number, the rows are padded to a power of two;
beyond it, to a multiple of this number."""
_LEAST_WIDTH, _LEAST_ROWS = 16, 64


def power_above(number: int) -> int:
    """Return the smallest power of two that is not below the number."""
    return 1 << (number - 1).bit_length()


def power_below(number: int) -> int:
    """Return the largest power of two that is not above the number, at least 1."""
    return 1 << max(number, 1).bit_length() - 1


def fixed_width(length: int) -> int:
    """Return the number of tokens to which a deterministic engine pads a sequence of `length` tokens."""
    return max(power_above(length), _LEAST_WIDTH)


def fixed_rows(max_rows: int) -> int:
    """Return the number of rows that a deterministic engine decodes together."""
    return max(power_above(max_rows), _LEAST_ROWS)


def filled_up(rows: int) -> int:
    """Return the number of rows that a decoding step with `rows` rows computes, padding included.

    Few different numbers are returned. This saves time on a CPU, where oneDNN takes half a millisecond to
    make a kernel for each new shape of a matrix product.
    """
    return 1 << (rows - 1).bit_length() if rows <= _STEP else -(-rows // _STEP) * _STEP


def passes(widths: np.ndarray) -> Iterator[list[int]]:
    """Yield the indices of the sequences of each pass: consecutive sequences whose widths add up to at most
    `PASS_TOKENS`. A wider sequence is a pass of its own."""
    some: list[int] = []
    total = 0
    for number, width in enumerate(widths.tolist()):
        if some and total + width > PASS_TOKENS:
            yield some
            some, total = [], 0
        some.append(number)
        total += width
    if some:
        yield some
