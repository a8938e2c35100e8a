"""Where prompts come from: files, datasets of Hugging Face, Python; and the checks that every record passes, since data is hostile.

| source | is | row of a record |
| --- | --- | --- |
| `file.jsonl`, or any file of another ending | one JSON object a line, UTF-8; a byte-order mark, CRLF and blank lines are accepted | line |
| `file.json` | the same, or one array of such objects | line, or place from 1 |
| `file.csv` | a first line of column names, UTF-8; every value is text | its last line |
| `file.parquet` | a table | place, from 1 |
| a directory | what `datasets.save_to_disk` wrote, or a folder of data files as on the hub | place, from 1 |
| `org/name`, `org/name@config` | a dataset of the hub, or of its cache | place, from 1 |
| `file.py:function`, `package.module:function` | a function without arguments; it returns the same iterable of records every time | place, from 1 |
| an iterable of records, a function, a dict of them by split | from Python only | place, from 1 |

Packed files (gz, zip and the like) are refused; unpack them.

No code that comes with a dataset is run: `datasets` runs none since 4.0, and older ones are refused.
"""

import codecs
import csv
import importlib
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn, TextIO

from oat.errors import DataError, did_you_mean
from oat.plugins import load_symbol
from oat.types import Message, Prompt

_ROLES = ("system", "developer", "user", "assistant", "tool")
_MAX_DEPTH = 64
_MAX_FIELD = 2**31 - 1
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_KINDS = {dict: "an object", list: "a list", str: "a string", bool: "true or false", int: "a number", float: "a number", type(None): "null"}
_Rows = Iterator[tuple[int, Any]]

Records = str | Path | Iterable[Mapping[str, Any]] | Callable[[], Iterable[Mapping[str, Any]]] | Mapping[str, Iterable[Mapping[str, Any]]]
"""What the head of this file lists."""


@dataclass(frozen=True)
class Source:
    """One place that prompts come from.

    Attributes:
        records: what the head of this file lists.
        weight: its share of a run's prompts, relative to the weights of the other sources.
        split: of a dataset that has several; None is `train`.

    Raises:
        DataError: the weight is not a number above 0.
    """

    records: Records
    weight: float = 1.0
    split: str | None = None

    def __post_init__(self) -> None:
        if not 0 < self.weight < math.inf:
            raise DataError(f"{self.name}: a weight of {self.weight} gives no share of the prompts; set a number above 0, or leave the source out")

    @property
    def name(self) -> str:
        return str(self.records) if isinstance(self.records, str | Path) else "records"


def read_prompts(source: Source, *, prompt_key: str = "prompt", reference_key: str | None = None, max_prompts: int | None = None) -> list[Prompt]:
    """The prompts of a source.

    The prompt field is a string (one user message) or a list of {"role", "content"} messages, further fields of which must be null. The
    reference field is a string or a number, which becomes its `str`. Every field but the prompt, the reference too, is kept among the columns
    under its own name.

    Args:
        max_prompts: read the first so many records and no more.
    Returns:
        One prompt a record, in the source's order; its row as the head of this file says, its occurrence its place among the records from 0.
    Raises:
        DataError: the source cannot be read or has no record, or a record is malformed; names source, row and field, what was expected and
            found, and what to do.
        ConfigError: a function cannot be loaded.
    """
    prompts = []
    for index, (row, record) in enumerate(islice(_rows(source), max_prompts)):
        where = f"{source.name}:{row}"
        prompts.append(_prompt(_checked(record, where), where, row, index, prompt_key, reference_key))
    if not prompts:
        raise DataError(f"{source.name}: expected at least one record, got an empty file or dataset; add records, or name another")
    return prompts


