"""Where prompts come from: files, datasets of Hugging Face, Python; and the checks that every record passes, since data is hostile.

| source | is | row of a record |
| --- | --- | --- |
| `file.jsonl`, or any file of another ending | one JSON object a line, UTF-8; a byte-order mark, CRLF and blank lines are accepted | line |
| `file.csv` | a first line of column names, UTF-8; every value is text | its last line |
| `file.parquet` | a table | place, from 1 |
| a directory | what `datasets.save_to_disk` wrote, or a folder of data files as on the hub | place, from 1 |
| `org/name`, `org/name@config` | a dataset of the hub, or of its cache | place, from 1 |
| `file.py:function`, `package.module:function` | a function without arguments; it returns the same iterable of records every time | place, from 1 |
| an iterable of records | from Python only | place, from 1 |

No code that comes with a dataset is run: `datasets` runs none since 4.0, and older ones are refused.
"""

import codecs
import csv
import importlib
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from oat.errors import DataError, did_you_mean
from oat.plugins import load_symbol
from oat.types import Message, Prompt

_ROLES = ("system", "developer", "user", "assistant", "tool")
_MAX_DEPTH = 64
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_KINDS = {dict: "an object", list: "a list", str: "a string", bool: "true or false", int: "a number", float: "a number", type(None): "null"}
_Rows = Iterator[tuple[int, Any]]


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

    records: str | Path | Iterable[Mapping[str, Any]]
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
    if source.split is not None:
        raise DataError(f"{source.name}: expected a dataset, which has splits, and got none; remove `split: {source.split}`")
    if not isinstance(given, str):
        return enumerate(given, start=1)
    if ":" in given and not Path(given).exists() and given.rpartition(":")[2].isidentifier():
        return _function(given)
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


def _parsed(line: bytes, where: str) -> Any:
    try:
        return json.loads(line.decode("utf-8"), parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: expected UTF-8, got byte 0x{line[error.start]:02x} at {error.start}; save the file as UTF-8") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: expected one JSON object, got invalid JSON ({error}); write one complete object a line") from error


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _csv(path: Path) -> _Rows:
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, strict=True)
            names = reader.fieldnames or ()
            if len(set(names)) < len(names):
                raise DataError(f"{path}:1: expected column names that differ, got {', '.join(names)}; rename the columns")
            for record in reader:
                if None in record or None in record.values():
                    raise DataError(f"{path}:{reader.line_num}: expected {len(names)} values as in the first line, got more or fewer; quote commas")
                yield reader.line_num, record
    except (csv.Error, UnicodeDecodeError) as error:
        raise DataError(f"{path}: expected CSV in UTF-8, got something else ({error}); save the table as CSV in UTF-8") from error
    except OSError as error:
        raise _unreadable(path, "CSV", error) from error


def _parquet(path: Path) -> _Rows:
    parquet = _library("pyarrow.parquet", path)
    row = 0
    try:
        for batch in parquet.ParquetFile(path).iter_batches():
            for record in batch.to_pylist():
                row += 1
                yield row, record
    except (OSError, ValueError, NotImplementedError) as error:  # what pyarrow's own errors are
        raise _unreadable(path, "Parquet", error) from error


_READERS: dict[str, Callable[[Path], _Rows]] = {".jsonl": _jsonl, ".json": _jsonl, ".csv": _csv, ".parquet": _parquet}
"""By the ending of a file's name; any other is read as JSONL."""


def _unreadable(path: Path, kind: str, error: Exception) -> DataError:
    reason = getattr(error, "strerror", None) or " ".join(str(error).split())[:200]
    return DataError(f"{path}: expected a {kind} file, got {reason}; check the path, which is relative to where you are")


def _function(spec: str) -> _Rows:
    function = load_symbol(spec)
    try:
        yield from enumerate(function(), start=1)
    except Exception as error:  # a user's function raises what it likes
        raise DataError(f"{spec} failed with {type(error).__name__}: {error}; it must take no argument and return an iterable of records") from error


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
        if (split or "train") not in found:
            raise DataError(f"{name}: expected the split {split or 'train'!r}, got none; set `split` ({did_you_mean(split or 'train', found)})")
        found = found[split or "train"]
    elif split is not None:
        raise DataError(f"{name}: expected splits, got a saved dataset without any; remove `split: {split}`")
    yield from enumerate(found.with_format(None), start=1)


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
