"""A directory that is replaced in one step: a reader, or a kill at any moment, finds the old one whole or the
new one.

New files are written into a folder of their own beside it (`.oat-export-` and eight digits), brought to disk,
and then the two exchange their names, as Linux can (`renameat2`). Foreign files stay: by then they are in
both, as hard links.

Some directories cannot be exchanged: a mount; one above which this user may not write; the working directory,
which would be gone for the shell that stands in it; one with folders, such as a clone of a repository, or a
run; and any on a file system that exchanges nothing. There the files, which are whole and on disk by then,
are moved in one by one. Those without which nothing is loaded leave first and come last: for that moment a
reader finds no model, and never parts of two.

To rename the old directory aside first would leave a moment without a model, and a half-done exchange for a
later start to find. A directory with folders is not exchanged, since a clone or a run in it may be in use.
Moving files in one by one is better than refusing, since containers export to mounted folders. A lock, which
ends with its process, tells a folder of a killed export from one in use.
"""

import ctypes
import errno
import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from oat.errors import ConfigError
from oat.files import is_full, is_mounted, sync_to_disk

_NAME = ".oat-export-"
_OURS = re.compile(re.escape(_NAME) + "[0-9a-f]{8}")
_CANNOT = (errno.EBUSY, errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EPERM, errno.EACCES)
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


@contextmanager
def swapped_in(out: Path, stale: Callable[[], Collection[str]], keys: Sequence[str]) -> Iterator[Path]:
    """A folder to write into; when this ends well its files stand in `out`, beside the foreign ones there,
    and otherwise all is as before.

    What killed processes have left there or beside it is removed.

    Args:
        out: absolute, and no symbolic link; what is missing above it is made.
        stale: names of what goes from `out` when the new files come; asked at that moment.
        keys: names of files without which nothing is loaded.

    Raises:
        ConfigError: nothing can be made there.
        OSError: it cannot be written.
    """
    _clear(out)
    _clear(out.parent)
    made = [place for place in (out.parent, *out.parent.parents) if not place.exists()]
    try:
        with _scratch(out if _stays(out) else out.parent) as new:
            yield new
            _sync(new)
            _put(new, out, stale(), keys)
    except BaseException:
        with suppress(OSError):
            for place in made:
                place.rmdir()
        raise


def _stays(out: Path) -> bool:
    """Whether it is there, and no other directory can take its place."""
    if not out.exists():
        return False
    with suppress(FileNotFoundError):  # of a working directory that was removed
        if out in (here := Path.cwd(), *here.parents):
            return True
    is_free = (
        os.access(out, os.R_OK | os.W_OK | os.X_OK)
        and os.access(out.parent, os.W_OK | os.X_OK)
        and not is_mounted(out)
    )
    return not is_free or any(entry.is_dir(follow_symlinks=False) for entry in os.scandir(out))


@contextmanager
def _scratch(home: Path) -> Iterator[Path]:
    """A new folder in another one. It is locked, so that others know that it is in use; in the end it is
    removed, whatever it has become."""
    try:
        home.mkdir(parents=True, exist_ok=True)
        new, lock = _made_and_locked(home)
    except OSError as error:
        if is_full(error):
            raise
        raise ConfigError(
            f"nothing can be written to {home} ({error.strerror}: {error.filename}); give a directory "
            "where you may write"
        ) from error
    try:
        yield new
    finally:
        shutil.rmtree(new, ignore_errors=True)
        os.close(lock)


def _made_and_locked(home: Path) -> tuple[Path, int]:
    while True:
        new = home / f"{_NAME}{secrets.token_hex(4)}"
        new.mkdir()
        lock = os.open(new, os.O_RDONLY)
        # some network file systems have no locks; nobody takes the folder for a dead one's there
        with suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        if new.exists():  # nobody took it for one before it was locked
            return new, lock
        os.close(lock)


def _clear(home: Path) -> None:
    """Remove the folders of processes that were killed, which nobody locks any more."""
    found: list[str] = []
    with suppress(OSError):
        found += [entry.path for entry in os.scandir(home) if _OURS.fullmatch(entry.name)]
    for left in found:
        with suppress(OSError):
            lock = os.open(left, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(left, ignore_errors=True)
            finally:
                os.close(lock)


def _sync(folder: Path) -> None:
    for path in [*folder.rglob("*"), folder]:
        sync_to_disk(path)


def _put(new: Path, out: Path, stale: Collection[str], keys: Sequence[str]) -> None:
    """Bring the new files to where they belong."""
    if new.parent == out:
        _move_in(new, out, stale, keys)
    elif not out.exists():
        new.rename(out)
    else:
        written = {entry.name for entry in os.scandir(new)}
        for foreign in sorted(
            entry.name for entry in os.scandir(out) if entry.name not in {*stale, *written}
        ):
            _link(out / foreign, new / foreign)
        shutil.copymode(out, new)
        sync_to_disk(new)
        try:
            _exchange(new, out)
        except OSError as error:
            if error.errno not in _CANNOT:
                raise
            for foreign in {entry.name for entry in os.scandir(new)} - written:
                (new / foreign).unlink()
            _move_in(new, out, stale, keys)
    sync_to_disk(out.parent)


def _link(old: Path, new: Path) -> None:
    try:
        os.link(old, new, follow_symlinks=False)
    except OSError:  # not every file system has links, nor may everybody link a file of others
        shutil.copy2(old, new, follow_symlinks=False)


def _exchange(one: Path, other: Path) -> None:
    """The two names are each other's from one moment to the next.

    Raises:
        OSError: the system, or the file system, cannot.
    """
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    if rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) != 0:
        raise OSError(number := ctypes.get_errno(), os.strerror(number), str(other))


def _move_in(new: Path, out: Path, stale: Collection[str], keys: Sequence[str]) -> None:
    names = {entry.name for entry in os.scandir(new)}
    for name in [*keys, *{*stale, *names}.difference(keys)]:
        with suppress(FileNotFoundError):
            shutil.rmtree(out / name) if (out / name).is_dir() and not (out / name).is_symlink() else (
                out / name
            ).unlink()
    sync_to_disk(out)
    for name in sorted(names, key=lambda name: name in keys):
        (new / name).rename(out / name)
    sync_to_disk(out)
