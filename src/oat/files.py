"""Files that are whole after a kill, and errors of a full disk that say what is free."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def write_atomically(path: Path, text: str) -> None:
    """Replace a file so that a reader, or a kill, sees the old or the new one whole. Its folder is made where it is missing."""
    new = path.with_name(f".new-{path.name}")
    with saying_what_is_free(path):
        path.parent.mkdir(exist_ok=True)
        new.write_text(text, encoding="utf-8")
        sync_to_disk(new)
        new.replace(path)
        sync_to_disk(path.parent)


@contextmanager
def saying_what_is_free(path: Path) -> Iterator[None]:
    """An error of the operating system within it also names the file, and how many bytes are free there."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, f"{error.strerror} ({bytes_free(path.parent):,} bytes are free there)", str(path)) from error


def bytes_free(directory: Path) -> int:
    """What may still be written to the disk of a directory, or of the nearest one above it that exists."""
    place = next(place for place in (directory.absolute(), *directory.absolute().parents) if place.exists())
    return shutil.disk_usage(place).free


def sync_to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
