"""The mark of a run directory: the file `.oat-run`, which only a run has.

Without the mark, a folder with a `config.yaml` could be a user's own folder, and a run there would empty the
user's `samples.jsonl`. So a run begins only in a folder that is missing, empty, or marked. The mark is the
first file that a run writes, apart from the empty file `lock`. What else stands in a marked folder under the
names of `OWN` was written by the run, also if a kill ended its first process early.

Runs that were begun before there was a mark are known by their ledger. It was written before any file that a
run replaces.

The process that works in a run directory writes into the lock file who it is, so that the refusal of another
process can name it. The lock itself is the system's (`opening/directory.py`), not the text.
"""

import datetime
import itertools
import json
import os
import re
import socket
import sys
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from oat.errors import ConfigError, printable
from oat.files import remove, saying_what_is_free, sync_to_disk

MARK = ".oat-run"
_TEXT = "A run of oat is in this folder: oat writes, replaces and removes the files of the run here.\n"
_NEW = re.compile(re.escape(f".new-{MARK}-") + "[0-9a-f]{16}")
"""Names of marks that are not complete. Each has a name of its own, so that no file is replaced."""
LEDGER = ("ledger.sqlite", *(f"ledger.sqlite{end}" for end in ("-journal", "-wal", "-shm")))
EARLY = ("lock", "actors", "config.yaml", "given", "indexes", "logs", "ledger.trajectories", *LEDGER)
"""Names of files and folders that a run may write before its first question, apart from the mark."""
OWN = (
    *EARLY,
    "advantages.jsonl",
    "checkpoints",
    "environment.json",
    "evaluations",
    "fork.json",
    "metrics.jsonl",
    "mlflow",
    "nonfinite",
    "profile",
    "samples.jsonl",
    "sinks",
    "tensorboard",
    "wandb",
)
"""Names of all files and folders that a run writes into its directory, apart from the mark. Before a name
there may be `.new-`: such a file is not complete."""
_LEDGER_HEAD = b"SQLite format 3\0"
_LEDGER_TABLES = (b"CREATE TABLE rounds", b"CREATE TABLE takes")
_HEAD_BYTES = 2**20
_MOST_NAMES = 5


def is_own(name: str, names: Collection[str] = OWN) -> bool:
    """Return True if this is the name of the mark, or one of the names that a run writes.

    Args:
        names: these names, without that of the mark.
    """
    return name == MARK or name.removeprefix(".new-") in names or _NEW.fullmatch(name) is not None


def is_run(directory: Path) -> bool:
    """Return True if a directory has a run, or the beginning of one."""
    return _is_marked(directory) or _is_ledger(directory / LEDGER[0])


def is_begun(directory: Path) -> bool:
    """Return True if a directory has a run with a configuration, as one has before its first step."""
    return (directory / "config.yaml").exists() and is_run(directory)


def foreign(directory: Path) -> list[str]:
    """Return the names of what stands in a directory that has no run; empty if the directory is missing. What
    does not hinder a run is left out: an empty file `lock`, and a mark that a kill cut off."""
    if not directory.is_dir() or is_run(directory):
        return []
    return sorted(entry.name for entry in os.scandir(directory) if not _is_harmless(Path(entry.path)))


def refuse_foreign(directory: Path) -> None:
    """Refuse a directory that has files and no run, before anything is written there.

    Raises:
        ConfigError: the directory has such files, or cannot be read.
    """
    try:
        names = foreign(directory)
    except OSError as error:
        raise ConfigError(
            f"{directory} cannot be read ({error.strerror}: {error.filename}); give another --run_dir"
        ) from error
    if names:
        raise in_the_way(directory, names)


def in_the_way(directory: Path, names: list[str]) -> ConfigError:
    """Return the error that says which files keep a run from beginning in a directory."""
    listed = ", ".join(map(printable, names[:_MOST_NAMES]))
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ConfigError(
        f"{directory} is not empty and holds no run; it has {listed}{more}, and a run needs a folder of its "
        f"own. Give another --run_dir, such as {directory / 'run'}"
    )


def mark(directory: Path) -> bool:
    """Mark a directory as that of a run, if it is not marked. The caller has refused foreign files.

    Returns:
        True if the directory had a run without a mark: an earlier version of oat began it.
    """
    for left in directory.glob(f".new-{MARK}-*"):
        if _NEW.fullmatch(left.name) and _is_cut_off(left):
            with suppress(OSError):
                left.unlink()
    if _is_marked(directory):
        return False
    is_earlier = is_run(directory)
    new = directory / f".new-{MARK}-{os.urandom(8).hex()}"
    with saying_what_is_free(directory / MARK):
        with new.open("x", encoding="utf-8") as file:
            file.write(_TEXT)
        sync_to_disk(new)
        new.rename(directory / MARK)
        sync_to_disk(directory)
    return is_earlier


