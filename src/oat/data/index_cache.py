"""Indexes of large files are kept under checksums of everything that decides them: the bytes of the data, the
tokenizer, the template, the settings that read them, and the code that does. So a run that goes on, or
another run over the same data, need not read every record again.

They lie in the run's directory and in `$XDG_CACHE_HOME/oat` (`~/.cache/oat`), where only this user may write:
a SHA-256, then MessagePack. What is damaged is made anew, and all of it may be deleted at any time.
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
from oat.data.sources import Reader
from oat.errors import warn

LARGE = 2**20
"""Bytes of data from which on an index is remembered; less is read in a second."""
MAX_BYTES = 2**30
"""Of all indexes in one folder; the one that was used longest ago goes first."""
_ENDING = ".index"
_CODE = (
    *(
        "data/fit",
        "data/formats",
        "data/index",
        "data/index_cache",
        "data/messages",
        "data/sources",
        "data/text_files",
    ),
    *("text/question_forms", "text/renderer", "text/templates"),
)
"""Modules that decide what an index holds."""


def cache_folders() -> list[Path]:
    """Where indexes are remembered across runs; nowhere, where the user has no home."""
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not named.is_absolute():
        try:
            named = Path.home() / ".cache"
        except RuntimeError:
            return []
    return [named / "oat" / "indexes"]


class IndexCache:
    """What is remembered of one pass over one source.

    Args:
        max_records: that it reads.
        folders: where indexes lie, the nearest first; none: nothing is remembered.
    """

    def __init__(self, first: Pass, reader: Reader, max_records: int | None, folders: Sequence[Path]):
        self._files = reader.files() if folders else None
        self._state = _state(self._files)
        self._folders = (
            [folder for folder in folders if _is_private(folder)]
            if sum(size for size, _ in self._state) >= LARGE
            else []
        )
        self._name = _digest(first, self._files or (), max_records) + _ENDING if self._folders else ""

    def index(self) -> Index | None:
        """What was remembered, or None."""
        for folder in self._folders:
            with suppress(OSError, ValueError, KeyError, TypeError, msgspec.DecodeError):
                data = (folder / self._name).read_bytes()
                if hashlib.sha256(data[32:]).digest() == data[:32]:
                    with suppress(OSError):  # what may only be read may be used
                        os.utime(folder / self._name)
                    return Index.of(msgspec.msgpack.decode(data[32:]))
        return None

    def keep(self, index: Index) -> None:
        """Remember it, unless the data changed meanwhile; a folder that cannot be written remembers
        nothing."""
        if not self._folders or _state(self._files) != self._state:
            return
        data = msgspec.msgpack.encode(index.plain)
        for folder in self._folders:
            with suppress(OSError):
                _make(folder)
                if not _is_private(folder):  # somebody else was faster
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
    """Size and time of each; none where one is missing."""
    try:
        return [(each.stat().st_size, each.stat().st_mtime_ns) for each in files or ()]
    except OSError:
        return []


def _make(folder: Path) -> None:
    """With the parents that are ours, where nobody else may write either."""
    if folder in cache_folders():
        folder.parent.parent.mkdir(parents=True, exist_ok=True)
        folder.parent.mkdir(mode=0o700, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)


def _is_private(folder: Path) -> bool:
    """Whether nobody else can write there; a folder that is still to be made is."""
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


def _digest(first: Pass, files: Sequence[Path], max_records: int | None) -> str:
    digest = hashlib.sha256(json.dumps([*_told(first), max_records], sort_keys=True, default=str).encode())
    for module in _CODE:
        digest.update((Path(__file__).parent.parent / f"{module}.py").read_bytes())
    for content in _contents(first, files):
        digest.update(content)
    return digest.hexdigest()


def _told(first: Pass) -> Iterator[Any]:
    """What a pass was told, as plain data."""
    layout, fit = first.layout, first.fit
    yield [first.name, first.is_array, first.is_json, first.skip]
    yield [layout.prompt_key, layout.reference_key, layout.responses, layout.score_key, layout.numbers]
    yield [version(name) for name in ("oat-align", "transformers", "tokenizers")]
    if fit is not None:
        yield [fit.max_tokens, fit.room, fit.too_long, fit.renderer.definition, fit.renderer.source]


def _contents(first: Pass, files: Sequence[Path]) -> Iterator[bytes]:
    """Of the tokenizer, and of the data."""
    if first.fit is not None:
        for name, content in sorted(packed(first.fit.renderer)["tokenizer"].items()):
            yield f"{name} {len(content)}\n".encode() + content
    for each in files:
        yield f"{each.stat().st_size}\n".encode()
        with each.open("rb") as file:
            while block := file.read(2**20):
                yield block
