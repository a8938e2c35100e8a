"""The first pass over a source. It reads, checks and renders every record once before the run starts, so
malformed records are found early. The pass makes an index with 24 bytes per kept record: place, row and
checksum. When the record is read again, the checksum shows whether its prompt has changed.
`data/index.py` stores the indexes of large files.

A pass that takes longer than three seconds continues in worker processes, one per core, at most 16. Threads
would not help: most of the time is spent in Python code, which threads of one interpreter cannot run in
parallel. The workers' results are joined in the order of the records, so index and first error are the same
as with a single process.

A cache of the indexes of large files. A run that is continued, or that reads the same data as an earlier
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
import tempfile
import time
import zlib
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from itertools import count, islice
from pathlib import Path
from typing import Any

import msgspec

from oat.data.fit import Fit
from oat.data.formats import Format, Layout, checked, unrendered
from oat.data.sources import RecordReader
from oat.errors import DataError, warn
from oat.plugins.isolated_workers import Outcome, Workers
from oat.text.renderer import Renderer
from oat.types import Prompt

ALONE_S = 3.0
"""Seconds that one process reads and renders the records of a source before workers share the rest. Workers
need about three seconds to start."""
_BLOCK = 64
"""Number of records that a worker gets at once."""
_FIRST = 3
"""Largest number of malformed records that a note names."""
_MAX_WORKERS = 16
_PATIENCE_S = 600.0
_NO_LIMIT_GB = 1e5

Item = tuple[int, int, Any]
"""A record as a `RecordReader` yields it: place, row (the number that messages show), and content. If the
record cannot be parsed, the content is a DataError."""


@dataclass
class Index:
    """The result of a pass over all records of a source, or over a block of them.

    Attributes:
        places, rows, checksums: for each kept record, its place, its row (the number that messages
            show), and the checksum of its prompt.
        read: number of well-formed records.
        skipped: number of malformed records that are left out.
        malformed: row and error of the first three malformed records.
        columns: names of the columns, other than the prompt's, that at least one kept record has.
        unrendered: number of records with a column or field that is not rendered, by the name of the column
            or field.
        format: format of all records; None before the first well-formed record.
        longest: length of the longest kept record, in tokens, as `data/fit.py` defines it.
        over: number of kept records that do not fit into the model's context.
        first_over: row and number of tokens of the first record that does not fit.
        cut: number of kept records from which tokens are cut off.
        has_references: True if at least one kept prompt has a reference.
    """

    places: "array[int]" = field(default_factory=lambda: array("q"))
    rows: "array[int]" = field(default_factory=lambda: array("q"))
    checksums: "array[int]" = field(default_factory=lambda: array("q"))
    read: int = 0
    skipped: int = 0
    malformed: list[tuple[int, str]] = field(default_factory=list)
    columns: set[str] = field(default_factory=set)
    unrendered: Counter[str] = field(default_factory=Counter)
    format: Format | None = None
    longest: int = 0
    over: int = 0
    first_over: tuple[int, int] = (0, 0)
    cut: int = 0
    has_references: bool = False

    def __len__(self) -> int:
        return len(self.places)

    def add(self, later: "Index") -> None:
        """Append the index of the records that follow those of this index."""
        self.places += later.places
        self.rows += later.rows
        self.checksums += later.checksums
        self.malformed = [*self.malformed, *later.malformed][:_FIRST]
        self.first_over = self.first_over if self.over else later.first_over
        self.read = self.read + later.read
        self.skipped = self.skipped + later.skipped
        self.over = self.over + later.over
        self.cut += later.cut
        self.columns |= later.columns
        self.unrendered.update(later.unrendered)
        self.longest = max(self.longest, later.longest)
        self.has_references = self.has_references or later.has_references

    @property
    def plain(self) -> dict[str, Any]:
        """The index as plain data and bytes. `of` makes an equal index from this value."""
        kept = {name: getattr(self, name).tobytes() for name in _ARRAYS}
        form = self.format and [self.format.name, list(self.format.columns), self.format.prompt]
        return {
            **vars(self),
            **kept,
            "columns": sorted(self.columns),
            "unrendered": dict(self.unrendered),
            "format": form,
        }

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> "Index":
        """Return the index whose property `plain` has the given value.

        Raises:
            KeyError, TypeError, ValueError: the value does not have the form of the property `plain`.
        """
        found = cls(array("q", plain["places"]), array("q", plain["rows"]), array("q", plain["checksums"]))
        if not len(found.places) == len(found.rows) == len(found.checksums):
            raise ValueError("the arrays of an index have one length")
        for name in ("read", "skipped", "longest", "over", "cut", "has_references"):
            setattr(found, name, plain[name])
        found.malformed = [(row, text) for row, text in plain["malformed"]]
        found.first_over = (plain["first_over"][0], plain["first_over"][1])
        found.columns = set(plain["columns"])
        found.unrendered = Counter(plain["unrendered"])
        found.format = plain["format"] and Format(
            plain["format"][0], tuple(plain["format"][1]), plain["format"][2]
        )
        return found


_ARRAYS = ("places", "rows", "checksums")


@dataclass
class Pass:
    """A pass over a source's records, with its settings.

    Attributes:
        name: name of the source, for messages.
        is_array: True if the records are objects of a JSON array. Messages then name a record by its number
            instead of its line.
        is_json: True if the records hold only values that JSON can express.
        layout: the columns of the records. `layout.format` is set at the first well-formed record.
        fit: renderer and limits on length; None renders nothing and keeps every record.
        skip: True leaves malformed records out and counts them; False raises an error at a malformed record.
    """

    name: str
    is_array: bool
    is_json: bool
    layout: Layout
    fit: Fit | None = None
    skip: bool = False

    def place(self, row: int) -> str:
        """Return a record's source and row in the form for messages, such as `prompts.jsonl:7`."""
        return f"{self.name}: record {row}" if self.is_array else f"{self.name}:{row}"

    def run(self, items: Iterable[Item]) -> Index:
        """Return the index of the records `items`.

        Raises:
            DataError: a record is malformed and `skip` is False.
        """
        begin = time.monotonic()
        rest = iter(items)
        index = Index()
        for item in rest:
            self._add(index, item)
            is_known = self.fit is not None and self.layout.format is not None
            if is_known and time.monotonic() - begin > ALONE_S:
                self._share_out(rest, index)
        index.format = self.layout.format
        return index

    def _add(self, index: Index, item: Item) -> None:
        try:
            self._enter(index, *item)
        except DataError as error:
            if not self.skip:
                raise
            index.skipped += 1
            index.malformed = [*index.malformed, (item[1], str(error))][:_FIRST]

    def _enter(self, index: Index, place: int, row: int, record: Any) -> None:
        if isinstance(record, DataError):
            raise record
        prompt = self.layout.prompt(record, self.place(row), row, 0)
        size, is_cut = (
            (0, False) if self.fit is None else self.fit.measure(prompt, self.layout, self.place(row))
        )
        index.read += 1
        index.unrendered.update(
            unrendered(record, prompt, _reads_none if self.fit is None else self.fit.renderer.reads)
        )
        if self.fit is not None and not self.fit.keeps(size):
            return
        index.cut += is_cut
        index.columns |= prompt.columns.keys()
        index.places.append(place)
        index.rows.append(row)
        index.checksums.append(checksum_of(prompt))
        index.longest = max(index.longest, size)
        index.has_references = index.has_references or prompt.reference is not None
        if self.fit is not None and self.fit.room is not None and size > self.fit.room:
            index.first_over = index.first_over if index.over else (row, size)
            index.over += 1

    def _share_out(self, items: Iterator[Item], index: Index) -> None:
        """Index the remaining records in worker processes, and add their results to `index` in the order of
        the records."""
        assert self.fit is not None, "what needs no rendering is read by one process"
        cores = min(os.cpu_count() or 1, _MAX_WORKERS)
        workers = Workers(
            "oat.data.index:worker",
            [self._worker_arguments()],
            count=cores,
            timeout_s=_PATIENCE_S,
            memory_gb=_NO_LIMIT_GB,
        )
        try:
            for found in _in_order(workers, self._packed_blocks(items), 3 * cores):
                if found.failure:
                    raise DataError(
                        f"{self.name}: a process that renders its records {found.failure}; run the same "
                        "command again"
                    )
                if "error" in found.value:
                    raise DataError(found.value["error"])
                index.add(Index.of(found.value))
        finally:
            workers.close()

    def _worker_arguments(self) -> dict[str, Any]:
        layout = self.layout
        form = self.layout.format
        fit = self.fit
        assert form is not None, "a format is known"
        assert fit is not None, "something is rendered"
        return {
            "renderer": packed(fit.renderer),
            "fit": [fit.max_tokens, fit.room, fit.too_long],
            "layout": [
                layout.prompt_key,
                layout.reference_key,
                list(layout.responses),
                layout.score_key,
                layout.numbers,
            ],
            "format": [form.name, list(form.columns), form.prompt],
            "source": [self.name, self.is_array],
            "skip": self.skip,
        }

    def _packed_blocks(self, items: Iterator[Item]) -> Iterator[bytes | dict[str, Any]]:
        """Yield blocks of records, encoded for workers. If a block cannot be encoded, such as one with a
        number beyond 64 bits, compute its result in this process and yield the result instead."""
        while block := list(islice(items, _BLOCK)):
            try:
                yield msgspec.msgpack.encode([self._packed(*item) for item in block])
            except (TypeError, ValueError, OverflowError, RecursionError):
                yield self.result(block)

    def result(self, items: Sequence[Item]) -> dict[str, Any]:
        """Return the index of a block of records as plain data. If a record is malformed and `skip` is False,
        return {"error": message}."""
        index = Index()
        try:
            for item in items:
                self._add(index, item)
        except DataError as error:
            return {"error": str(error)}
        return index.plain

    def _packed(self, place: int, row: int, record: Any) -> tuple[int, int, Any, str | None]:
        try:
            if isinstance(record, DataError):
                raise record
            return place, row, record if self.is_json else checked(record, self.place(row)), None
        except DataError as error:
            return place, row, None, str(error)


