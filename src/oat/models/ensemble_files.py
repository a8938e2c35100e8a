"""Files of an exported ensemble: `ensemble.safetensors` with its weights, and `ensemble.json` with its shape
and the features that it reads."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.numpy import load_file
from safetensors.torch import save_file

from oat.errors import ModelError, shown
from oat.files import parse_json, seen

WEIGHTS, DESCRIPTION = "ensemble.safetensors", "ensemble.json"


@dataclass(frozen=True)
class EnsembleDescription:
    """The facts about an exported ensemble.

    Attributes:
        members, hidden, activation: as in `EnsembleConfig`.
        features: the identity of the features (`oat.rollout.features.Features`).
        step: the step of the run after which it was exported.
        backbone: path or hub id of a backbone that is loaded for the features alone. None: the features are
            the run's policy's or reference's, or the export is from a release that did not write this.
    """

    members: int
    hidden: int
    activation: str
    features: dict[str, Any]
    step: int
    backbone: str | None = None


def save_ensemble(
    folder: Path, weights: Mapping[str, torch.Tensor], description: EnsembleDescription
) -> None:
    """Write the files of an ensemble.

    Args:
        weights: by the names of `Ensemble.tensors`.
    """
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, folder / WEIGHTS)
    text = json.dumps(asdict(description), indent=1, sort_keys=True) + "\n"
    (folder / DESCRIPTION).write_text(text, encoding="utf-8")


def refuse_missing(path: str) -> None:
    """Refuse a path that is no directory with an exported ensemble, without reading its files.

    Raises:
        ModelError: a file is missing.
    """
    for name in (DESCRIPTION, WEIGHTS):
        if not (seen(path) / name).is_file():
            raise _unreadable(path, f"there is no file {seen(path) / name}")


def load_ensemble(path: str) -> tuple[dict[str, torch.Tensor], EnsembleDescription]:
    """Read an exported ensemble.

    Raises:
        ModelError: a file is missing or damaged, or a weight is not finite.
    """
    folder = seen(path)
    refuse_missing(path)
    try:
        fields = parse_json((folder / DESCRIPTION).read_text(encoding="utf-8"))
        description = EnsembleDescription(**fields)
        if not isinstance(description.features, dict):
            raise ValueError(f"the identity of its features is {shown(description.features)}")
        values = load_file(folder / WEIGHTS)  # torch's own loader fails where `oat check` runs
        weights = {name: torch.from_numpy(value) for name, value in values.items()}
    except (OSError, SafetensorError, ValueError, TypeError) as error:
        raise _unreadable(path, str(error)) from error
    for name, value in values.items():
        if bad := int((~np.isfinite(value)).sum()):
            raise ModelError(
                f"{path}: {bad} of {value.size} numbers of `{name}` in {WEIGHTS} are NaN or infinite, so its "
                "rewards would be; export an ensemble with finite weights"
            )
    return weights, description


def _unreadable(path: str, why: str) -> ModelError:
    return ModelError(
        f"{path} has no ensemble that can be read ({why}); give a directory that `oat export RUN OUT "
        "--ensemble` wrote"
    )
