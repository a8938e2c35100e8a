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
"""

import importlib
import json
import re
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from oat.data.text_files import ENDINGS, PACKED, Csv, Jsonl, array_of, check_columns, is_array, unreadable
from oat.errors import DataError, did_you_mean
from oat.files import located, seen
from oat.plugins.calls import guarded, raising
from oat.plugins.loading import load_symbol

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
    if ":" in given and not seen(given).exists() and given.rpartition(":")[2].isidentifier():
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
        return _Spooled(_parquet(path), given, folder, seen(path))
    if is_array(path):
        return _Indexed(array_of(path), given, seen(path))
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
        file = parquet.ParquetFile(seen(path))
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
    path, _, config = (name, "", "") if seen(name).is_dir() else name.partition("@")
    try:
        is_saved = (seen(path) / "dataset_dict.json").exists() or (seen(path) / "state.json").exists()
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
    if seen(path).is_dir():
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
    return seen(text).exists() or _is_dataset(text) or is_function or Path(text).suffix.lower() in ENDINGS


def _is_dataset(name: str) -> bool:
    if seen(name).exists():
        return seen(name).is_dir()
    start = name.partition("@")[0]
    return seen(start).is_dir() or (
        bool(_HUB_ID.fullmatch(start)) and Path(start).suffix.lower() not in ENDINGS
    )
