"""Files that are whole after a kill, errors of a full disk that say what is free, JSON that may be damaged,
where a database may lie, and relative paths, which lead from where a command, a `Trainer` or a run began,
whatever the working directory becomes meanwhile.

A user's reward, callback or data function may change the working directory at any time. Names stay as they
were given wherever they are written down or held against each other (`config.yaml`, cards, digests), so that
a run may be moved; only what opens a file asks here.
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
"""What the errors of libraries in Rust say of one of the operating system."""
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
    """JSON of a file that people, or a disk, may have damaged.

    Raises:
        ValueError: it is none, or is nested so deep that Python cannot read it.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def write_atomically(path: Path, text: str) -> None:
    """Replace a file so that a reader, or a kill, sees the old or the new one whole. Its folder has to be
    there, so that none is made anew for a run whose directory has gone."""
    with replacing(path) as new:
        new.write_text(text, encoding="utf-8")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file to write beside another one; it takes its place when this ends well, and otherwise is removed.

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
    """An error of the operating system within it also names the file, and how many bytes are free there. Such
    errors also come as other classes: of safetensors, and plain `Exception` of tokenizers.

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
    """Whether the disk, or this user's part of it, has no room."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def bytes_free(directory: Path) -> int:
    """What may still be written to the disk of a directory, or of the nearest one above it that exists."""
    place = next(place for place in (directory.absolute(), *directory.absolute().parents) if place.exists())
    return shutil.disk_usage(place).free


class Standing:
    """Files or folders as they are when this is made, by their inodes: what is moved away, removed or
    replaced by another is no longer there."""

    def __init__(self, *paths: Path):
        self._known = {path.absolute(): found for path in paths if (found := _inode(path)) is not None}

    @property
    def is_there(self) -> bool:
        return all(_inode(path) == known for path, known in self._known.items())

    def refuse_lost(self, error: type[OatError]) -> None:
        """What is written there now would be written beside the run, or be gone with its process.

        Raises:
            error: one of them is no longer there.
        """
        for path, known in self._known.items():
            if _inode(path) != known:
                lost = next((place for place in reversed(path.parents) if not place.exists()), path)
                raise error(
                    f"{lost}: was moved, removed or replaced while a run worked with it, and nothing more "
                    "is written; put back what stood there, and "
                    "the same command goes on from the last checkpoint"
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
    """What SQLite opens a database by that stays as it is.

    To read one with a write-ahead log SQLite makes a file beside it. Where this user may not, and there is no
    log, nobody works on it, and the file alone has everything.

    Args:
        at_a_glance: it is read in a moment, in which nobody begins to work on it; so no file is made where
        the log has nothing.
    """
    log = path.with_name(f"{path.name}-wal")
    has_log = log.exists() and (log.stat().st_size > 0 or not at_a_glance)
    makes_one = os.access(path.parent, os.W_OK) and not at_a_glance
    return f"{path.absolute().as_uri()}?{'mode=ro' if has_log or makes_one else 'immutable=1'}"


def refuse_network(path: Path) -> None:
    """A mount later in the list covers earlier ones at its place.

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
            f"{path}: lies on a network file system ({kind}), where SQLite can lose answers; give a "
            "run_dir on a local disk"
        )


def is_mounted(directory: Path) -> bool:
    """Whether something is mounted at this very place, absolute and without symbolic links; also a folder of
    the same disk."""
    return os.path.ismount(directory) or any(place == str(directory) for place, _ in _mounts())


def _mounts() -> Iterator[tuple[str, str]]:
    """Places and kinds of file systems; a place has its blanks as octal escapes in the list."""
    if _MOUNTS.exists():
        for line in _MOUNTS.read_text(errors="replace").splitlines():
            _, escaped, kind, *_ = line.split(" ")
            yield re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), escaped), kind


def unwritten(ledger: Path, error: sqlite3.OperationalError | sqlite3.IntegrityError) -> LedgerError:
    """What keeps a ledger from being written."""
    if isinstance(error, sqlite3.IntegrityError):
        return LedgerError(
            f"{ledger}: another process has written what this one was about to write ({error}); one "
            "process works in a run at a time, which "
            "its `lock` sees to unless somebody removes it. End the other one, and the same command goes on"
        )
    free = bytes_free(ledger.parent)
    return LedgerError(
        f"{ledger}: the ledger cannot be written ({error}); {free:,} bytes are free there, and what it "
        "holds is whole. Make room, or mend "
        "what is wrong, and the same command goes on"
    )


@contextmanager
def seen_from(folder: Path | None = None) -> Iterator[None]:
    """Within it relative paths are seen from a folder; by default from where it runs within already, or else
    from the working directory."""
    global _start
    before, _start = _start, folder or start()
    try:
        yield
    finally:
        _start = before


def start() -> Path:
    """The folder that relative paths are seen from, absolute."""
    return _start or Path.cwd()


def seen(path: str | Path) -> Path:
    """An absolute path. What leads upwards (`..`) is taken out, so that a folder which is yet to be made is
    never another name of one that is there: what was made for nothing is removed again."""
    found = Path(path) if os.path.isabs(path) else start() / path
    return found.resolve() if ".." in found.parts else found


def located(name: str) -> str:
    """A name that is a path, or something else such as a hub id, for a library that looks from the working
    directory: where the process has left its start and there is something of that name, its absolute path;
    otherwise the name as it is."""
    there = seen(name)
    return name if _is_here() or not there.exists() else str(there)


def _is_here() -> bool:
    try:
        return _start is None or Path.cwd() == _start
    except OSError:  # the working directory has been removed
        return False