def remove_own(directory: Path, keep: Collection[str] = ()) -> None:
    """Remove the files and folders that a run has written into its directory. Others stay.

    Args:
        keep: names that stay too.
    """
    for entry in list(os.scandir(directory)):
        if is_own(entry.name) and entry.name not in keep:
            remove(Path(entry.path))


def _is_marked(directory: Path) -> bool:
    return _read(directory / MARK, len(_TEXT) + 1) == _TEXT.encode()


def _is_ledger(path: Path) -> bool:
    """Return True if a file is the ledger of a run. SQLite is not asked: it may write beside a foreign
    database. The tables may still be in the file with the ending `-wal` alone."""
    heads = [_read(path.with_name(path.name + end), _HEAD_BYTES) for end in ("", "-wal")]
    return heads[0].startswith(_LEDGER_HEAD) and any(
        all(table in head for table in _LEDGER_TABLES) for head in heads
    )


def _is_harmless(path: Path) -> bool:
    if path.name == "lock":
        return _is_plain(path) and path.stat().st_size == 0
    return _NEW.fullmatch(path.name) is not None and _TEXT.encode().startswith(_read(path, len(_TEXT) + 1))


def _is_cut_off(path: Path) -> bool:
    """Return True if a file has the beginning of a mark. An empty file may be anybody's."""
    found = _read(path, len(_TEXT) + 1)
    return bool(found) and _TEXT.encode().startswith(found)


def _is_plain(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()


def _read(path: Path, most: int) -> bytes:
    """Return the first bytes of a file; nothing if it is missing, is a link or no file, or cannot be read."""
    if not _is_plain(path):
        return b""
    try:
        with path.open("rb") as file:
            return file.read(most)
    except OSError:
        return b""


_MOST_BYTES = 4096
_MOST_LETTERS = 200
_MOST_PID = 2**31


def sign(lock: TextIO) -> None:
    """Write into a lock file, which this process has locked, who this process is. Where it cannot be written,
    for example on a full disk, it stays as it is: the lock holds without it."""
    unsign(lock)
    with suppress(OSError, ValueError):  # ValueError: a forked child has closed it
        if os.fstat(lock.fileno()).st_size == 0:
            # past the file's buffer: what it could not write would be an error again when the file is closed
            os.write(lock.fileno(), json.dumps(_me()).encode())


def unsign(lock: TextIO) -> None:
    """Empty a lock file that this process has locked. A file with another text than that of `sign` stays as
    it is: nobody knows whose it is."""
    with suppress(OSError, ValueError, RecursionError):
        if _signed(Path(lock.name)).keys() == _me().keys():
            lock.truncate(0)


def named_holder(lock: Path) -> str:
    """Return what is known of the process that holds a lock, such as ": 4242 on HOST, `oat train c.yaml`,
    since ..."; "" if nothing is known.

    Nothing is known if an earlier version of `oat` holds the lock. The text may then be that of a process
    that was killed before. So a process of this machine must still be there.
    """
    try:
        found = _signed(lock)
        pid, host, program, since = (found[name] for name in ("pid", "host", "program", "since"))
        kinds = [type(value) for value in (pid, host, program, since)]
        if kinds != [int, str, str, str] or not 0 < pid < _MOST_PID:
            return ""
        is_here = (host, found["namespace"]) == (socket.gethostname(), _namespace())
        if is_here and not _is_alive(pid, found["started"]):
            return ""
        what = " ".join(f": {pid} on {host}, `{program}`, since {since}".split())
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return ""
    return printable(what[:_MOST_LETTERS])


def _signed(lock: Path) -> dict[str, Any]:
    """Return what `sign` has written into a lock file; {} if it has another text.

    Raises:
        OSError, ValueError, RecursionError: it cannot be read.
    """
    with lock.open(encoding="utf-8") as file:
        found = json.loads(file.read(_MOST_BYTES))
    return found if isinstance(found, dict) else {}


def _me() -> dict[str, Any]:
    """Describe this process. Of a command of `oat` there is only what stands before the first flag, and of
    another program only its name, since arguments may hold secrets."""
    place = Path(sys.argv[0] if sys.argv else "python")
    words = [place.parent.name if place.name == "__main__.py" else place.name]
    if words == ["oat"]:
        words += itertools.takewhile(lambda word: not word.startswith("-"), sys.argv[1:])
    return {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "namespace": _namespace(),
        "started": _started(os.getpid()),
        "program": " ".join(words),
        "since": datetime.datetime.now().astimezone().isoformat(" ", "seconds"),
    }


def _namespace() -> str | None:
    """Return the name of the namespace of this process' number; None on a system without them. A container
    numbers its processes anew."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return None


def _started(pid: int) -> str | None:
    """Return when a process began, in the system's own unit; None if that is unknown."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]
    except (OSError, ValueError, IndexError):
        return None


def _is_alive(pid: int, started: str | None) -> bool:
    """Return True if a process of this machine exists, and began when the process with this number did."""
    now = _started(pid)
    if None not in (now, started):
        return now == started
    try:
        os.kill(pid, 0)
    except PermissionError:  # the process of another user
        return True
    except OSError:
        return False
    return True
