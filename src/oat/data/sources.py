"""Reads records from files, datasets and Python, in order or by place. The place of a record is an
index or a byte offset, by which the reader finds the record again. The row of a record is the number that
messages show.

| source | content | row of a record |
| --- | --- | --- |
| `file.jsonl`, or a file with an ending not listed here | one JSON object per line, UTF-8 | line |
| `file.json` | one JSON object per line, or one array of objects | line; in an array: number, from 1 |
| `file.csv` | a first line of column names, UTF-8; every value is text | its last line |
| `file.parquet` | a table | number, from 1 |
| a directory | written by `datasets.save_to_disk`, or a folder of data files as on the hub | number, from 1 |
| `org/name`, `org/name@config` | a dataset of the hub, or of its local cache | number, from 1 |
| `file.py:function`, `package.module:function` | a function that returns records | number, from 1 |
| an iterable, a function, or a dict of iterables by split | given from Python | number, from 1 |

A byte-order mark, CRLF and blank lines are accepted. A function has no arguments and must return the same
records at every call. Packed files, such as gz and zip, are refused, and so are
TSV files.

Code that comes with a dataset is never run: `datasets` stopped running it in version 4.0, and older versions
are refused.

If a record cannot be parsed, a reader yields the error instead of raising it, because a generator that has
raised cannot continue. With `on_bad_record: skip`, the caller then skips the record and reads the next one.

Reads JSON lines, JSON arrays and CSV. A record of JSON lines or CSV can be read again by its place.
"""

import codecs
import csv
import importlib
import json
import re
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from oat.errors import DataError, did_you_mean
from oat.files import absolute, located
from oat.plugins.calls import guarded, raising
from oat.plugins.loading import load_symbol

_MAX_FIELD = 2**31 - 1
PACKED = (".gz", ".bz2", ".xz", ".zst", ".zip", ".tar", ".tgz")
ENDINGS = (".jsonl", ".json", ".csv", ".parquet", *PACKED)
"""Endings of files with a known format; a file with any other ending is read as JSONL."""


class Jsonl:
    """A reader of a file with one JSON object per line. A record's place is the byte at which its line
    begins."""

    kind = "JSONL"
    is_json = True

    def __init__(self, path: Path):
        self.path = path
        self.file = absolute(path)

    def prepare(self) -> None:
        pass

    def files(self) -> Sequence[Path] | None:
        return [self.file]

    def __iter__(self) -> Iterator[tuple[int, int, Any]]:
        with self._file() as file:
            start = 0
            for row, line in enumerate(file, start=1):
                if line.strip() and (start or line.strip() != codecs.BOM_UTF8):
                    yield start, row, self._record(line, start, row)
                start += len(line)

    def at(self, place: int, row: int) -> Any:
        with self._file() as file:
            file.seek(place)
            return self._at(file, place, row)

    def _at(self, file: BinaryIO, place: int, row: int) -> Any:
        return self._record(file.readline(), place, row)

    def _record(self, line: bytes, start: int, row: int) -> Any:
        return _parsed(line if start else line.removeprefix(codecs.BOM_UTF8), f"{self.path}:{row}")

    @contextmanager
    def _file(self) -> Iterator[BinaryIO]:
        try:
            with self.file.open("rb") as file:
                yield file
        except OSError as error:
            raise unreadable(self.path, self.kind, error) from error


