"""The directory of a run: making it, locking it for one process, and removing it if no run came of it."""

import fcntl
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from oat.build.fingerprints import GIVEN
from oat.control.interruption import Interruption
from oat.errors import ConfigError
from oat.files import Standing
from oat.ledger.store import Store

_WRITTEN = (
    "lock",
    "ledger.sqlite*",
    "checkpoints",
    "checkpoints/step_*",
    "evaluations",
    "sinks",
    "tensorboard",
    "wandb",
    "mlflow",
)
"""The files and folders of a run directory that are written in place; all other files are replaced by a
rename."""


@dataclass(frozen=True, eq=False)
class Home:
    """The directory of a run that a process has opened.

    Attributes:
        standing: the files of the directory that must not be moved, removed or replaced.
        interruption: the signals that have come since the run began to start.
    """

    directory: Path
    standing: Standing
    interruption: Interruption


def unlocked_home(directory: Path) -> Home:
    """Return a home without a lock, for a run that no other process uses. The directory is made if it is
    missing."""
    directory.mkdir(parents=True, exist_ok=True)
    return Home(directory, Standing(), Interruption())


def make_directory(directory: Path) -> list[Path]:
    """Make a run's directory if it is missing.

    Returns:
        The directories that were made: the run's, then those of its parents.

    Raises:
        ConfigError: the path is a file, or the directory cannot be made. Or this user has no right to write
            to the directory, or to something in it that a run writes to.
    """
    try:
        if directory.exists() and not directory.is_dir():
            raise ConfigError(f"{directory} is a file; give another --run_dir")
        made = [place for place in (directory, *directory.parents) if not place.exists()]
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{directory} cannot be made ({error.strerror}: {error.filename}); give a --run_dir where you "
            "may write"
        ) from error
    for path in (directory, *(found for name in _WRITTEN for found in directory.glob(name))):
        if not os.access(path, os.W_OK | os.X_OK if path.is_dir() else os.W_OK):
            raise ConfigError(
                f"{path} cannot be written by this user, and a run in {directory} must; change its "
                "rights, or give another --run_dir"
            )
    return made


def unmake(made: Sequence[Path]) -> None:
    """Remove the directories that `make_directory` made if no run came of them. A parent stays if another
    process has begun to use it."""
    for place in made[:1]:
        shutil.rmtree(place)
    with suppress(OSError):
        for place in made[1:]:
            place.rmdir()


_locks: set[TextIO] = set()
"""The open lock files of this process. A forked child, such as a worker of a reward function, may outlive the
process, so the child closes its copies."""


def _close_locks() -> None:
    for file in _locks:
        file.close()


os.register_at_fork(after_in_child=_close_locks)


@contextmanager
def locked(directory: Path) -> Iterator[Standing]:
    """Lock a directory for this process until the context ends. If the process ends first, in whatever way,
    the lock ends too, even if children of the process go on.

    Yields:
        The `Standing` of the lock file, which tells whether the directory is still the same. As long as the
        lock file is open, no other file gets its inode.

    Raises:
        ConfigError: another process holds the lock, or the lock file cannot be opened.
    """
    try:
        opened = (directory / "lock").open("a")
    except OSError as error:
        raise ConfigError(
            f"{directory} cannot hold a run ({error.strerror}: {error.filename}); give another --run_dir"
        ) from error
    with opened as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(
                f"{directory} is in use by another process; wait for it, end it, or give another --run_dir"
            ) from None
        _locks.add(file)
        try:
            yield Standing(directory / "lock")
        finally:
            _locks.discard(file)


def is_unused(directory: Path) -> bool:
    """Return whether a directory is empty, or has only the files of a start that failed or was killed before
    its first question."""
    left = {file.name for file in directory.iterdir()}
    ledger = {f"ledger.sqlite{end}" for end in ("", "-journal", "-wal", "-shm")}
    if not left <= {"lock", GIVEN, ".new-config.yaml", *ledger}:
        return False
    if "ledger.sqlite" not in left:
        return True
    store = Store(directory / "ledger.sqlite")
    try:
        return store.is_empty()
    finally:
        store.close()
