"""The rules for the checkpoints that stay: the newest, and the best by a metric, within a limit of size."""

import math
from dataclasses import dataclass
from pathlib import Path

from oat.errors import warn
from oat.rundir.checkpoint_files import bytes_of, names_in, place_of, row_of

_GB = 10**9


@dataclass(frozen=True)
class Retention:
    """The rules by which checkpoints stay or are removed.

    Attributes:
        keep_last: number of the newest checkpoints that stay.
        keep_best: number of the checkpoints with the highest `best_metric` that stay. If values are equal,
            the newer checkpoint counts as better.
        max_gb: limit of the size of all checkpoints together, in 10^9 bytes. Above it, the oldest are
            removed, also the best ones. The newest and the target of a roll back stay. None: no limit.
    """

    keep_last: int
    keep_best: int = 0
    best_metric: str = "eval/sampled"
    max_gb: float | None = None

    def ranked(self, directory: Path, names: list[str]) -> list[str]:
        """Return those of `names` whose checkpoint has a finite `best_metric`, the best checkpoint last."""
        values = {
            name: value
            for name in names
            if isinstance(value := row_of(directory / name).get(self.best_metric), float)
            and math.isfinite(value)
        }
        return sorted(values, key=lambda name: (values[name], place_of(name)))

    def kept(self, directory: Path, newest: str, keep: int | None) -> set[str]:
        """Return the names of the checkpoints that stay. For each step, at most one checkpoint stays. A
        checkpoint of a later step than that of `newest` does not stay.

        Args:
            newest: the name of the checkpoint that was just written, which stays.
            keep: a step whose checkpoint stays even beyond `max_gb`; None: no such step.
        """
        behind = list(
            {
                place_of(name)[0]: name for name in names_in(directory) if place_of(name) <= place_of(newest)
            }.values()
        )
        best = self.ranked(directory, behind)[-self.keep_best :] if self.keep_best else []
        needed = {newest, *(name for name in behind if place_of(name)[0] == keep)}
        chosen = {*behind[-self.keep_last :], *best, *needed}
        sizes = {name: bytes_of(directory / name) for name in behind if name in chosen}
        most = math.inf if self.max_gb is None else self.max_gb * _GB
        while sum(sizes.values()) > most and len(sizes) > len(needed):
            del sizes[next(name for name in sizes if name not in needed)]
        if (taken := sum(sizes.values())) > most:
            warn(
                f"{directory}: the checkpoints that are needed take {taken / _GB:.3g} GB, more than "
                f"checkpoint.max_gb {self.max_gb:g}; no others are kept"
            )
        return set(sizes)