class Csv(Jsonl):
    """A reader of a CSV file. A record may take several lines. A record's place is the byte at which it
    begins."""

    kind = "CSV"

    def __init__(self, path: Path):
        super().__init__(path)
        self._names: list[str] = []

    def prepare(self) -> None:
        next(iter(self), None)

    def __iter__(self) -> Iterator[tuple[int, int, Any]]:
        with self._file() as file:
            lines = _Lines(file, self.path)
            values = self._values(lines, csv.reader(lines, strict=True))
            for _, row, names in islice(values, 1):
                if isinstance(names, DataError):
                    raise names
                _refuse_other_separators(names, f"{self.path}:{row}")
                check_columns(names, f"{self.path}:{row}")
                self._names = names
            for start, row, record in values:
                yield start, row, self._named(record, row)

    def _values(self, lines: "_Lines", reader: Any) -> Iterator[tuple[int, int, Any]]:
        """Yield three things for each record: the byte where it begins, the number of its last line, and its
        values. If a record cannot be read, yield a DataError instead of its values, and continue with the
        next line."""
        csv.field_size_limit(_MAX_FIELD)
        while True:
            start, before = lines.place, lines.row
            try:
                values = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                place = f"{self.path}:{before + 1}"
                values = DataError(
                    f"{place}: expected CSV in the record that begins here, got something else ({error}); "
                    "mend its quotes, or if tabs or semicolons separate its columns (TSV), save it as CSV "
                    "with commas"
                )
            except DataError as error:
                values = error
            if values:
                yield start, lines.row, values

    def _at(self, file: BinaryIO, place: int, row: int) -> Any:
        lines = _Lines(file, self.path)
        return next(
            (
                self._named(values, row)
                for _, _, values in self._values(lines, csv.reader(lines, strict=True))
            ),
            None,
        )

    def _named(self, values: Any, row: int) -> Any:
        if isinstance(values, DataError):
            return values
        if len(values) != len(self._names):
            expected = f"expected {len(self._names)} values as in the first line, got {len(values)}"
            return DataError(f"{self.path}:{row}: {expected}; quote commas")
        return dict(zip(self._names, values, strict=True))


class _Lines:
    """An iterator of a file's lines as text. `place` is the offset in bytes at which the next line begins."""

    def __init__(self, file: BinaryIO, path: Path):
        self.file = file
        self.path = path
        self.place = file.tell()
        self.row = 0
        self._waiting: Iterator[bytes] = iter(())

    def __iter__(self) -> "_Lines":
        return self

    def __next__(self) -> str:
        line = next(self._waiting, None)
        if line is None:
            self._waiting = iter(next(self.file).splitlines(keepends=True))
            line = next(self._waiting)
        start = self.place
        self.place += len(line)
        self.row += 1
        try:
            return (line if start else line.removeprefix(codecs.BOM_UTF8)).decode()
        except UnicodeDecodeError as error:
            raise _no_utf8(f"{self.path}:{self.row}", line[error.start], error.start) from None


def _refuse_other_separators(names: Sequence[str], where: str) -> None:
    """Raise a DataError if the names of a CSV file's columns are separated by tabs or semicolons."""
    is_tsv = any("\t" in name for name in names)
    if is_tsv or (len(names) == 1 and ";" in names[0]):
        what = "tabs (TSV)" if is_tsv else "semicolons"
        raise DataError(
            f"{where}: expected column names separated by commas, got {what}; save the file as "
            "CSV with commas"
        )


