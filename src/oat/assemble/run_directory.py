"""A run directory that a process has opened, as the boxes of the run get it."""

from dataclasses import dataclass
from pathlib import Path

from oat.control.interruption import Interruption
from oat.files import DirectoryGuard
from oat.runtime.worker_group import RestartState


@dataclass(frozen=True, eq=False)
class RunDirectory:
    """A run directory that this process has opened.

    Attributes:
        standing: the files of the directory that must not be moved, removed or replaced.
        interruption: the request to end the run, which a signal such as Ctrl-C makes.
        life: what this process keeps of the run; None: it has opened the run once.
    """

    directory: Path
    standing: DirectoryGuard
    interruption: Interruption
    life: RestartState | None = None


def unlocked_directory(directory: Path) -> RunDirectory:
    """Return a `RunDirectory` without a lock, for a run that no other process uses. Make the directory if it
    is missing."""
    directory.mkdir(parents=True, exist_ok=True)
    return RunDirectory(directory, DirectoryGuard(), Interruption())
