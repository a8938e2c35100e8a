"""Files: atomic writes, errors that name the free bytes of a disk, damaged JSON, the file systems on which a
database may be, and relative paths.

Relative paths are resolved against the folder in which a command, a `Trainer` or a run began, because a
user's reward, callback or data function may change the working directory at any time. Wherever paths are
stored or compared (`config.yaml`, cards, digests), they stay as the user wrote them, so a run may be moved.
Code that opens a file makes its path absolute first, with the functions of this file.

Two alternatives fail. Absolute paths in a configuration would put this machine's folders into the stored
files. Going back to the folder after each call of user code would not help code that the user runs in another
thread. Some settings take a path or a hub id. Such a name is made absolute only if the process has left the
folder and the name exists there as a path.
"""

import errno
import json
import os
import re
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from oat.errors import LedgerError, OatError

_COMPILED = re.compile(r"\(os error (\d+)\)")
"""The form in which libraries written in Rust print the number of an error of the operating system."""
_start: Path | None = None
_MOUNTS = Path("/proc/self/mounts")
_NETWORK = {
    "nfs",
    "nfs4",
    "cifs",
    "smb3",
    "smbfs",
    "9p",
    "fuse.sshfs",
    "lustre",
    "gpfs",
    "beegfs",
    "ceph",
    "fuse.glusterfs",
}


def parse_json(text: str | bytes) -> Any:
    """Parse JSON text that people, or a disk, may have damaged.

    Raises:
        ValueError: the text is not JSON, or is nested so deep that Python cannot read it.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def write_atomically(path: Path, text: str) -> None:
    """Replace a file so that a reader sees, and a kill leaves, either the complete old file or the complete
    new one. The folder must exist; it is not made, since the directory of a run may have been removed."""
    with replacing(path) as new:
        new.write_text(text, encoding="utf-8")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield the path of a new file, in the same folder, for the body to write. If the body ends without an
    error, the new file replaces the file at `path`; otherwise it is removed.

    Raises:
        OSError: as `saying_what_is_free`.
    """
    new = path.with_name(f".new-{path.name}")
    try:
        with saying_what_is_free(path):
            yield new
            sync_to_disk(new)
            new.replace(path)
            sync_to_disk(path.parent)
    except BaseException:
        with suppress(OSError):
            new.unlink(missing_ok=True)
        raise


@contextmanager
def saying_what_is_free(path: Path) -> Iterator[None]:
    """Turn errors of the operating system in the body into errors that also name the file and the bytes that
    are free on its disk. Some libraries raise such errors in other classes: safetensors in its own class,
    tokenizers as plain `Exception`. These are turned too.

    Raises:
        OSError: the body raised such an error.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, OSError):
            number, text = error.errno, error.strerror or str(error)
        elif not isinstance(error, OatError) and (found := _COMPILED.search(str(error))) is not None:
            number, text = int(found[1]), os.strerror(int(found[1]))
        else:
            raise
        raise OSError(
            number, f"{text} ({bytes_free(path.parent):,} bytes are free there)", str(path)
        ) from error


def is_full(error: OSError) -> bool:
    """Return True if an error says that the disk, or this user's quota of it, is full."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def bytes_free(directory: Path) -> int:
    """Return the bytes free on the disk of a directory or, if it does not exist, of its nearest existing
    parent."""
    place = next(place for place in (directory.absolute(), *directory.absolute().parents) if place.exists())
    return shutil.disk_usage(place).free


class Standing:
    """Remembers files or folders by their inodes, those among `paths` that exist when it is made. A path is
    lost once its file or folder was moved away, removed or replaced by another."""

    def __init__(self, *paths: Path):
        self._known = {path.absolute(): found for path in paths if (found := _inode(path)) is not None}

    @property
    def is_there(self) -> bool:
        return all(_inode(path) == known for path, known in self._known.items())

    def refuse_lost(self, error: type[OatError]) -> None:
        """Raise an error if a path is lost: what is written from now on would not be part of the run.

        Args:
            error: class of the error.

        Raises:
            error: a path is lost.
        """
        for path, known in self._known.items():
            if _inode(path) != known:
                lost = next((place for place in reversed(path.parents) if not place.exists()), path)
                raise error(
                    f"{lost}: was moved, removed or replaced while a run worked with it, and nothing more is "
                    "written; put back what stood there, and the same command goes on from the last "
                    "checkpoint"
                )


