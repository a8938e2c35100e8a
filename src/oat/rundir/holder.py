"""The process that works in a run directory. It writes into the lock file who it is, so that the refusal of
another process can name it. The lock itself is the system's (`build/directory.py`), not the text."""

import datetime
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


def sign(lock: TextIO) -> None:
    """Write into a lock file, which this process has locked, who this process is. Where it cannot be written,
    for example on a full disk, it stays as it is: the lock holds without it."""
    with suppress(OSError, ValueError):  # ValueError: a forked child has closed it
        lock.truncate(0)
        lock.write(json.dumps(_me()))
        lock.flush()


def unsign(lock: TextIO) -> None:
    """Empty a lock file that this process has locked."""
    with suppress(OSError, ValueError):
        lock.truncate(0)


def named_holder(lock: Path) -> str:
    """Return what is known of the process that holds a lock, such as ": 4242 on HOST, `oat train c.yaml`,
    since ..."; "" if nothing is known.

    Nothing is known if an earlier version of `oat` holds the lock. The text may then be that of a process
    that was killed before. So a process of this machine must still be there.
    """
    try:
        with lock.open(encoding="utf-8") as file:
            found = json.loads(file.read(_MOST_BYTES))
        pid, host, program, since = (found[name] for name in ("pid", "host", "program", "since"))
        is_here = (host, found["namespace"]) == (socket.gethostname(), _namespace())
        if is_here and not _is_alive(int(pid), found["started"]):
            return ""
        what = f": {int(pid)} on {host}, `{program}`, since {since}"
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    return printable(what[:_MOST_LETTERS])


def _me() -> dict[str, Any]:
    """Describe this process. Of the command line there is only what stands before the first flag, since flags
    may hold secrets."""
    place = Path(sys.argv[0] if sys.argv else "python")
    words = [place.parent.name if place.name == "__main__.py" else place.name]
    for word in sys.argv[1:]:
        if word.startswith("-"):
            break
        words.append(word)
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
