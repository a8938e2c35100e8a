"""A run directory that a process has opened, as the boxes of the run get it."""

from dataclasses import dataclass
from pathlib import Path

from oat.control.interruption import Interruption
from oat.files import Standing
from oat.runtime.crew import Life


@dataclass(frozen=True, eq=False)
class Home:
    """A run directory that this process has opened.

    Attributes:
        standing: the files of the directory that must not be moved, removed or replaced.
        interruption: the request to end the run, which a signal such as Ctrl-C makes.
        life: what this process keeps of the run; None: it has opened the run once.
    """

    directory: Path
    standing: Standing
    interruption: Interruption
    life: Life | None = None


def unlocked_home(directory: Path) -> Home:
    """Return a `Home` without a lock, for a run that no other process uses. Make the directory if it is
    missing."""
    directory.mkdir(parents=True, exist_ok=True)
    return Home(directory, Standing(), Interruption())
