"""The logistic function, for losses that it saturates."""

import torch
from torch import Tensor


def sigmoid(values: Tensor) -> Tensor:
    """Return sigmoid(values). `torch.sigmoid` makes its slope, s (1 - s), of the rounded s, so in float32 the
    slope is 0 from 17 on; here it has the same digits on both sides of 0."""
    return torch.where(values > 0, 1.0 - torch.sigmoid(-values), torch.sigmoid(values))