def _inode(path: Path) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def sync_to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_only_address(path: Path, *, at_a_glance: bool = False) -> str:
    """Return the address by which SQLite opens a database to read it.

    To read a database that uses a write-ahead log, SQLite makes a file beside it. If no log exists, nobody is
    working on the database, and its file is complete. If this user, in addition, may not make a file there,
    the database is opened as immutable, for which SQLite makes no file.

    Args:
        at_a_glance: True if the database is read at once, before anybody can begin to work on it. Then it is
            opened as immutable if its log is missing or empty.
    """
    log = path.with_name(f"{path.name}-wal")
    has_log = log.exists() and (log.stat().st_size > 0 or not at_a_glance)
    makes_one = os.access(path.parent, os.W_OK) and not at_a_glance
    return f"{path.absolute().as_uri()}?{'mode=ro' if has_log or makes_one else 'immutable=1'}"


def refuse_network(path: Path) -> None:
    """Refuse a file on a network file system. If several file systems are mounted at one place, the last one
    in the list of mounts counts.

    Raises:
        LedgerError: the file is on a network file system.
    """
    target = str(path.resolve())
    best = ""
    kind = ""
    for place, file_system in _mounts():
        if len(place) >= len(best) and (target + "/").startswith(place.rstrip("/") + "/"):
            best, kind = place, file_system
    if kind in _NETWORK:
        raise LedgerError(
            f"{path}: lies on a network file system ({kind}), where SQLite can lose answers; give a run_dir "
            "on a local disk"
        )


def is_mounted(directory: Path) -> bool:
    """Return True if something, even a folder of the same disk, is mounted at exactly this place.

    Args:
        directory: absolute, without symbolic links.
    """
    return os.path.ismount(directory) or any(place == str(directory) for place, _ in _mounts())


def _mounts() -> Iterator[tuple[str, str]]:
    """Yield the place and the kind of each mounted file system. The system's list writes blanks in a place as
    octal escapes, which are decoded."""
    if _MOUNTS.exists():
        for line in _MOUNTS.read_text(errors="replace").splitlines():
            _, escaped, kind, *_ = line.split(" ")
            yield re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), escaped), kind


def unwritten(ledger: Path, error: sqlite3.OperationalError | sqlite3.IntegrityError) -> LedgerError:
    """Turn an error of SQLite into the error of a ledger that cannot be written."""
    if isinstance(error, sqlite3.IntegrityError):
        return LedgerError(
            f"{ledger}: another process has written what this one was about to write ({error}); one process "
            "works in a run at a time, which its `lock` sees to unless somebody removes it. End the other "
            "one, and the same command goes on"
        )
    free = bytes_free(ledger.parent)
    return LedgerError(
        f"{ledger}: the ledger cannot be written ({error}); {free:,} bytes are free there, and what it holds "
        "is whole. Make room, or mend what is wrong, and the same command goes on"
    )


@contextmanager
def seen_from(folder: Path | None = None) -> Iterator[None]:
    """Resolve relative paths in the body against `folder`; by default against the folder of the enclosing
    `seen_from`, or else against the working directory."""
    global _start
    before, _start = _start, folder or start()
    try:
        yield
    finally:
        _start = before


def start() -> Path:
    """Return the folder against which relative paths are resolved, as an absolute path."""
    return _start or Path.cwd()


def seen(path: str | Path) -> Path:
    """Return a path made absolute, without `..`. With `..`, the path of a new folder could also be another
    name of an existing folder, which would be removed if the new one was made for nothing."""
    found = Path(path) if os.path.isabs(path) else start() / path
    return found.resolve() if ".." in found.parts else found


def located(name: str) -> str:
    """Return a name for a library that resolves paths against the working directory. The name may be a path,
    or something else such as a hub id. It becomes an absolute path if the process has left the folder of
    `start` and the path exists there; otherwise it stays as it is."""
    there = seen(name)
    return name if _is_here() or not there.exists() else str(there)


def _is_here() -> bool:
    try:
        return _start is None or Path.cwd() == _start
    except OSError:  # the working directory has been removed
        return False
