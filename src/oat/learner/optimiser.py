"""Optimisers and the schedules of their learning rates.

A schedule counts optimiser steps. Its length, `schedule_steps`, is fixed when a run begins; by default it is
the number of optimiser steps that are planned for the run.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from oat.errors import ModelError

Schedule = Literal["constant", "linear", "cosine"]

FLOOR = 0.1
"""Fraction of the highest learning rate at which linear and cosine schedules end."""


@dataclass(frozen=True)
class OptimiserSettings:
    """The optimiser of one model, and its schedule.

    Attributes:
        learning_rate: the highest learning rate of the schedule.
        decoupled: True: AdamW, whose weight decay shrinks matrices directly (Loshchilov and Hutter,
            arXiv:1711.05101). False: Adam, whose weight decay is a part of the gradient of every parameter
            (L2).
        max_grad_norm: a gradient with a larger norm is scaled down to this norm.
        warmup_steps: number of optimiser steps over which the learning rate rises.
        schedule_steps: number of optimiser steps until a linear or cosine schedule ends.
    """

    learning_rate: float
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    eps: float = 1e-8
    decoupled: bool = True
    max_grad_norm: float = math.inf
    schedule: Schedule = "constant"
    warmup_steps: int = 0
    schedule_steps: int = 1

    def rate(self, step: int) -> float:
        """Return the learning rate of optimiser step `step`, counted from 0."""
        return self.learning_rate * learning_rate_factor(
            self.schedule, step, warmup=self.warmup_steps, total=self.schedule_steps
        )


def build_optimiser(
    parameters: Iterable[torch.nn.Parameter], settings: OptimiserSettings
) -> torch.optim.Adam:
    """Make an AdamW if `settings.decoupled`, else an Adam. AdamW's weight decay applies to matrices, and not
    to vectors such as biases. On the CPU a step is one fused kernel, without temporary tensors.

    Raises:
        ModelError: parameters are in half precision; rounding would undo most steps.
    """
    trainable = list(parameters)
    if any(parameter.dtype in (torch.bfloat16, torch.float16) for parameter in trainable):
        raise ModelError(
            "AdamW on bfloat16 weights loses most of its steps; load them as float32 and set "
            "learner.autocast: bfloat16"
        )
    fused = all(parameter.device.type == "cpu" for parameter in trainable) or None
    common: dict[str, Any] = {
        "lr": settings.learning_rate,
        "betas": settings.betas,
        "eps": settings.eps,
        "fused": fused,
    }
    if not settings.decoupled:
        return torch.optim.Adam(trainable, weight_decay=settings.weight_decay, **common)
    groups = [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, **common)


def learning_rate_factor(schedule: Schedule, step: int, *, warmup: int, total: int) -> float:
    """Return the learning rate of optimiser step `step`, counted from 0, as a fraction of the highest rate.

    The fraction rises linearly to 1 over the first `warmup` steps. A constant schedule then stays at 1. A
    linear or cosine schedule falls to `FLOOR` at step `total`, and stays there.
    """
    if step < warmup:
        return (step + 1) / warmup
    if schedule == "constant":
        return 1.0
    progress = min(1.0, (step - warmup) / max(1, total - warmup))
    height = 1 - progress if schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return FLOOR + (1 - FLOOR) * height