def worker(arguments: Mapping[str, Any]) -> Callable[[bytes], dict[str, Any]]:
    """Return the function that a worker process calls with each block of records, encoded. The
    function returns `Pass.result` of the block."""
    layout = Layout(*arguments["layout"])
    layout.format = Format(arguments["format"][0], tuple(arguments["format"][1]), arguments["format"][2])
    renderer = unpacked(arguments["renderer"])
    layout.is_border = renderer.is_border
    name, is_array = arguments["source"]
    own = Pass(name, is_array, True, layout, Fit(renderer, *arguments["fit"]), arguments["skip"])

    def block(packed: bytes) -> dict[str, Any]:
        items = msgspec.msgpack.decode(packed)
        return own.result(
            [
                (place, row, record if error is None else DataError(error))
                for place, row, record, error in items
            ]
        )

    return block


def packed(renderer: Renderer) -> dict[str, Any]:
    """Return a renderer as plain data. `unpacked` makes an equal renderer from the data in any process."""
    with tempfile.TemporaryDirectory(prefix="oat-") as folder:
        renderer.tokenizer.save_pretrained(folder)
        files = {
            str(file.relative_to(folder)): file.read_bytes()
            for file in sorted(Path(folder).rglob("*"))
            if file.is_file()
        }
    return {"tokenizer": files, **renderer.definition}


