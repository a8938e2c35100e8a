"""The norm of a gradient, and its clip.

Squares are summed in float64: a sum of millions of squares in float32 is wrong in the third to fifth digit,
and a clip would carry the error into the weights. A gradient is taken in pieces, so no tensor is copied. The
order of the sums does not depend on the number of threads, so equal gradients have equal norms.
"""

import math
from collections.abc import Iterable

import torch

_PIECE = 2**14
"""Number of elements of a piece on a CPU. torch shares an operation among threads from twice as many on;
waiting for threads would cost more than they save."""
_PIECE_ELSEWHERE = 2**22
"""That on other devices, where each operation has a cost of its own; 34 MB in float64."""


def gradient_norm(parameters: Iterable[torch.nn.Parameter]) -> float:
    """Return the Euclidean norm of the gradients of all parameters together; 0 if none has a gradient. It is
    infinite or NaN if an element is.

    Gradients may be of any precision, and on several devices. Each device is waited for once.
    """
    squares: dict[torch.device, list[torch.Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is None:
            continue
        gradient = parameter.grad.detach().reshape(-1)
        pieces = gradient.split(_PIECE if gradient.device.type == "cpu" else _PIECE_ELSEWHERE)
        squares.setdefault(gradient.device, []).extend(piece.double().square().sum() for piece in pieces)
    return math.sqrt(sum(float(_sum(torch.stack(parts))) for parts in squares.values()))


def clip_gradient(parameters: Iterable[torch.nn.Parameter], most: float) -> float:
    """Scale the gradients of all parameters, in place, so that their norm together is at most `most`. Leave
    them if their norm is not finite.

    Returns:
        The norm before.
    """
    parameters = list(parameters)
    norm = gradient_norm(parameters)
    if most < norm < math.inf:
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(most / norm)
    return norm


def _sum(values: torch.Tensor) -> torch.Tensor:
    """Return the sum of a vector, a scalar. No sum in it has more than `_PIECE` numbers."""
    while len(values) > _PIECE:
        values = torch.stack([part.sum() for part in values.split(_PIECE)])
    return values.sum()
