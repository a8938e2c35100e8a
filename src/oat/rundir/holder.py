"""The process that works in a run directory. It writes into the lock file who it is, so that the refusal of
another process can name it. The lock itself is the system's (`opening/directory.py`), not the text."""

import datetime
import itertools
import json
import os
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from oat.errors import printable

_MOST_BYTES = 4096
_MOST_LETTERS = 200
_MOST_PID = 2**31


def sign(lock: TextIO) -> None:
    """Write into a lock file, which this process has locked, who this process is. Where it cannot be written,
    for example on a full disk, it stays as it is: the lock holds without it."""
    unsign(lock)
    with suppress(OSError, ValueError):  # ValueError: a forked child has closed it
        if os.fstat(lock.fileno()).st_size == 0:
            lock.write(json.dumps(_me()))
            lock.flush()


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