def unpacked(plain: Mapping[str, Any]) -> Renderer:
    """Return the renderer that the plain data of `packed` describe."""
    from transformers import AutoTokenizer

    with tempfile.TemporaryDirectory(prefix="oat-") as folder:
        for name, content in plain["tokenizer"].items():
            (file := Path(folder) / name).parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    return Renderer.of(tokenizer, {name: value for name, value in plain.items() if name != "tokenizer"})


def checksum_of(prompt: Prompt) -> int:
    """Return the CRC-32 of a prompt's messages, reference answer and columns."""
    fields = [message.fields for message in prompt.messages if message.fields]
    return zlib.crc32(repr((prompt.messages, prompt.reference, prompt.columns, *fields)).encode())


def _reads_none(field: str, *, beside_calls: bool = False) -> bool:
    return False


def _in_order(workers: Workers, blocks: Iterable[bytes | dict[str, Any]], limit: int) -> Iterator[Outcome]:
    """Yield the results of blocks in the order of the blocks. At most `limit` blocks are in progress at a
    time."""
    rest = iter(blocks)
    found = dict[str, Outcome]()
    sent = 0
    for number in count():
        for block in islice(rest, limit - (sent - number)):
            if isinstance(block, bytes):
                workers.send(str(sent), block)
            else:
                found[str(sent)] = Outcome(block)
            sent += 1
        if number == sent:
            return
        while str(number) not in found:
            found.update(workers.collect(_PATIENCE_S))
        yield found.pop(str(number))


LARGE = 2**20
"""Size of data, in bytes, from which the index is stored. Smaller data are read in a second."""
MAX_BYTES = 2**30
"""Limit on the bytes of all indexes in one folder. Above it, the least recently used indexes are deleted."""
_ENDING = ".index"
_CODE = (
    "data/fit",
    "data/formats",
    "data/index",
    "data/messages",
    "data/sources",
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
