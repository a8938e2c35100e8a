"""`oat export RUN OUT --ensemble`: write the ensemble of a run's explorer, from which another run can start
(`explorer.ensemble.start`)."""

from functools import partial
from pathlib import Path
from typing import Literal

from oat.build.learned import policy_weights, run_config, weights_prefix
from oat.commands.swap import swapped_in
from oat.errors import ConfigError, ExportError
from oat.files import saying_what_is_free, seen
from oat.models.ensemble_files import DESCRIPTION, WEIGHTS, EnsembleDescription, save_ensemble
from oat.types import ENSEMBLE


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
    prefix = weights_prefix(ENSEMBLE)
    weights = {
        name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)
    }
    if not weights:
        raise ConfigError(
            f"{run_dir}: has no ensemble that learned, so there is none to export; give a run with an "
            "explorer that has one"
        )
    members, _, hidden = weights["weight1"].shape
    activation = run_config(run_dir).explorer.options["ensemble"]["activation"]
    features = state[ENSEMBLE].get("features", {})
    description = EnsembleDescription(members, hidden, activation, features, step)
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
