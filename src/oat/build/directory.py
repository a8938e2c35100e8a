"""A run's directory: made, locked by one process, and removed again where no run came of it."""

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
"""The files and folders that a run writes in place; it replaces all others."""


@dataclass(frozen=True, eq=False)
class Home:
    """The directory of a run that a process has opened.

    Attributes:
        standing: the files of the directory that must stay what they are.
        interruption: the signals that have come since the run began to start.
    """

    directory: Path
    standing: Standing
    interruption: Interruption


def unlocked_home(directory: Path) -> Home:
    """The home of a run that no process has locked; the directory is made where it is missing."""
    directory.mkdir(parents=True, exist_ok=True)
    return Home(directory, Standing(), Interruption())


def make_directory(directory: Path) -> list[Path]:
    """Make a run's directory, unless it is there; returns it and its parents, as far as they were made.

    Raises:
        ConfigError: it is a file or cannot be made, or this user may not write to something in it that a run
            writes to.
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
    """Remove the directories that `make_directory` made, where no run came of them; a parent stays if another
    process has begun to use it."""
    for place in made[:1]:
        shutil.rmtree(place)
    with suppress(OSError):
        for place in made[1:]:
            place.rmdir()


_locks: set[TextIO] = set()
"""The open lock files of this process. A forked child, such as a worker of a reward function, may outlive the
process, so it closes its copies."""


def _close_locks() -> None:
    for file in _locks:
        file.close()


os.register_at_fork(after_in_child=_close_locks)


@contextmanager
def locked(directory: Path) -> Iterator[Standing]:
    """Lock a directory for this process; the lock ends with the process, however it ends and whatever
    children it leaves.

    Yields:
        Whether the directory is still the same, which the lock file's inode tells: no other file gets that
        inode as long as this one is open.

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
    """Return whether a directory is empty, or holds only the files of a start that failed or was killed
    before its first question."""
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
