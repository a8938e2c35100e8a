"""A cache of the indexes of large files. A run that is continued, or that reads the same data as an earlier
run, loads the stored index. So it need not check and render the records again.

The name of a stored index is a checksum of everything that decides the index: the data's bytes, tokenizer,
template, settings, versions of libraries, and code. Computing the checksum reads all of the data, because
sizes and modification times can mislead.

* Folders: the run directory's `indexes`, and `$XDG_CACHE_HOME/oat/indexes` (by default
  `~/.cache/oat/indexes`). A folder to which other users can write is not used.
* Files: the SHA-256 of the content, and then the content in MessagePack. A damaged file is replaced. A user
  may delete the files at any time.
* Only the indexes of data of a megabyte or more are stored. Indexes of functions and iterators are never
  stored, because these may return different records each time.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec

from oat.data.index import Index, Pass, packed
from oat.data.sources import RecordReader
from oat.errors import warn

LARGE = 2**20
"""Size of data, in bytes, from which the index is stored. Smaller data are read in a second."""
MAX_BYTES = 2**30
"""Limit on the bytes of all indexes in one folder. Above it, the least recently used indexes are deleted."""
_ENDING = ".index"
_CODE = (
    "data/borders",
    "data/fit",
    "data/formats",
    "data/index",
    "data/index_cache",
    "data/messages",
    "data/sources",
    "data/text_files",
)
"""Modules whose code decides the content of an index, beside all modules of `text/`."""


def cache_folders() -> list[Path]:
    """Return a list of one folder, in which all runs share indexes. The list is empty if `XDG_CACHE_HOME`
    is not an absolute path and the user has no home folder."""
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not named.is_absolute():
        try:
            named = Path.home() / ".cache"
        except RuntimeError:
            return []
    return [named / "oat" / "indexes"]


class IndexCache:
    """The stored index of one pass over one source.

    Args:
        reader: the reader of the source's records.
        max_records: largest number of records that the pass reads; None reads all.
        folders: folders of indexes, in the order of the search; if empty, nothing is stored.
    """

    def __init__(
        self, first_pass: Pass, reader: RecordReader, max_records: int | None, folders: Sequence[Path]
    ):
        self._files = reader.files() if folders else None
        self._state = _state(self._files)
        self._folders = (
            [folder for folder in folders if _is_private(folder)]
            if sum(size for size, _ in self._state) >= LARGE
            else []
        )
        self._name = _digest(first_pass, self._files or (), max_records) + _ENDING if self._folders else ""

    def index(self) -> Index | None:
        """Return the stored index, or None if no folder has an undamaged one."""
        for folder in self._folders:
            with suppress(OSError, ValueError, KeyError, TypeError, msgspec.DecodeError):
                data = (folder / self._name).read_bytes()
                if hashlib.sha256(data[32:]).digest() == data[:32]:
                    with suppress(OSError):  # a read-only file can be used too
                        os.utime(folder / self._name)
                    return Index.of(msgspec.msgpack.decode(data[32:]))
        return None

    def keep(self, index: Index) -> None:
        """Store an index in each of the cache's folders, if the folder can be written to. If the data have
        changed since this object was made, do nothing."""
        if not self._folders or _state(self._files) != self._state:
            return
        data = msgspec.msgpack.encode(index.plain)
        for folder in self._folders:
            with suppress(OSError):
                _make(folder)
                if not _is_private(folder):  # another process made it
                    continue
                new = folder / f".new-{os.getpid()}-{self._name}"
                new.unlink(missing_ok=True)
                descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
                try:
                    with os.fdopen(descriptor, "wb") as file:
                        file.write(hashlib.sha256(data).digest() + data)
                    new.replace(folder / self._name)
                finally:
                    new.unlink(missing_ok=True)
                _make_room(folder)


def _state(files: Sequence[Path] | None) -> list[tuple[int, int]]:
    """Return size and modification time of each file; an empty list if a file is missing or `files` is
    None."""
    try:
        return [(each.stat().st_size, each.stat().st_mtime_ns) for each in files or ()]
    except OSError:
        return []


def _make(folder: Path) -> None:
    """Make a folder of indexes that only this user can read and write. If it is the folder
    that all runs share (`cache_folders`), make its parent `oat` in the same way."""
    if folder in cache_folders():
        folder.parent.parent.mkdir(parents=True, exist_ok=True)
        folder.parent.mkdir(mode=0o700, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)


def _is_private(folder: Path) -> bool:
    """Return True if only this user can write to a folder, or if the folder does not exist. Otherwise warn
    and return False."""
    try:
        found = folder.stat()
    except OSError:
        return True
    if found.st_uid == os.getuid() and not found.st_mode & 0o022:
        return True
    warn(
        f"{folder}: others may write there, so nothing of it is read or remembered; remove it, or make it "
        "yours alone (chmod 700)"
    )
    return False


def _make_room(folder: Path) -> None:
    kept = sorted(folder.glob(f"*{_ENDING}"), key=lambda file: file.stat().st_mtime_ns)
    taken = sum(file.stat().st_size for file in kept)
    for file in kept[:-1]:
        if taken <= MAX_BYTES:
            return
        taken -= file.stat().st_size
        file.unlink(missing_ok=True)


def _digest(first_pass: Pass, files: Sequence[Path], max_records: int | None) -> str:
    digest = hashlib.sha256(
        json.dumps([*_settings(first_pass), max_records], sort_keys=True, default=str).encode()
    )
    package = Path(__file__).parent.parent
    for file in [*(package / f"{module}.py" for module in _CODE), *sorted((package / "text").glob("*.py"))]:
        digest.update(file.read_bytes())
    for content in _contents(first_pass, files):
        digest.update(content)
    return digest.hexdigest()


def _settings(first_pass: Pass) -> Iterator[Any]:
    """Yield the settings and library versions on which the index of a pass depends, as plain data."""
    layout, fit = first_pass.layout, first_pass.fit
    yield [first_pass.name, first_pass.is_array, first_pass.is_json, first_pass.skip]
    yield [layout.prompt_key, layout.reference_key, layout.responses, layout.score_key, layout.numbers]
    yield [version(name) for name in ("oat-align", "transformers", "tokenizers")]
    if fit is not None:
        yield [fit.max_tokens, fit.room, fit.too_long, fit.renderer.definition, fit.renderer.source]


def _contents(first_pass: Pass, files: Sequence[Path]) -> Iterator[bytes]:
    """Yield the contents of the tokenizer's files and of the data files, in pieces."""
    if first_pass.fit is not None:
        for name, content in sorted(packed(first_pass.fit.renderer)["tokenizer"].items()):
            yield f"{name} {len(content)}\n".encode() + content
    for each in files:
        yield f"{each.stat().st_size}\n".encode()
        with each.open("rb") as file:
            while block := file.read(2**20):
                yield block
