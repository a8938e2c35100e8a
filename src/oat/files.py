"""Functions about files: atomic writes, errors that name the free bytes of a disk, damaged JSON, network file
systems, and relative paths.

Relative paths:

* A relative path is resolved against the folder in which a command, a `Trainer` or a run began. A user's
  reward, callback or data function may change the working directory at any time.
* In stored files (`config.yaml`, cards, digests), a path stays as the user wrote it, so a run can be moved.
  Code that opens a file first makes the path absolute with the functions of this file.
* Some settings take a path or a hub id. Such a name is made absolute only if the process has left the folder
  in which it began and the name exists there as a path.

Two alternatives fail. Absolute paths in a configuration would write this machine's folders into stored files.
Restoring the working directory after each call of user code would not help code in other threads.
"""

import errno
import json
import os
import re
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from oat.errors import ConfigError, LedgerError, OatError

_COMPILED = re.compile(r"\(os error (\d+)\)")
"""Pattern of the text in which Rust libraries write the number of an error of the operating system."""
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
    """Parse JSON text that may be damaged.

    Raises:
        ValueError: the text is not JSON, or is nested too deep for Python.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def write_atomically(path: Path, text: str) -> None:
    """Replace a file atomically: a reader finds the complete old file or the complete new one, also after a
    kill. A missing folder is not made, because somebody may have removed the run directory."""
    with replacing(path) as new:
        new.write_text(text, encoding="utf-8")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield the path of a new file in the folder of `path`; the body of the `with` block writes this file. If
    the body ends without an error, the new file replaces the file at `path`; otherwise the new file is
    removed.

    Raises:
        OSError: see `saying_what_is_free`.
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
def appearing(path: Path, flag: str, is_ours: Callable[[Path], bool] = lambda _: False) -> Iterator[Path]:
    """Yield the path of a new file beside `path`, which the body of the `with` block writes. If the body ends
    without an error, the file appears at `path`, complete; otherwise it is removed. Missing folders are made.
    No file is replaced that this program did not write: the new file has a name of its own, and what stands
    at `path` is refused before the body and after it.

    Args:
        path: in a folder of the user. For the files of a run there is `replacing`.
        flag: the flag that names the file, for the message.
        is_ours: function that returns True if the file at `path` may be replaced.

    Raises:
        ConfigError: something else is at `path`, or its folder cannot be made.
        OSError: the body raised it, or the file cannot be written.
    """
    refuse_known(path, flag, is_ours)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"the folder {path.parent} cannot be made ({error.strerror}); give another {flag}, where you may "
            "write"
        ) from error
    new = path.with_name(f".new-{os.urandom(8).hex()}{path.suffix}")
    try:
        yield new
        with saying_what_is_free(path):
            sync_to_disk(new)
            refuse_known(path, flag, is_ours)
            new.replace(path)
            sync_to_disk(path.parent)
    finally:
        with suppress(OSError):
            new.unlink(missing_ok=True)


def refuse_known(path: Path, flag: str, is_ours: Callable[[Path], bool] = lambda _: False) -> None:
    """Refuse to overwrite a file. The arguments are those of `appearing`.

    Raises:
        ConfigError: there is a file, a folder or a symbolic link at `path`, and it is not ours.
    """
    if os.path.lexists(path) and not (path.is_file() and not path.is_symlink() and is_ours(path)):
        raise ConfigError(
            f"{path}: is there already, and is not overwritten; give another {flag}, or move it away"
        )


def remove(path: Path) -> None:
    """Remove a file, a symbolic link, or a folder with all that is in it, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def saying_what_is_free(path: Path) -> Iterator[None]:
    """A context that adds the file's path and the free bytes of its disk to errors of the operating system.
    This includes errors of safetensors and tokenizers, which are not subclasses of `OSError`.

    Raises:
        OSError: the body raised such an error.
    """
    try:
        yield
    except OatError:
        raise
    except Exception as error:
        if isinstance(error, OSError):
            number, text = error.errno, error.strerror or str(error)
        elif (found := _COMPILED.search(str(error))) is not None:
            number, text = int(found[1]), os.strerror(int(found[1]))
        else:
            raise
        raise OSError(
            number, f"{text} ({bytes_free(path.parent):,} bytes are free there)", str(path)
        ) from error


