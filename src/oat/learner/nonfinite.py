"""Nonfinite numbers: NaN and infinity are found before the optimiser changes a weight. The batch that caused
them can be written to a file.

The columns of the batch, the outputs of the models, the parts of the loss and the norms of the gradients are
checked. A check of the loss alone would not be enough: the clamp of a ratio, or a saturated sigmoid, turns an
infinite log-probability into a harmless number. Values that a mask excludes are not checked. If such a value
makes a gradient nonfinite, the check of the norms finds it.

The learner counts the optimiser steps that it leaves out. The count is part of a checkpoint.
"""

import math
from collections.abc import Mapping
from pathlib import Path

import torch

from oat import wire
from oat.algorithms.base import Outputs, View
from oat.types import Batch


def nonfinite_inputs(outputs: Outputs, view: View) -> list[str]:
    """Find the columns of the batch, and the outputs of the models, that have a nonfinite value. Values that
    a mask excludes are ignored.

    Returns:
        A phrase for each, for example "old_logps_K = nan at 1 of 17 places".
    """
    counted = {
        axis: view.columns[name] > 0
        for axis, name in (("K", "mask_K"), ("U", "mask_U"))
        if name in view.columns
    }
    found = []
    for name, values in view.columns.items():
        if name[-1] in counted and not name.startswith("mask_"):
            values = values[counted[name[-1]]]
        found += _nonfinite(name, values)
    for model, given in outputs.items():
        for name, values in given.items():
            if "K" in counted and values.shape == counted["K"].shape:
                values = values[counted["K"]]
            found += _nonfinite(f"{name} of the {model}", values.detach())
    return found


def nonfinite_results(values: Mapping[str, float], norms: Mapping[str, float]) -> list[str]:
    """Return a phrase for each part of the loss, and for each model's gradient norm, that is not finite.

    Args:
        values: metrics of the optimiser step; only those under `loss/` are checked.
        norms: norm of the gradient, by model.
    """
    numbers = {name: value for name, value in values.items() if name.startswith("loss/")}
    numbers |= {f"the gradient norm of the {model}": norm for model, norm in norms.items()}
    return [f"{name} = {value}" for name, value in numbers.items() if not math.isfinite(value)]


def keep_batch(folder: Path, update: int, batch: Batch) -> Path:
    """Write the batch of an optimiser step to a file, and return the file's path. `oat.wire.decode` reads the
    file's bytes."""
    folder.mkdir(exist_ok=True)
    file = folder / f"update_{update:08d}.batch"
    file.write_bytes(wire.encode(batch))
    return file


def _nonfinite(name: str, values: torch.Tensor) -> list[str]:
    bad = values[~torch.isfinite(values)]
    return [f"{name} = {float(bad[0])} at {len(bad)} of {values.numel()} places"] if len(bad) else []