def _rows(source: Source) -> _Rows:
    given = str(source.records) if isinstance(source.records, str | Path) else source.records
    if isinstance(given, str) and _is_dataset(given):
        return _dataset(given, source.split)
    if isinstance(given, Mapping):
        return _python(lambda: _of_split(given, source.name, source.split), source.name)
    if source.split is not None:
        raise DataError(f"{source.name}: expected a dataset, which has splits, and got none; remove `split: {source.split}`")
    if not isinstance(given, str):
        return _python(given if callable(given) else lambda: given, source.name)
    if ":" in given and not Path(given).exists() and given.rpartition(":")[2].isidentifier():
        return _python(load_symbol(given), given)
    return _READERS.get(Path(given).suffix.lower(), _jsonl)(Path(given))


def _is_dataset(name: str) -> bool:
    if Path(name).exists():
        return Path(name).is_dir()
    start = name.partition("@")[0]
    return Path(start).is_dir() or (bool(_HUB_ID.fullmatch(start)) and Path(start).suffix.lower() not in _READERS)


def _jsonl(path: Path) -> _Rows:
    try:
        with path.open("rb") as file:
            for row, line in enumerate(file, start=1):
                if row == 1:
                    line = line.removeprefix(codecs.BOM_UTF8)
                if line.strip():
                    yield row, _parsed(line, f"{path}:{row}")
    except OSError as error:
        raise _unreadable(path, "JSONL", error) from error