def is_full(error: OSError) -> bool:
    """Return True if an error says that the disk or the user's quota of the disk is full."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def bytes_free(directory: Path) -> int:
    """Return the number of free bytes on the disk of a directory. If the directory does not exist, its
    nearest existing parent decides the disk."""
    place = next(place for place in (directory.absolute(), *directory.absolute().parents) if place.exists())
    return shutil.disk_usage(place).free


class DirectoryGuard:
    """The files or folders at some paths, identified by their inodes when this object is made. A path is lost
    if its file or folder has been moved, removed or replaced since then. Paths at which nothing existed are
    ignored."""

    def __init__(self, *paths: Path):
        self._known = {path.absolute(): found for path in paths if (found := _inode(path)) is not None}

    @property
    def is_there(self) -> bool:
        return all(_inode(path) == known for path, known in self._known.items())

    def refuse_lost(self, error: type[OatError]) -> None:
        """Raise an error of the class `error` if the file or folder at one of the paths has been moved,
        removed or replaced since this object was made.

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


def is_utf8(name: str) -> bool:
    """Return True if a name or a path can be written into a file. If not, it was read from bytes that are no
    text in UTF-8."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def sync_to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_only_address(path: Path, *, at_a_glance: bool = False) -> str:
    """Return the address by which SQLite opens a database for reading.

    The address has the mode `ro` or `immutable`. With `ro`, SQLite may make files beside the database. With
    `immutable`, it makes none, but another process must not be writing to the database.

    * If the database has a write-ahead log, the mode is `ro`.
    * If it has no log, the database file is complete and not in use. The mode is `immutable` if the user may
      not make a file in the folder, and `ro` otherwise.

    Args:
        at_a_glance: True if the database is read immediately, before another process can begin to write. Then
            an empty log counts as missing, and without a log the mode is `immutable`.
    """
    log = path.with_name(f"{path.name}-wal")
    has_log = log.exists() and (log.stat().st_size > 0 or not at_a_glance)
    makes_one = os.access(path.parent, os.W_OK) and not at_a_glance
    return f"{path.absolute().as_uri()}?{'mode=ro' if has_log or makes_one else 'immutable=1'}"


def refuse_network(path: Path) -> None:
    """Refuse a file on a network file system. If several file systems are mounted at one place, the last of
    them in the system's list of mounts counts.

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


def for_sockets() -> str | None:
    """Return the folder in which to make a temporary folder that will have sockets; None means the usual one.
    The path of a socket has at most 107 bytes, so a long `TMPDIR` is no place for it."""
    return "/tmp" if os.access("/tmp", os.W_OK) else None


def is_mounted(directory: Path) -> bool:
    """Return True if a file system is mounted at exactly this directory. A bind mount counts.

    Args:
        directory: absolute, without symbolic links.
    """
    return os.path.ismount(directory) or any(place == str(directory) for place, _ in _mounts())


def _mounts() -> Iterator[tuple[str, str]]:
    """Yield the place and the kind of each mounted file system. Octal escapes, with which the system writes
    blanks in a place, are decoded."""
    if _MOUNTS.exists():
        for line in _MOUNTS.read_text(errors="replace").splitlines():
            _, escaped, kind, *_ = line.split(" ")
            yield re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), escaped), kind


def unwritten(ledger: Path, error: sqlite3.OperationalError | sqlite3.IntegrityError) -> LedgerError:
    """Return the `LedgerError` for an error that SQLite raised when it wrote the ledger."""
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
    """A context in which relative paths are resolved against `folder`. Without `folder`, the folder of the
    enclosing `seen_from` is used; if there is none, the working directory at the start of the context."""
    global _start
    before, _start = _start, folder or start()
    try:
        yield
    finally:
        _start = before


def start() -> Path:
    """Return the folder against which relative paths are resolved, as an absolute path."""
    return _start or Path.cwd()


def absolute(path: str | Path) -> Path:
    """Return the absolute form of a path, without `..`. A path with `..` could be a second name of an
    existing folder; a caller that cleans up a new folder at this path would remove the existing one."""
    found = Path(path) if os.path.isabs(path) else start() / path
    return found.resolve() if ".." in found.parts else found


def located(name: str) -> str:
    """Return a path or hub id for other libraries, which resolve paths against the working directory. If the
    working directory is not the folder `start()`, and `start()` contains a file or folder of this name,
    return its absolute path. Otherwise return the name unchanged."""
    there = absolute(name)
    return name if _is_here() or not there.exists() else str(there)


def _is_here() -> bool:
    try:
        return _start is None or Path.cwd() == _start
    except OSError:  # the working directory has been removed
        return False
