"""`oat export RUN OUT --ensemble`: write the ensemble of a run's explorer. Another run can start from it
(`explorer.ensemble.start`), and it can choose among responses (`oat generate --best-of`)."""

from functools import partial
from pathlib import Path
from typing import Literal

from oat.build.learned import ensemble_features, ensemble_weights, policy_weights, run_config
from oat.commands.swap import swapped_in
from oat.errors import ConfigError, ExportError
from oat.explore.settings import WITHIN_RUN
from oat.files import saying_what_is_free, seen
from oat.models.ensemble_files import DESCRIPTION, WEIGHTS, EnsembleDescription, save_ensemble


def export_ensemble(run_dir: Path, out: Path, which: int | Literal["best"] | None = None) -> int:
    """Write the ensemble of a run's checkpoint into the directory `out`. Return the checkpoint's step.

    Args:
        which: the checkpoint's step, "best" or None, as for `policy_weights`.

    Raises:
        ConfigError: `run_dir` holds no run, the run has no ensemble that learned, or `out` is a file.
        CheckpointError: see `policy_weights`.
        ExportError: the files cannot be written.
    """
    if out.exists() and not out.is_dir():
        raise ConfigError(f"{out} is a file; give a directory")
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
    place = seen(out).resolve()
    try:
        with (
            saying_what_is_free(place),
            swapped_in(place, partial(_files, place), (DESCRIPTION,)) as new,
        ):
            save_ensemble(new, weights, description)
    except OSError as error:
        raise ExportError(
            f"{place}: the ensemble of step {step} could not be written ({error.strerror}); make room, or "
            "give another directory, and run the same command again"
        ) from error
    return step


def _files(folder: Path) -> set[str]:
    """Return the names of the files in a folder that belong to an ensemble."""
    return {name for name in (WEIGHTS, DESCRIPTION) if (folder / name).exists()}
