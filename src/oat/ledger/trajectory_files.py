"""The files in which a ledger keeps trajectories: one file for the trajectories of a round, named by the
SHA-256 of its content, in `ledger.trajectories/` beside `ledger.sqlite`.

* A file is complete and on disk before the row that names it, and is removed only after the last such row. A
  kill in between leaves a file that no row names. The next opening of the ledger for writing removes it.
* A file never changes. So runs may share files by hard links, as a fork does with its parent.
* The first digit of the name gives the folder, so that no folder has too many files. More digits would make
  more folders, and the first file in a folder has to force this folder to disk too.
"""

import hashlib
import os
import re
import shutil
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from oat.errors import LedgerError
from oat.files import replacing, saying_what_is_free, sync_to_disk

_NAME = re.compile(r"[0-9a-f]{64}")
_LEFT = re.compile(r"(\.new-)?[0-9a-f]{64}")
"""Names of the files that this module writes. `.new-` marks a file that is not complete."""


class Leftovers(NamedTuple):
    """The files that no row names."""

    paths: list[Path]
    bytes: int


def is_name(name: object) -> bool:
    """Return True if this is a name of a file of trajectories. A damaged row may have anything else, which
    must not become a path."""
    return isinstance(name, str) and _NAME.fullmatch(name) is not None


class TrajectoryFiles:
    """The files of one ledger.

    Attributes:
        directory: their folder.
    """

    def __init__(self, directory: Path):
        self.directory = directory

    @classmethod
    def beside(cls, database: Path) -> "TrajectoryFiles":
        """Return the files of the ledger whose database is at this path."""
        return cls(database.with_name(f"{database.stem}.trajectories"))

    def make(self) -> None:
        """Make the folder if it is missing.

        Raises:
            LedgerError: it cannot be made, or is a symbolic link.
        """
        self.refuse_link()
        self._make_missing(self.directory)

    def refuse_link(self) -> None:
        """Refuse a folder that is a symbolic link. A copy of the run directory would have a link to the same
        folder, and each run would remove the other's files.

        Raises:
            LedgerError: the folder is a symbolic link.
        """
        if self.directory.is_symlink():
            raise LedgerError(
                f"{self.directory}: is a symbolic link. A copy of the run would share the folder, and each "
                "run would remove the other's files; put the folder itself there, or give a run_dir on the "
                "other disk"
            )

    def write(self, name: str, data: bytes) -> None:
        """Write the file of this name, and force it to disk. If it is there with this content, keep it.

        Raises:
            LedgerError: the file cannot be written.
        """
        path = self.path(name)
        self._make_missing(path.parent)
        with _writing(path):
            if _has(path, data):
                sync_to_disk(path.parent)
                return
            with replacing(path) as new:
                new.write_bytes(data)

    def read(self, name: str) -> bytes:
        """Return the content of the file of this name.

        Raises:
            LedgerError: the name is none, or the file is missing, cannot be read, or was cut or changed.
        """
        if not is_name(name):
            raise LedgerError(
                f"{self.directory}: a round names its trajectories {str(name)[:80]!r}, which is no name of "
                f"a file there; {_HINT}"
            )
        path = self.path(name)
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            raise LedgerError(f"{path}: is missing, and has the trajectories of a round; {_HINT}") from None
        except OSError as error:
            raise LedgerError(
                f"{path}: cannot be read ({error.strerror}), and has the trajectories of a round; {_HINT}"
            ) from error
        if hashlib.sha256(data).hexdigest() != name:
            raise LedgerError(f"{path}: is not what was written there, it was cut or changed; {_HINT}")
        return data

    def missing(self, names: Iterable[str]) -> list[str]:
        """Return those of these names that have no file. The content of the files is not read."""
        return [name for name in names if not (is_name(name) and os.path.isfile(self.path(name)))]

    def remove(self, names: Iterable[str]) -> None:
        """Remove the files of these names. One that cannot be removed stays; no row names it any more."""
        for name in filter(is_name, names):
            with suppress(OSError):
                self.path(name).unlink()

    def leftovers(self, needed: Collection[str]) -> Leftovers:
        """Return the files that are not needed: what a kill has left, or what another process is writing."""
        paths, size = [], 0
        for path in self._all():
            if path.name not in needed:
                with suppress(OSError):
                    size += path.lstat().st_size
                    paths.append(path)
        return Leftovers(sorted(paths), size)

    def sweep(self, needed: Collection[str]) -> None:
        """Remove the files that are not needed. Other files in the folder stay. So does a file that cannot be
        removed."""
        for path in self.leftovers(needed).paths:
            with suppress(OSError):
                path.unlink()

    def take_over(self, other: "TrajectoryFiles", names: Iterable[str]) -> None:
        """Get the files of these names from another ledger, and force them to disk. Names without a file are
        left out.

        A file never changes, so a hard link shares it, and neither ledger notices if the other one removes
        its name. Where a link is not possible, as on another disk, the file is copied.

        Raises:
            LedgerError: a file cannot be written.
        """
        self.make()
        folders = set()
        for name in filter(is_name, names):
            theirs, path = other.path(name), self.path(name)
            self._make_missing(path.parent)
            with _writing(path):
                _link_or_copy(theirs, path)
            folders.add(path.parent)
        for folder in folders:
            with _writing(folder):
                sync_to_disk(folder)

    def path(self, name: str) -> Path:
        """Return the path of the file of this name (`is_name`)."""
        assert is_name(name), "checked before it becomes a path"
        return self.directory / name[0] / name

    def _all(self) -> Iterator[Path]:
        """Yield the files that this module may have written."""
        with suppress(OSError):
            for folder in os.scandir(self.directory):
                if re.fullmatch("[0-9a-f]", folder.name) and folder.is_dir(follow_symlinks=False):
                    for file in os.scandir(folder):
                        if _LEFT.fullmatch(file.name):
                            yield Path(file.path)

    def _make_missing(self, folder: Path) -> None:
        """Make a folder if it is missing, and force it to disk. Its parent is not made: somebody may have
        removed the run."""
        if os.path.isdir(folder):
            return
        with _writing(folder), saying_what_is_free(folder):
            folder.mkdir()
            sync_to_disk(folder.parent)


_HINT = (
    "put it back from a copy (`oat ledger RUN --check` says what else is wrong), or begin anew in another "
    "run_dir"
)


def _link_or_copy(file: Path, path: Path) -> None:
    """Make `path` a hard link to a file or, where that is not possible, a copy. Do nothing if the file is
    missing."""
    try:
        os.link(file.resolve(), path)
    except FileNotFoundError:
        return
    except OSError:
        with suppress(FileNotFoundError), replacing(path) as new:
            shutil.copyfile(file, new)


def _has(path: Path, data: bytes) -> bool:
    try:
        return path.stat().st_size == len(data) and path.read_bytes() == data
    except OSError:
        return False


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Raise a LedgerError in place of an error of the operating system."""
    try:
        yield
    except OSError as error:
        raise LedgerError(
            f"{path}: trajectories cannot be written ({error.strerror}); what the ledger holds is whole. "
            "Make room, or mend what is wrong, and the same command goes on"
        ) from error
