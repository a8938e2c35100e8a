"""`oat export RUN OUT --ensemble`: write the ensemble of a run's explorer. Another run can start from it
(`explorer.ensemble.start`), and it can choose among responses (`oat generate --best-of`)."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Literal

import torch

from oat.answering.learned import ensemble_features, ensemble_weights, policy_weights, run_config
from oat.commands.export_mark import Kind, exported, refuse_foreign
from oat.errors import ConfigError, ExportError, ModelError
from oat.explore.settings import WITHIN_RUN
from oat.files import saying_what_is_free, seen
from oat.models.ensemble_files import DESCRIPTION, WEIGHTS, EnsembleDescription, load_ensemble, save_ensemble

FILES = (WEIGHTS, DESCRIPTION)
_KIND = Kind(FILES, (DESCRIPTION,), FILES.__contains__)


def export_ensemble(run_dir: Path, out: Path, which: int | Literal["best"] | None = None) -> int:
    """Write the ensemble of a run's checkpoint into the directory `out`. Return the checkpoint's step.

    Args:
        which: the checkpoint's step, "best" or None, as for `policy_weights`.

    Raises:
        ConfigError: `run_dir` holds no run, the run has no ensemble that learned, or `out` is a file or has
            files of an ensemble that no export wrote.
        CheckpointError: see `policy_weights`.
        ExportError: the files cannot be written, or do not read back as they were written.
    """
    if out.exists() and not out.is_dir():
        raise ConfigError(f"{out} is a file; give a directory")
    place = seen(out).resolve()
    refuse_foreign(place, _KIND)
    step, _, tensors, state = policy_weights(run_dir, which)
    weights = ensemble_weights(tensors)
    if not weights:
        raise ConfigError(
            f"{run_dir}: has no ensemble that learned, so there is none to export; give a run with an "
            "explorer that has one"
        )
    members, _, hidden = weights["weight1"].shape
    options = run_config(run_dir).explorer.options
    backbone = options.get("features", {}).get("backbone")
    description = EnsembleDescription(
        members,
        hidden,
        options["ensemble"]["activation"],
        ensemble_features(state),
        step,
        None if backbone in WITHIN_RUN else backbone,
    )
    try:
        with saying_what_is_free(place), exported(place, _KIND) as new:
            save_ensemble(new, weights, description)
            _refuse_other(str(new), weights, description)
    except ExportError:
        raise
    except OSError as error:
        raise ExportError(
            f"{place}: the ensemble of step {step} could not be written ({error.strerror}); make room, or "
            "give another directory, and run the same command again"
        ) from error
    return step


def _refuse_other(folder: str, weights: Mapping[str, torch.Tensor], told: EnsembleDescription) -> None:
    """Read an ensemble back, and refuse it if it is not the one that was to be written.

    Raises:
        ExportError: it is another one.
    """
    try:
        found, description = load_ensemble(folder)
    except ModelError as error:
        raise ExportError(f"the ensemble does not read back ({error}); nothing is exported") from error
    wrong = sorted(
        name
        for name in {**weights, **found}
        if name not in found or name not in weights or not torch.equal(found[name], weights[name].cpu())
    )
    if wrong or json.dumps(asdict(description)) != json.dumps(asdict(told)):
        raise ExportError(
            f"the ensemble does not read back as it was written ({', '.join(wrong) or DESCRIPTION}); nothing "
            "is exported. Check the disk, and run the same command again"
        )
