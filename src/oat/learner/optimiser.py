"""Optimisers and the schedules of their learning rates.

A schedule counts optimiser steps. Its length, `schedule_steps`, is fixed when a run begins; by default it is
the number of optimiser steps that are planned for the run.

The norm of a gradient, and its clip.

Squares are summed in float64: a sum of millions of squares in float32 is wrong in the third to fifth digit,
and a clip would carry the error into the weights. A gradient is taken in pieces, so no tensor is copied. The
order of the sums does not depend on the number of threads, so equal gradients have equal norms.
"""

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from oat.errors import CheckpointError, ModelError
from oat.learner.shards import local, over_ranks

Schedule = Literal["constant", "linear", "cosine"]

MOMENTS = ("step", "exp_avg", "exp_avg_sq")
"""What Adam keeps for each weight that has had a gradient, by its names there."""
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


def refuse_other_moments(
    model: str, held: Collection[str], weights: Collection[str], without: Collection[str] | None
) -> None:
    """Refuse a checkpoint that lacks moments of Adam of a model that has learned, or has others.

    Args:
        model: the model's name, for the message.
        held: the moments in the checkpoint, each as "moment/weight".
        weights: the names of the weights that learn.
        without: the names of those that had no moments, since no gradient had reached them; None: the
            checkpoint does not say, as those of earlier versions of `oat`. Then a weight may lack all of its
            moments, but not every weight.

    Raises:
        CheckpointError: moments are missing, or are there that should not be.
    """
    if without is None:
        whole = [name for name in weights if any(f"{moment}/{name}" in held for moment in MOMENTS)]
        whole = whole or [*weights]
    else:
        whole = [name for name in weights if name not in without]
    expected = {f"{moment}/{name}" for name in whole for moment in MOMENTS}
    wrong = sorted(expected ^ {*held})
    if wrong:
        raise CheckpointError(
            f"the checkpoint has other moments of Adam than the {model} needs to go on learning: "
            f"{len(wrong)} missing or unknown, for example `{wrong[0]}`; put its files back as they were, or "
            "go back to the checkpoint before it"
        )


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
    gradients = [parameter.grad.detach() for parameter in parameters if parameter.grad is not None]
    for gradient in map(local, gradients):
        gradient = gradient.reshape(-1)
        pieces = gradient.split(_PIECE if gradient.device.type == "cpu" else _PIECE_ELSEWHERE)
        squares.setdefault(gradient.device, []).extend(piece.double().square().sum() for piece in pieces)
    found = sum(float(_sum(torch.stack(parts))) for parts in squares.values())
    return math.sqrt(over_ranks(found, gradients))


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
