"""Replacement of a model's directory, if possible in one step. At every moment, even after a kill, the
directory then has either the complete old model or the complete new one.

The new files are written into the folder `new` of a working folder next to the old directory, whose name is
`.oat-export-` and eight hexadecimal digits. They are synced to disk. Then `new` and the directory exchange
their names in one system call (Linux's `renameat2`). Files in the old directory that do not belong to its
model are kept: before the exchange they are hard-linked, or else copied, into `new`.

Some directories are not exchanged:
* a mount point;
* a directory that this user cannot read or cannot write, or whose parent this user cannot write;
* the working directory and its parents, since a shell there would be left in a removed directory;
* a directory with folders in it, such as a clone of a repository, or a run, since it may be in use;
* a directory on a system or file system without this call.

For these directories, the new files are completed and synced inside the old directory or next to it. Then
they are moved in one by one. The key files, without which no program loads a model, are removed first and
moved in last. In between, a reader finds no model. It never finds a mixture of two models. Before the first
file is moved, the directory's mark is replaced by the **bridge**, a mark that knows the old and the new
files.

Each export locks its working folder until its process ends. So a later export can tell a folder that is in
use from a folder that a killed export has left. It removes the latter if the file `_SIGN` is in it, so it
removes no folder that a user has named so.
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
from oat.files import is_full, is_mounted, remove, sync_to_disk

_NAME = ".oat-export-"
_OURS = re.compile(re.escape(_NAME) + "[0-9a-f]{8}")
_SIGN, _SIGN_TEXT = "made-by-oat", b"The working folder of an `oat export`; the next one removes it.\n"
_BRIDGE = "bridge"
_CANNOT = (errno.EBUSY, errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EPERM, errno.EACCES)
"""Errors that show that this system, file system or user cannot exchange two directories."""
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


@contextmanager
def swapped_in(
    out: Path, stale: Callable[[Collection[str]], Collection[str]], keys: Sequence[str], mark: str
) -> Iterator[Path]:
    """Give the body of the context a new folder to write into. If the body ends without an error, the files
    in this folder replace the `stale` files of `out`; the other files of `out` are kept. If the body fails,
    `out` is unchanged.

    Before the body, folders that killed exports have left in `out` or next to it are removed.

    Args:
        out: an absolute path, not a symbolic link; missing folders above it are made.
        stale: function that returns the names of the files in `out` that are replaced. It is called after the
            body, with the names that the body has written, and may raise an error.
        keys: names of the key files, without which no program loads a model.
        mark: name of the mark, which the body writes too. The body also writes the bridge (`bridge_of`).

    Raises:
        ConfigError: no folder can be made in `out` or next to it, or `stale` raises it.
        OSError: the files cannot be written.
    """
    _clear(out)
    _clear(out.parent)
    made = [place for place in (out.parent, *out.parent.parents) if not place.exists()]
    try:
        with _scratch(out if _stays(out) else out.parent) as new:
            yield new
            _sync(new.parent)
            _put(new, out, stale({entry.name for entry in os.scandir(new)}), keys, mark)
    except BaseException:
        with suppress(OSError):
            for place in made:
                place.rmdir()
        raise


def bridge_of(new: Path) -> Path:
    """Return the place of the bridge, for the new folder that `swapped_in` gives."""
    return new.with_name(_BRIDGE)


def _stays(out: Path) -> bool:
    """Return True if the directory `out` must not be exchanged: it is the working directory or contains it,
    it contains a folder, it is a mount point, or this user lacks the permissions to read and write it and to
    write to its parent. Return False if it does not exist."""
    if not out.exists():
        return False
    with suppress(FileNotFoundError):  # the working directory was removed
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
    """Make a working folder in `home`, and in it a new folder for the body of the context. The working folder
    is locked, so other processes see that it is in use. At the end it is removed. If the body has exchanged
    the new folder and the model's old directory, this removes the old directory.

    Raises:
        ConfigError: no folder can be made in `home`.
        OSError: the disk is full.
    """
    try:
        home.mkdir(parents=True, exist_ok=True)
        scratch, lock = _make_and_lock(home)
    except OSError as error:
        if is_full(error):
            raise
        raise ConfigError(
            f"nothing can be written to {home} ({error.strerror}: {error.filename}); give a directory where "
            "you may write"
        ) from error
    try:
        (scratch / _SIGN).write_bytes(_SIGN_TEXT)
        new = scratch / "new"
        new.mkdir()
        yield new
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        os.close(lock)


def _make_and_lock(home: Path) -> tuple[Path, int]:
    while True:
        new = home / f"{_NAME}{secrets.token_hex(4)}"
        new.mkdir()
        lock = os.open(new, os.O_RDONLY)
        # some network file systems have no locks; there `_clear` removes no folder
        with suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        if new.exists():  # no `_clear` of another process removed it before it was locked
            return new, lock
        os.close(lock)


def _clear(home: Path) -> None:
    """Remove the folders in `home` that killed exports have left. No process locks such a folder."""
    found: list[str] = []
    with suppress(OSError):
        found += [entry.path for entry in os.scandir(home) if _OURS.fullmatch(entry.name)]
    for left in found:
        with suppress(OSError):
            lock = os.open(left, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _is_ours(Path(left)):
                    shutil.rmtree(left, ignore_errors=True)
            finally:
                os.close(lock)


def _is_ours(left: Path) -> bool:
    """Return True if a folder is the working folder of an export. One that was killed at once has nothing but
    the beginning of the sign."""
    names = os.listdir(left)
    if not names:
        return True
    sign = left / _SIGN
    text = sign.read_bytes() if sign.is_file() else b"another"
    return text == _SIGN_TEXT or (names == [_SIGN] and _SIGN_TEXT.startswith(text))


def _sync(folder: Path) -> None:
    for path in [*folder.rglob("*"), folder]:
        sync_to_disk(path)


def _put(new: Path, out: Path, stale: Collection[str], keys: Sequence[str], mark: str) -> None:
    """Move the new files to `out`. If possible, exchange `new` and `out`; otherwise move the files one by
    one."""
    if new.parent.parent == out:
        _move_in(new, out, stale, keys, mark)
    elif not out.exists():
        new.rename(out)
    else:
        written = {entry.name for entry in os.scandir(new)}
        kept = {entry.name for entry in os.scandir(out)} - {*stale, *written}
        for foreign in sorted(kept):
            _link(out / foreign, new / foreign)
        shutil.copymode(out, new)
        sync_to_disk(new)
        try:
            _exchange(new, out)
        except OSError as error:
            if error.errno not in _CANNOT:
                raise
            for foreign in kept:
                (new / foreign).unlink()
            _move_in(new, out, stale, keys, mark)
        else:
            for late in {entry.name for entry in os.scandir(new)} - {*stale, *written, *kept}:
                (new / late).rename(out / late)  # somebody has made it meanwhile
    sync_to_disk(out.parent)


def _link(old: Path, new: Path) -> None:
    try:
        os.link(old, new, follow_symlinks=False)
    except OSError:  # the file system has no links, or this user may not link another user's file
        shutil.copy2(old, new, follow_symlinks=False)


def _exchange(one: Path, other: Path) -> None:
    """Exchange the names of two directories in one system call.

    Raises:
        OSError: the system or the file system cannot exchange them.
    """
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    if rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) != 0:
        raise OSError(number := ctypes.get_errno(), os.strerror(number), str(other))


def _move_in(new: Path, out: Path, stale: Collection[str], keys: Sequence[str], mark: str) -> None:
    """Move the new files into `out` one by one. Of the key files, without which no program loads a model, the
    old ones are removed first, and the new ones are moved in last. The mark is the bridge meanwhile."""
    names = {entry.name for entry in os.scandir(new)}
    bridge_of(new).rename(out / mark)
    sync_to_disk(out)
    old = {*stale, *names} - {mark}
    order = [*keys, *sorted(old)]  # not that of a set, which differs between processes
    for name in sorted(old, key=order.index):
        remove(out / name)
    sync_to_disk(out)
    for name in sorted(names, key=lambda name: (name == mark, name in keys, name)):
        (new / name).rename(out / name)
    sync_to_disk(out)
