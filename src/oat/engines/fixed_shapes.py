"""The fixed shapes of a deterministic engine: widths and numbers of rows that do not depend on how requests
are batched."""

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
