"""Functions that make a run's directory, lock it for one process, and remove it after a start that failed."""

import fcntl
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from oat.errors import ConfigError
from oat.files import DirectoryGuard, is_utf8
from oat.ledger.store import Store
from oat.ledger.trajectory_files import TrajectoryFiles
from oat.rundir.mark import EARLY, MARK, is_own, mark, named_holder, refuse_foreign, remove_own, sign, unsign

_WRITTEN = (
    "lock",
    "ledger.sqlite*",
    "ledger.trajectories",
    "ledger.trajectories/*",
    "checkpoints",
    "checkpoints/step_*",
    "evaluations",
    "sinks",
    "tensorboard",
    "wandb",
    "mlflow",
)
"""The files and folders of a run directory that are written in place. A new version of any other file is
written beside it and then renamed."""


def make_directory(directory: Path) -> list[Path]:
    """Make a run's directory if it is missing.

    Returns:
        The directories that were made: the run's, then those of its parents.

    Raises:
        ConfigError: the path is a file or has a `~`, the directory cannot be made, or this user may not
            write to the directory or to a file in it that a run writes.
    """
    if "~" in directory.parts and not directory.exists():
        raise ConfigError(
            f"{directory} has a `~`, which a shell reads at the beginning of a word alone; give --run_dir a "
            "path without it"
        )
    if not is_utf8(str(directory)):
        raise ConfigError(f"{directory} is no text in UTF-8, as a run records it; give another --run_dir")
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
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{directory} cannot be made, since Python names files in {error.encoding} here; set "
            "PYTHONUTF8=1, or give a --run_dir in ASCII"
        ) from None
    for path in (directory, *(found for name in _WRITTEN for found in directory.glob(name))):
        if not os.access(path, os.W_OK | os.X_OK if path.is_dir() else os.W_OK):
            raise ConfigError(
                f"{path} cannot be written by this user, and a run in {directory} must; change its "
                "rights, or give another --run_dir"
            )
    return made


def claim(directory: Path) -> None:
    """Make a run's directory if it is missing, and mark it, for a run that is not opened yet.

    Raises:
        ConfigError: see `make_directory`, or the directory has files and no run.
    """
    refuse_foreign(directory)
    make_directory(directory)
    mark(directory)


def unmake(made: Sequence[Path]) -> None:
    """Remove the directories that `make_directory` made, after a start that left no run in them, with the
    files of the run. A directory with other files stays."""
    with suppress(OSError):
        if made:
            remove_own(made[0])
        for place in made:
            place.rmdir()


def unclaim(directory: Path) -> None:
    """Remove the lock file and the mark of a directory that existed before a start that failed, unless the
    start has left more."""
    left = {entry.name for entry in directory.iterdir()}
    if left <= {"lock", MARK}:
        for name in sorted(left):
            (directory / name).unlink()


class Hold(DirectoryGuard):
    """The lock of a directory, which this process holds."""

    def __init__(self, file: TextIO):
        super().__init__(Path(file.name))
        self._file = file

    def sign(self) -> None:
        """Say in the lock file which process holds it. A folder without the mark of a run would be a user's
        own if its lock file were not empty (`rundir/mark.py`), so the mark comes first."""
        sign(self._file)


_locks: set[TextIO] = set()
"""The open lock files of this process. A forked child, such as a worker of a reward function, closes its
copies of them. Otherwise a child that outlives the process would keep the lock."""


def _close_locks() -> None:
    for file in _locks:
        file.close()


os.register_at_fork(after_in_child=_close_locks)


@contextmanager
def locked(directory: Path) -> Iterator[Hold]:
    """Lock a directory for this process until the context ends. If the process ends first, even by a kill,
    the lock ends with it. Children of the process do not keep the lock.

    Yields:
        The `DirectoryGuard` of the lock file, which may be signed. It tells whether the directory was moved
        or replaced: while the lock file is open, no other file gets its inode.

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
                f"{directory} is in use by another process{named_holder(directory / 'lock')}; wait for it, "
                "end it, or give another --run_dir"
            ) from None
        _locks.add(file)
        unsign(file)  # of a process that was killed
        try:
            yield Hold(file)
        finally:
            unsign(file)
            _locks.discard(file)


def refuse_idle(directory: Path) -> None:
    """Refuse the directory of a run in which no process works.

    Raises:
        ConfigError: none does.
    """
    if (directory / "lock").exists():
        try:
            with locked(directory):
                pass
        except ConfigError:
            return
    raise ConfigError(
        f"{directory}: no process works in this run, and the next one begins with compute.actors; set that"
    )


def hindrances(directory: Path) -> list[str]:
    """Return the names of the files in a run's directory without a configuration that keep a run from
    beginning there. There are none if the directory is empty, or has only files of a start that ended before
    the run's first question."""
    left = {file.name for file in directory.iterdir()}
    found = sorted(name for name in left if not is_own(name, EARLY))
    if found:
        return found
    if TrajectoryFiles.beside(directory / "ledger.sqlite").leftovers(()).paths:
        return ["ledger.trajectories"]
    if "ledger.sqlite" not in left:
        return []
    store = Store(directory / "ledger.sqlite")
    try:
        return [] if store.is_empty() else ["ledger.sqlite"]
    finally:
        store.close()
