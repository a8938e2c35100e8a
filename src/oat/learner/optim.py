"""AdamW and its schedule."""

import math
from typing import Literal

import torch

FLOOR = 0.1
"""Share of the top learning rate at which linear and cosine schedules end."""


def build_adamw(module: torch.nn.Module, *, learning_rate: float, betas: tuple[float, float], weight_decay: float) -> torch.optim.AdamW:
    """AdamW over the trainable parameters: matrices decay, vectors (biases, norms) do not."""
    trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=learning_rate, betas=betas)


def learning_rate_factor(schedule: Literal["constant", "linear", "cosine"], step: int, *, warmup: int, total: int) -> float:
    """Share of the top learning rate at optimiser step `step` (from 0).

    Rises linearly to 1 at step `warmup`; then stays, or falls along a line or half a cosine to a tenth at step `total`, and stays there.
    """
    if step < warmup:
        return (step + 1) / warmup
    if schedule == "constant":
        return 1.0
    progress = min(1.0, (step - warmup) / max(1, total - warmup))
    height = 1 - progress if schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return FLOOR + (1 - FLOOR) * height
