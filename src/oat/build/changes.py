"""What `oat` computes otherwise than before, without a setting that would bring the old way back. A run that
an earlier version began goes on with what is computed now, and says so once.

`environment.json` has, for each process that made rows, the names of the changes that its version knew. What
an earlier version computed wrongly is right in begun runs too. A difference that a user may want to keep is a
setting (`EARLIER` of `config/stored.py`).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from oat.config.settings import Config
from oat.rundir.provenance import entries


@dataclass(frozen=True)
class Change:
    """A change of what `oat` computes.

    Attributes:
        name: a name that stays the same; `environment.json` records it.
        says: a sentence for the user of a run that was begun before: what is otherwise now, and why. It
            begins with a small letter and ends without a full stop.
        concerns: function that says whether a run with this configuration computes something else now.
    """

    name: str
    says: str
    concerns: Callable[[Config], bool]


CHANGES: tuple[Change, ...] = (
    Change(
        "norm of gradients in float64",
        "the norm of a gradient is summed in float64; before, its fifth digit could be wrong, and for large "
        "models its third; optim/grad_norm and the clip to learner.max_grad_norm differ by as much",
        lambda config: True,
    ),
    Change(
        "slope of an unbiased KL",
        "the gradient of a KL with algorithm.kl_unbiased is the ratio times the log-ratio times that of the "
        "log-probability; before, kl_max_log_ratio or a temperature other than 1 could turn it away from the "
        "reference",
        lambda config: bool(config.algorithm.options.get("kl_unbiased")),
    ),
)
"""All changes, oldest first. A change is removed when no run from before it can be continued any more."""


def known_changes() -> list[str]:
    """Return the names of all changes, as `environment.json` records them."""
    return [change.name for change in CHANGES]


def untold(run_dir: Path, config: Config) -> Iterator[str]:
    """Yield a sentence for each change that concerns a begun run, and that no process of the run knew.

    Args:
        run_dir: the run's directory. For a fork that is still to be made, the directory of the original run.

    Raises:
        ConfigError: `environment.json` cannot be read as a list of entries.
    """
    told = {
        name
        for entry in entries(run_dir / "environment.json")
        if isinstance(entry, dict)
        for name in entry.get("changes", ())
    }
    for change in CHANGES:
        if change.name not in told and change.concerns(config):
            yield f"{run_dir}: an earlier version of oat began this run, and from here on {change.says}"
