"""Prompt files, the order in which a run takes their prompts, and the cursor in that order."""

import codecs
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from oat.errors import DataError, TemplateError, did_you_mean
from oat.render import Renderer
from oat.seeds import Seeds
from oat.types import Message, Prompt

_ROLES = ("system", "developer", "user", "assistant", "tool")
_MAX_DEPTH = 64


class Prompts:
    """The prompts of one file, in a seeded order, with a cursor.

    Epoch e goes through the prompts by the permutation of the generator at ("prompts", e); a take that reaches the end of an epoch goes on in
    the next, so no tail is dropped. The n-th prompt of a run is a function of file, seed and n.

    Args:
        path: a JSONL file; see `read_jsonl`.
        prompt_key, reference_key: fields of a record.
        max_tokens: longest prompt in rendered ids; a longer one is left out together with its reference. None keeps all.
        epochs: passes over the file; None never ends.
        shuffle: False takes file order in every epoch.

    Attributes:
        size: prompts of one epoch.
        dropped: prompts left out because they are too long.

    Raises:
        DataError: the file or a record cannot be used, or no prompt is left.
    """

    def __init__(
        self,
        path: str | Path,
        renderer: Renderer,
        seeds: Seeds,
        *,
        prompt_key: str = "prompt",
        reference_key: str | None = None,
        max_tokens: int | None = None,
        epochs: int | None = None,
        shuffle: bool = True,
    ):
        read = read_jsonl(path, prompt_key=prompt_key, reference_key=reference_key)
        fitting = read if max_tokens is None else [prompt for prompt in read if _num_tokens(prompt, renderer, path) <= max_tokens]
        if not fitting:
            raise DataError(f"{path}: all {len(read)} prompts are longer than {max_tokens} tokens; raise `max_tokens`, or give shorter prompts")
        self._prompts = [replace(prompt, occurrence=index) for index, prompt in enumerate(fitting)]
        self._seeds = seeds
        self._epochs = epochs
        self._shuffle = shuffle
        self._taken = 0
        self._order: tuple[int, np.ndarray] = (-1, np.zeros(0, dtype=np.int64))
        self.size = len(self._prompts)
        self.dropped = len(read) - self.size

    def take(self, n: int) -> list[Prompt]:
        """The next n prompts; fewer, or none, when the epochs are used up."""
        if self._epochs is not None:
            n = min(n, self._epochs * self.size - self._taken)
        taken = []
        for occurrence in range(self._taken, self._taken + n):
            epoch, place = divmod(occurrence, self.size)
            taken.append(replace(self._prompts[self._permutation(epoch)[place]], occurrence=occurrence))
        self._taken += len(taken)
        return taken

    def all(self) -> list[Prompt]:
        """Every prompt in file order, for evaluation; the occurrence of each is its place in this list. Does not move the cursor."""
        return list(self._prompts)

    @property
    def state(self) -> dict[str, int]:
        """The cursor: how many prompts were taken."""
        return {"taken": self._taken}

    def load_state(self, state: dict[str, int]) -> None:
        """Go on after the prompts that another instance, over the same file and seed, had taken."""
        self._taken = state["taken"]

    def _permutation(self, epoch: int) -> np.ndarray:
        if self._order[0] != epoch:
            order = self._seeds.at("prompts", epoch).permutation(self.size) if self._shuffle else np.arange(self.size)
            self._order = (epoch, order)
        return self._order[1]


def read_jsonl(path: str | Path, *, prompt_key: str = "prompt", reference_key: str | None = None) -> list[Prompt]:
    """The prompts of a JSONL file: one JSON object a line, UTF-8; a byte-order mark, CRLF and blank lines are accepted.

    The prompt field is a string (one user message) or a list of {"role", "content"} messages. The reference field is a string or a number,
    which becomes its `str`. Every field but the prompt, the reference too, is kept among the columns under its own name.

    Returns:
        One prompt a record, in file order; its row is the line number from 1, its occurrence its place among the records from 0.
    Raises:
        DataError: the file cannot be read or has no record, or a record is malformed; names file, line and field, what was expected and
            found, and what to do.
    """
    prompts = [_prompt(record, f"{path}:{row}", row, index, prompt_key, reference_key) for index, (row, record) in enumerate(_records(Path(path)))]
    if not prompts:
        raise DataError(f"{path}: expected at least one record, got an empty file; write one JSON object a line")
    return prompts


def _records(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        with path.open("rb") as file:
            for row, line in enumerate(file, start=1):
                if row == 1:
                    line = line.removeprefix(codecs.BOM_UTF8)
                if line.strip():
                    yield row, _record(line, f"{path}:{row}")
    except OSError as error:
        raise DataError(
            f"{path}: expected a JSONL file, got {error.strerror or error}; check the path, which is relative to where you are"
        ) from error


def _record(line: bytes, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line.decode("utf-8"), parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: expected UTF-8, got byte 0x{line[error.start]:02x} at {error.start}; save the file as UTF-8") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: expected one JSON object, got invalid JSON ({error}); write one complete object a line") from error
    if not isinstance(record, dict):
        raise DataError(f"{where}: expected a JSON object, got {_kind(record)}; write {{...}} with the prompt as a field")
    for name, value in record.items():
        trouble = _trouble(name) or _trouble(value)
        if trouble:
            raise DataError(f"{where}: field {name!r}: expected text and numbers that can be stored, got {trouble}; remove it")
    return record


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _trouble(value: Any, depth: int = 0) -> str | None:
    """What in a JSON value cannot be stored, or None."""
    if depth > _MAX_DEPTH:
        return f"values nested deeper than {_MAX_DEPTH}"
    if isinstance(value, str):
        if "\0" in value:
            return "a NUL character"
        lone = next((c for c in value if "\ud800" <= c <= "\udfff"), None) if not value.isascii() else None
        return f"the lone surrogate U+{ord(lone):04X}" if lone else None
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        return "a whole number beyond 64 bits"
    if isinstance(value, float) and not math.isfinite(value):
        return "a number too large for 64 bits"
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
    if not isinstance(entry, dict) or set(entry) != {"role", "content"}:
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


def _num_tokens(prompt: Prompt, renderer: Renderer, path: str | Path) -> int:
    try:
        return len(renderer.prompt(prompt.messages))
    except TemplateError as error:
        raise DataError(f"{path}:{prompt.row}: the prompt cannot be rendered: {error}") from error


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false", int: "a number", float: "a number", type(None): "null"}
    return names[type(value)]