def is_array(path: Path) -> bool:
    """Return True if a file is one JSON array: its name ends in `.json`, and its content begins with `[`.

    Raises:
        DataError: the name ends in `.json`, and the file cannot be read.
    """
    if path.suffix.lower() != ".json" or absolute(path).is_dir():
        return False
    try:
        with absolute(path).open("rb") as file:
            return file.read(1024).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[")
    except OSError as error:
        raise unreadable(path, "JSON", error) from error


def array_of(path: Path) -> list[Any]:
    """Return the records of a JSON array.

    Raises:
        DataError: the file is not valid JSON.
    """
    content = absolute(path).read_bytes()
    found: list[Any] | DataError = _parsed(content.removeprefix(codecs.BOM_UTF8), str(path), "one JSON array")
    if isinstance(found, DataError):
        raise found
    return found


def _parsed(text: bytes, where: str, expected: str = "one complete JSON object a line") -> Any:
    """Return the value of a JSON text. If it cannot be parsed, return (not raise) a DataError.

    Args:
        where, expected: the place of the text, and what should be there, in words for the error.
    """
    try:
        return json.loads(text.decode("utf-8"), parse_constant=_no_constant, object_pairs_hook=_object)
    except UnicodeDecodeError as error:
        return _no_utf8(where, text[error.start], error.start)
    except (ValueError, RecursionError) as error:
        got, advice = _known_format(text) or (f"invalid JSON ({error})", "mend it, or write the records anew")
        return DataError(f"{where}: expected {expected}, got {got}; {advice}")


def _known_format(text: bytes) -> tuple[str, str] | None:
    """Return what a text is that is no JSON, and what to do; None if it has no form that is known."""
    stripped = text.strip()
    if b"\r" in stripped and b"\n" not in stripped:
        return (
            "lines that end in a carriage return alone (CR), as on old Macs",
            "save the file with the line ends of Unix (LF)",
        )
    if b"\t" in stripped and not stripped.startswith((b"{", b"[")):
        return "values separated by tabs (TSV)", "save the file as JSONL, CSV or Parquet"
    return None


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if twice := _twice([name for name, _ in pairs]):
        raise ValueError(f"the field {twice!r} stands twice in one object")
    return dict(pairs)


def _twice(names: Sequence[str]) -> str | None:
    """Return the first name that occurs a second time; None if all names differ."""
    return (
        None
        if len(set(names)) == len(names)
        else next(name for place, name in enumerate(names) if name in names[:place])
    )


def _no_utf8(where: str, byte: int, place: int) -> DataError:
    return DataError(f"{where}: expected UTF-8, got byte 0x{byte:02x} at {place}; save the file as UTF-8")


def check_columns(names: Sequence[str], where: str) -> None:
    """Raise a DataError if two columns have the same name."""
    if twice := _twice(names):
        raise DataError(
            f"{where}: expected column names that differ, got {twice!r} twice; rename the columns"
        )


def unreadable(path: Path, kind: str, error: Exception) -> DataError:
    """Return the error for a file that cannot be read."""
    reason = getattr(error, "strerror", None) or " ".join(str(error).split())[:200]
    is_name = len(path.parts) == 1 and path.suffix.lower() not in ENDINGS
    hub = f"; a dataset of the hub is named with who owns it, as `org/{path}`" if is_name else ""
    return DataError(
        f"{path}: expected a {kind} file, got {reason}; check the path, which is relative to where you "
        f"are{hub}"
    )


_MAX_DEPTH = 100
"""Nesting depth beyond which `unboxed` returns a value unchanged; `formats.checked` refuses such values."""
_END = object()
_ROWS = 128
"""Number of rows of a Parquet file that are in memory at once."""
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")

Records = (
    str
    | Path
    | Iterable[Mapping[str, Any]]
    | Callable[[], Iterable[Mapping[str, Any]]]
    | Mapping[str, Iterable[Mapping[str, Any]]]
)
"""Type of a source; the head of this file lists the sources."""


class RecordReader(Protocol):
    """A reader of a source's records, in order or by place.

    Attributes:
        is_json: True if every record holds only values that JSON can express.
    """

    is_json: bool

    def __iter__(self) -> Iterator[tuple[int, int, Any]]:
        """Yield of each record: the place at which `at` finds it, its row (the number in messages), and its
        content. The content is a DataError if the record cannot be parsed."""

    def at(self, place: int, row: int) -> Any:
        """Return the record at a place, or a DataError if the record cannot be parsed. Read all records in
        order, or call `prepare`, before the first call of `at`."""

    def prepare(self) -> None:
        """Prepare this reader for `at`. A caller that has read all records in order need not call it."""

    def files(self) -> Sequence[Path] | None:
        """Return the files that hold all records; None if the records also depend on something else, such as
        a function."""


def open_records(
    records: Records, name: str, split: str | None = None, folder: Path | None = None
) -> RecordReader:
    """Open a source.

    Args:
        name: the source's name in messages.
        split: split of a dataset that has several; None means `train`.
        folder: folder for the copy of a source that can only be read in order; None means the system's folder
            for temporary files.

    Raises:
        DataError: the source cannot be read.
        ConfigError: the function that the source names cannot be loaded.
    """
    given = str(records) if isinstance(records, str | Path) else records
    if isinstance(given, str) and _is_dataset(given):
        return _opened(lambda: _dataset(given, split), given, folder, is_stored=True)
    if isinstance(given, Mapping):
        return _opened(lambda: _split_of(given, name, split), name, folder)
    if split is not None:
        raise DataError(
            f"{name}: expected a dataset, which has splits, and got none; remove `split: {split}`"
        )
    if not isinstance(given, str):
        return _opened(given if callable(given) else lambda: given, name, folder)
    if ":" in given and not absolute(given).exists() and given.rpartition(":")[2].isidentifier():
        return _opened(load_symbol(given), given, folder)
    path = Path(given)
    if path.suffix.lower() in PACKED:
        raise DataError(
            f"{path}: expected a file of records, got a packed one ({path.suffix}); unpack it, and name "
            "what was in it"
        )
    if path.suffix.lower() in (".tsv", ".tab"):
        raise DataError(
            f"{path}: expected a file of records, got values separated by tabs (TSV); save the file as "
            "JSONL, CSV or Parquet"
        )
    if path.suffix.lower() == ".parquet":
        return _Spooled(_parquet(path), given, folder, absolute(path))
    if is_array(path):
        return _Indexed(array_of(path), given, absolute(path))
    lines = Csv(path) if path.suffix.lower() == ".csv" else Jsonl(path)
    return (
        lines
        if lines.file.is_file() or not lines.file.exists()
        else _Spooled(((row, record) for _, row, record in lines), given, folder)
    )


class _Indexed:
    """A reader of records that Python finds by index: a list, a tuple, a JSON array or a dataset.

    Args:
        file: the file of a JSON array; None for other records.
        is_stored: True if the records are a dataset that was loaded from disk or from the hub.
    """

    def __init__(self, records: Any, name: str, file: Path | None = None, *, is_stored: bool = False):
        self.records = records
        self.name = name
        self.file = file
        self.is_json = file is not None
        self.is_stored = is_stored

    def prepare(self) -> None:
        pass

    def files(self) -> Sequence[Path] | None:
        """Return the file of a JSON array, or the files of a stored dataset; None for other records."""
        if self.file is not None:
            return [self.file]
        return [Path(each["filename"]) for each in self.records.cache_files] if self.is_stored else None

    def __iter__(self) -> Iterator[tuple[int, int, Any]]:
        return (
            (number, number + 1, unboxed(record))
            for number, record in enumerate(_guarded(lambda: self.records, self.name))
        )

    def at(self, place: int, row: int) -> Any:
        return unboxed(next(_guarded(lambda: [self.records[place]], self.name)))


class _Spooled:
    """A reader of records that can only be read in order. It copies them to disk, where `at` finds them.

    Args:
        file: the Parquet file that holds the records; None for other sources.
    """

    is_json = False

    def __init__(
        self, records: Iterable[tuple[int, Any]], name: str, folder: Path | None, file: Path | None = None
    ):
        self.records = records
        self.name = name
        self.folder = folder
        self.file = file

    def prepare(self) -> None:
        deque(self, maxlen=0)

    def files(self) -> Sequence[Path] | None:
        return None if self.file is None else [self.file]

    def __iter__(self) -> Iterator[tuple[int, int, Any]]:
        try:
            self._file = tempfile.TemporaryFile(dir=self.folder)  # noqa: SIM115 (open as long as this object)
            for row, record in self.records:
                place = self._file.tell()
                with suppress(
                    TypeError, ValueError, RecursionError
                ):  # malformed: `at` is never called for it
                    self._file.write(json.dumps(record).encode() + b"\n")
                yield place, row, record
        except OSError as error:
            where = f"a copy of it in {self.folder or tempfile.gettempdir()}"
            raise DataError(
                f"{self.name}: expected room for {where}, got {error.strerror}; make room, or give it as "
                "JSONL"
            ) from error

    def at(self, place: int, row: int) -> Any:
        self._file.seek(place)
        return json.loads(self._file.readline())


def _opened(
    function: Callable[[], Any], name: str, folder: Path | None, *, is_stored: bool = False
) -> RecordReader:
    """Open the records that `function` returns. A list, a tuple or a dataset with a length is read by index;
    other iterables are copied to disk."""
    (found,) = _guarded(lambda: [_plain(function())], name)
    if isinstance(found, list | tuple) or (hasattr(found, "with_format") and hasattr(found, "__len__")):
        return _Indexed(found, name, is_stored=is_stored)
    return _Spooled(enumerate(map(unboxed, _guarded(lambda: found, name)), start=1), name, folder)


def unboxed(value: Any, depth: int = 0) -> Any:
    """Return a value with the numbers of numpy and torch turned into Python's, and arrays and tuples turned
    into lists."""
    if depth > _MAX_DEPTH or isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        return {name: unboxed(part, depth + 1) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [unboxed(part, depth + 1) for part in value]
    return value.tolist() if hasattr(value, "tolist") else value


def _guarded(function: Callable[[], Iterable[Any]], name: str) -> Iterator[Any]:
    """Yield the records of the iterable that `function` returns. If the user's code raises an exception,
    raise a DataError."""

    def refuse(what: str) -> DataError:
        return DataError(
            f"{name} {what}; give an iterable of records, or a function without arguments that returns one"
        )

    with guarded(name, refuse):
        records = iter(function())
    while True:
        with raising(refuse):
            record = next(records, _END)
        if record is _END:
            return
        yield record


def _parquet(path: Path) -> Iterator[tuple[int, Any]]:
    parquet = _library("pyarrow.parquet", path)
    row = 0
    try:
        file = parquet.ParquetFile(absolute(path))
        check_columns(file.schema_arrow.names, str(path))
        for batch in file.iter_batches(_ROWS):
            for record in batch.to_pylist():
                row += 1
                yield row, record
    except DataError:
        raise
    except Exception as error:  # pyarrow's errors for a damaged file share no narrower base
        raise unreadable(path, "Parquet", error) from error


def _plain(found: Any) -> Any:
    """If `found` is a dataset, return it in the form that gives plain values instead of arrays or tensors.
    Otherwise return `found` unchanged."""
    return found.with_format(None) if hasattr(found, "with_format") else found


def _split_of(found: Mapping[str, Any], name: str, split: str | None) -> Any:
    if (split or "train") not in found:
        raise DataError(
            f"{name}: expected the split {split or 'train'!r}, got none; set `split` "
            f"({did_you_mean(split or 'train', found)})"
        )
    return found[split or "train"]


def _dataset(name: str, split: str | None) -> Any:
    datasets = _library("datasets", name)
    if int(datasets.__version__.split(".")[0]) < 4:
        raise DataError(
            f"{name}: datasets {datasets.__version__} may run code that comes with a dataset; pip install "
            "'oat-align[data]'"
        )
    path, _, config = (name, "", "") if absolute(name).is_dir() else name.partition("@")
    try:
        is_saved = (absolute(path) / "dataset_dict.json").exists() or (absolute(path) / "state.json").exists()
        found = (
            datasets.load_from_disk(located(path))
            if is_saved
            else datasets.load_dataset(located(path), config or None)
        )
    except Exception as error:  # the library's errors share no narrower base
        raise _no_dataset(name, path, error) from error
    if isinstance(found, Mapping):
        found = _split_of(found, name, split)
    elif split is not None:
        raise DataError(f"{name}: expected splits, got a saved dataset without any; remove `split: {split}`")
    return found


def _no_dataset(name: str, path: str, error: Exception) -> DataError:
    reason = " ".join(str(error).split())[:300]
    if absolute(path).is_dir():
        return DataError(
            f"{name}: expected a dataset that was saved, or a folder of data files, got neither "
            f"({reason}); give another directory"
        )
    return DataError(
        f"{name}: there is no such file or directory, and the dataset of that name cannot be had from the "
        f"hub ({reason}); give another name (`org/name@config` where it has several configurations). Without "
        f"a network: fetch it where there is one, with `hf download --repo-type dataset {path} --local-dir "
        "DIR`, and give DIR; or bring the folder HF_HOME of a machine that has loaded it once, set HF_HOME "
        "to it, and HF_HUB_OFFLINE=1 to read from there only"
    )


def _library(module: str, name: str | Path) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise DataError(
            f"{name}: reading it needs the library {module.split('.')[0]} ({error}); pip install "
            "'oat-align[data]'"
        ) from error


def is_named(text: str) -> bool:
    """Return True if a text can name a source: a file, a dataset, or a function."""
    is_function = text.rpartition(":")[2].isidentifier() and bool(text.rpartition(":")[0])
    return absolute(text).exists() or _is_dataset(text) or is_function or Path(text).suffix.lower() in ENDINGS


def _is_dataset(name: str) -> bool:
    if absolute(name).exists():
        return absolute(name).is_dir()
    start = name.partition("@")[0]
    return absolute(start).is_dir() or (
        bool(_HUB_ID.fullmatch(start)) and Path(start).suffix.lower() not in ENDINGS
    )
