"""Where relative paths lead: they are seen from where a command, a `Trainer` or a run began, whatever the working directory becomes meanwhile.

A user's reward, callback or data function may change that at any time. Names stay as they were given wherever they are written down or held against
each other (`config.yaml`, cards, digests), so that a run may be moved; only what opens a file asks here.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_start: Path | None = None


@contextmanager
def seen_from(folder: Path | None = None) -> Iterator[None]:
    """Within it relative paths are seen from a folder; by default from where it runs within already, or else from the working directory."""
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
    """An absolute path. What leads upwards (`..`) is taken out, so that a folder which is yet to be made is never another name of one that is there:
    what was made for nothing is removed again."""
    found = Path(path) if os.path.isabs(path) else start() / path
    return found.resolve() if ".." in found.parts else found


def located(name: str) -> str:
    """A name that is a path, or something else such as a hub id, for a library that looks from the working directory: where the process has left its
    start and there is something of that name, its absolute path; otherwise the name as it is."""
    there = seen(name)
    return name if _is_here() or not there.exists() else str(there)


def _is_here() -> bool:
    try:
        return _start is None or Path.cwd() == _start
    except OSError:  # the working directory has been removed
        return False