def _json(path: Path) -> _Rows:
    try:
        with path.open("rb") as file:
            is_array = file.read(1024).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[")
        content = path.read_bytes().removeprefix(codecs.BOM_UTF8) if is_array else b""
    except OSError as error:
        raise _unreadable(path, "JSON", error) from error
    yield from enumerate(_parsed(content, str(path), "one JSON array"), start=1) if is_array else _jsonl(path)


def _parsed(text: bytes, where: str, expected: str = "one complete JSON object a line") -> Any:
    try:
        return json.loads(text.decode("utf-8"), parse_constant=_no_constant, object_pairs_hook=_object)
    except UnicodeDecodeError as error:
        raise _no_utf8(where, text[error.start], error.start) from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: expected {expected}, got invalid JSON ({error}); mend it, or write the records anew") from error


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if twice := _twice([name for name, _ in pairs]):
        raise ValueError(f"the field {twice!r} stands twice in one object")
    return dict(pairs)


def _twice(names: Sequence[str]) -> str | None:
    """The first name that stands there before, or None."""
    return None if len(set(names)) == len(names) else next(name for place, name in enumerate(names) if name in names[:place])


def _no_utf8(where: str, byte: int, place: int) -> DataError:
    return DataError(f"{where}: expected UTF-8, got byte 0x{byte:02x} at {place}; save the file as UTF-8")


def _csv(path: Path) -> _Rows:
    csv.field_size_limit(_MAX_FIELD)
    row = 0
    try:
        with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
            reader = csv.DictReader(_lines(file, path), strict=True)
            names = reader.fieldnames or ()
            _check_columns(names, f"{path}:1")
            row = reader.line_num
            for record in reader:
                if None in record or None in record.values():
                    raise DataError(f"{path}:{reader.line_num}: expected {len(names)} values as in the first line, got more or fewer; quote commas")
                row = reader.line_num
                yield row, record
    except csv.Error as error:
        raise DataError(f"{path}:{row + 1}: expected CSV in the record that begins here, got something else ({error}); mend its quotes") from error
    except OSError as error:
        raise _unreadable(path, "CSV", error) from error


def _lines(file: TextIO, path: Path) -> Iterator[str]:
    """The lines of a file in which bytes that are no UTF-8 were read as lone surrogates."""
    for row, line in enumerate(file, start=1):
        try:
            line.encode()
        except UnicodeEncodeError as error:
            raise _no_utf8(f"{path}:{row}", ord(line[error.start]) - 0xDC00, len(line[: error.start].encode())) from None
        yield line


def _check_columns(names: Sequence[str], where: str) -> None:
    if twice := _twice(names):
        raise DataError(f"{where}: expected column names that differ, got {twice!r} twice; rename the columns")


def _parquet(path: Path) -> _Rows:
    parquet = _library("pyarrow.parquet", path)
    row = 0
    try:
        file = parquet.ParquetFile(path)
        _check_columns(file.schema_arrow.names, str(path))
        for batch in file.iter_batches():
            for record in batch.to_pylist():
                row += 1
                yield row, record
    except DataError:
        raise
    except (OSError, ValueError, NotImplementedError) as error:  # what pyarrow's own errors are
        raise _unreadable(path, "Parquet", error) from error


def _packed(path: Path) -> NoReturn:
    raise DataError(f"{path}: expected a file of records, got a packed one ({path.suffix}); unpack it, and name what was in it")


_READERS: dict[str, Callable[[Path], _Rows]] = {
    ".jsonl": _jsonl,
    ".json": _json,
    ".csv": _csv,
    ".parquet": _parquet,
    **dict.fromkeys((".gz", ".bz2", ".xz", ".zst", ".zip", ".tar", ".tgz"), _packed),
}
"""By the ending of a file's name; any other is read as JSONL."""


def _unreadable(path: Path, kind: str, error: Exception) -> DataError:
    reason = getattr(error, "strerror", None) or " ".join(str(error).split())[:200]
    is_name = len(path.parts) == 1 and path.suffix.lower() not in _READERS
    hub = f"; a dataset of the hub is named with who owns it, as `org/{path}`" if is_name else ""
    return DataError(f"{path}: expected a {kind} file, got {reason}; check the path, which is relative to where you are{hub}")


def _python(function: Callable[[], Iterable[Any]], name: str) -> _Rows:
    """The records that people's own code gives."""
    try:
        yield from enumerate(_plain(function()), start=1)
    except DataError:
        raise
    except Exception as error:  # it raises what it likes
        raise DataError(
            f"{name} failed with {type(error).__name__}: {error}; give an iterable of records, or a function without arguments that returns one"
        ) from error


def _plain(found: Any) -> Any:
    """Records as plain values, also of a dataset that was set to give arrays or tensors."""
    return found.with_format(None) if hasattr(found, "with_format") else found


def _of_split(found: Mapping[str, Any], name: str, split: str | None) -> Any:
    if (split or "train") not in found:
        raise DataError(f"{name}: expected the split {split or 'train'!r}, got none; set `split` ({did_you_mean(split or 'train', found)})")
    return found[split or "train"]


def _dataset(name: str, split: str | None) -> _Rows:
    datasets = _library("datasets", name)
    if int(datasets.__version__.split(".")[0]) < 4:
        raise DataError(f"{name}: datasets {datasets.__version__} may run code that comes with a dataset; pip install 'oat-align[data]'")
    path, _, config = (name, "", "") if Path(name).is_dir() else name.partition("@")
    try:
        is_saved = (Path(path) / "dataset_dict.json").exists() or (Path(path) / "state.json").exists()
        found = datasets.load_from_disk(path) if is_saved else datasets.load_dataset(path, config or None)
    except Exception as error:  # the library's errors share no narrower base
        raise _no_dataset(name, path, error) from error
    if isinstance(found, Mapping):
        found = _of_split(found, name, split)
    elif split is not None:
        raise DataError(f"{name}: expected splits, got a saved dataset without any; remove `split: {split}`")
    yield from enumerate(_plain(found), start=1)


def _no_dataset(name: str, path: str, error: Exception) -> DataError:
    reason = " ".join(str(error).split())[:300]
    if Path(path).is_dir():
        return DataError(f"{name}: expected a dataset that was saved, or a folder of data files, got neither ({reason}); give another directory")
    return DataError(
        f"{name}: there is no such file or directory, and the dataset of that name cannot be had from the hub ({reason}); give another name "
        "(`org/name@config` where it has several configurations). Without a network: fetch it where there is one, with "
        f"`hf download --repo-type dataset {path} --local-dir DIR`, and give DIR; or bring the folder HF_HOME of a machine that has loaded it once, "
        "set HF_HOME to it, and HF_HUB_OFFLINE=1 to read from there only"
    )


def _library(module: str, name: str | Path) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise DataError(f"{name}: reading it needs the library {module.split('.')[0]} ({error}); pip install 'oat-align[data]'") from error


def _checked(record: Any, where: str) -> dict[str, Any]:
    if not isinstance(record, Mapping):
        raise DataError(f"{where}: expected a JSON object, got {_kind(record)}; write {{...}} with the prompt as a field")
    for name, value in record.items():
        trouble = (_trouble(name) if isinstance(name, str) else "a name that is no text") or _trouble(value)
        if trouble:
            raise DataError(f"{where}: field {name!r}: expected text and numbers that can be stored, got {trouble}; remove it")
    return dict(record)


def _trouble(value: Any, depth: int = 0) -> str | None:
    """What in a value cannot be stored, or None."""
    if depth > _MAX_DEPTH:
        return f"values nested deeper than {_MAX_DEPTH}"
    if type(value) not in _KINDS:
        return f"a value of the type {type(value).__name__}"
    if isinstance(value, str):
        if "\0" in value:
            return "a NUL character"
        lone = next((c for c in value if "\ud800" <= c <= "\udfff"), None) if not value.isascii() else None
        return f"the lone surrogate U+{ord(lone):04X}" if lone else None
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        return "a whole number beyond 64 bits"
    if isinstance(value, float) and not math.isfinite(value):
        return "a number that is not finite, or too large for 64 bits"
    if isinstance(value, dict) and not all(isinstance(name, str) for name in value):
        return "a name that is no text"
    parts: list[Any] = [*value.keys(), *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else []
    return next((trouble for part in parts if (trouble := _trouble(part, depth + 1))), None)


def _prompt(record: dict[str, Any], where: str, row: int, index: int, prompt_key: str, reference_key: str | None) -> Prompt:
    messages = _messages(_field(record, prompt_key, where, "prompt_key"), f"{where}: field {prompt_key!r}")
    reference = None
    if reference_key is not None:
        value = _field(record, reference_key, where, "reference_key")
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise DataError(f"{where}: field {reference_key!r}: expected a string or a number, got {_kind(value)}; write the answer as a string")
        reference = str(value)
    columns = {name: value for name, value in record.items() if name != prompt_key}
    return Prompt(row=row, occurrence=index, messages=messages, reference=reference, columns=columns)


def _field(record: dict[str, Any], key: str, where: str, setting: str) -> Any:
    if key not in record:
        raise DataError(f"{where}: field {key!r}: expected in every record, got none; set `{setting}` or add the field ({did_you_mean(key, record)})")
    return record[key]


def _messages(value: Any, where: str) -> tuple[Message, ...]:
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    if not isinstance(value, list):
        raise DataError(f"{where}: expected a string or a list of messages, got {_kind(value)}; write the prompt as text")
    if not value:
        raise DataError(f"{where}: expected a prompt, got an empty list; write at least one message or remove the record")
    messages = tuple(_message(entry, f"{where}, message {number}") for number, entry in enumerate(value, start=1))
    if messages[-1].role not in ("user", "tool"):
        raise DataError(f"{where}: expected the last message from user or tool, got {messages[-1].role}; end the prompt with what is to be answered")
    return messages


def _message(entry: Any, where: str) -> Message:
    """Fields that are null do not count: tables write so what a message lacks."""
    given = {name for name, value in entry.items() if value is not None or name in ("role", "content")} if isinstance(entry, dict) else set()
    if given != {"role", "content"}:
        got = "the fields " + (", ".join(map(repr, entry)) or "none") if isinstance(entry, dict) else _kind(entry)
        raise DataError(f'{where}: expected {{"role": ..., "content": ...}}, got {got}; write exactly these two fields')
    role, content = entry["role"], entry["content"]
    if role not in _ROLES:
        raise DataError(f"{where}: expected a role, got {role!r}; {did_you_mean(str(role), _ROLES)}")
    if not isinstance(content, str):
        raise DataError(f"{where}: expected a string as content, got {_kind(content)}; write the message as text")
    if not content.strip():
        raise DataError(f"{where}: expected text, got an empty message; write the prompt or remove the record")
    return Message(role, content)


def _kind(value: Any) -> str:
    return _KINDS.get(type(value), f"a value of the type {type(value).__name__}")
