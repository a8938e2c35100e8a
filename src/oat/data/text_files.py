"""Reads JSON lines, JSON arrays and CSV. A record of JSON lines or CSV can be read again by its place."""

import codecs
import csv
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from oat.errors import DataError
from oat.files import seen

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
        self.file = seen(path)

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
    if path.suffix.lower() != ".json" or seen(path).is_dir():
        return False
    try:
        with seen(path).open("rb") as file:
            return file.read(1024).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[")
    except OSError as error:
        raise unreadable(path, "JSON", error) from error


def array_of(path: Path) -> list[Any]:
    """Return the records of a JSON array.

    Raises:
        DataError: the file is not valid JSON.
    """
    content = seen(path).read_bytes()
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
