"""Files: atomic writes, errors of a full disk that say what is free, damaged JSON, where a database may lie,
and relative paths.

Relative paths are seen from the folder where a command, a `Trainer` or a run began, because a user's reward,
callback or data function may change the working directory at any time. Names stay as they were given wherever
they are written down or compared (`config.yaml`, cards, digests), so that a run may be moved; only code that
opens a file makes them absolute here.

Absolute paths in a configuration would put this machine into all of these, and going back to the folder after
each call of user code would not reach that code's threads. A name that may also be a hub id becomes a path
only once the process has left the folder.
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
"""How libraries written in Rust name an error of the operating system."""
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
    """The value of JSON text that people, or a disk, may have damaged.

    Raises:
        ValueError: it is not JSON, or is nested so deep that Python cannot read it.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def write_atomically(path: Path, text: str) -> None:
    """Replace a file so that a reader, or a kill, sees the old or the new one whole. The folder must exist:
    none is made for a run whose directory has gone."""
    with replacing(path) as new:
        new.write_text(text, encoding="utf-8")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A new file beside another one. It takes the other one's place when the body ends without an error, and
    is removed otherwise.

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
    """Make errors of the operating system in the body name the file and how many bytes are free there. This
    includes those that libraries raise as classes of their own: safetensors, and tokenizers as `Exception`.

    Raises:
        OSError: one came.
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
    """True if the disk, or this user's quota of it, is full."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def bytes_free(directory: Path) -> int:
    """Bytes that are free on the disk of a directory, or of the nearest one above it that exists."""
    place = next(place for place in (directory.absolute(), *directory.absolute().parents) if place.exists())
    return shutil.disk_usage(place).free


class Standing:
    """Files or folders by their inodes, as they are when this is made: one that was moved away, removed or
    replaced by another is lost."""

    def __init__(self, *paths: Path):
        self._known = {path.absolute(): found for path in paths if (found := _inode(path)) is not None}

    @property
    def is_there(self) -> bool:
        return all(_inode(path) == known for path, known in self._known.items())

    def refuse_lost(self, error: type[OatError]) -> None:
        """Refuse to go on without one of them: what is written now would lie beside the run, or be gone with
        its process.

        Raises:
            error: one of them is lost.
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
    """The address by which SQLite opens a database to read it.

    To read a database with a write-ahead log, SQLite makes a file beside it. If this user may not make one
    and there is no log, nobody works on the database, its file has everything, and it is opened as immutable.

    Args:
        at_a_glance: the database is read at once, before anybody can begin to work on it; no file is made if
        the log is empty.
    """
    log = path.with_name(f"{path.name}-wal")
    has_log = log.exists() and (log.stat().st_size > 0 or not at_a_glance)
    makes_one = os.access(path.parent, os.W_OK) and not at_a_glance
    return f"{path.absolute().as_uri()}?{'mode=ro' if has_log or makes_one else 'immutable=1'}"


def refuse_network(path: Path) -> None:
    """Refuse a file on a network file system. In the list of mounts a later one covers earlier ones at its
    place.

    Raises:
        LedgerError: the file lies on a network file system.
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
    """True if something, even a folder of the same disk, is mounted at exactly this place.

    Args:
        directory: absolute, without symbolic links.
    """
    return os.path.ismount(directory) or any(place == str(directory) for place, _ in _mounts())


def _mounts() -> Iterator[tuple[str, str]]:
    """The place and the kind of each mounted file system; the list has blanks of a place as octal escapes."""
    if _MOUNTS.exists():
        for line in _MOUNTS.read_text(errors="replace").splitlines():
            _, escaped, kind, *_ = line.split(" ")
            yield re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), escaped), kind


def unwritten(ledger: Path, error: sqlite3.OperationalError | sqlite3.IntegrityError) -> LedgerError:
    """The error of a ledger that cannot be written, from SQLite's."""
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
    """In its body relative paths are seen from `folder`; by default from the folder of the enclosing
    `seen_from`, or else from the working directory."""
    global _start
    before, _start = _start, folder or start()
    try:
        yield
    finally:
        _start = before


def start() -> Path:
    """The folder from which relative paths are seen, absolute."""
    return _start or Path.cwd()


def seen(path: str | Path) -> Path:
    """A path made absolute, without `..`. So a folder that is still to be made is never another name of one
    that exists, which would be removed with it if it was made for nothing."""
    found = Path(path) if os.path.isabs(path) else start() / path
    return found.resolve() if ".." in found.parts else found


def located(name: str) -> str:
    """A name for a library that looks from the working directory; it may be a path, or something else such as
    a hub id. It becomes an absolute path if the process has left its start and that path exists."""
    there = seen(name)
    return name if _is_here() or not there.exists() else str(there)


def _is_here() -> bool:
    try:
        return _start is None or Path.cwd() == _start
    except OSError:  # the working directory has been removed
        return False
