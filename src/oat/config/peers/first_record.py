"""Whether prompts are conversations, by their first record, and how many they are. Only what is near at hand
is read."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from oat.errors import is_signal
from oat.files import absolute

_LONGEST = 1_000_000
"""Number of bytes within which the first record of a file is sought."""
_LARGEST = 20_000_000
"""Number of bytes of a file whose lines are counted."""
_COLUMNS = ("prompt", "messages", "conversations", "chosen", "completion")
"""Columns that may have conversations."""


def has_messages(prompts: Any, key: Any = None) -> bool | None:
    """Return True if the prompts of the first record are messages, False if they are text; None: the prompts
    are no local file of JSON and no list of records, or its first record is neither.

    Args:
        prompts: the path of a file, records, or what else a user gave for them.
        key: name of the column of prompts; None: the usual ones.
    """
    try:
        record = _first(prompts)
        columns = [record.get(name) for name in (key, *_COLUMNS) if isinstance(name, str)]
    except BaseException as error:  # a user's object may raise anything
        if is_signal(error):
            raise
        return None
    given = next((column for column in columns if isinstance(column, str | list | tuple)), None)
    if not given:
        return None
    return not isinstance(given, str) and isinstance(given[0], Mapping)


def count(prompts: Any) -> int | None:
    """Return the number of records; None: they are no list and no local file of lines, or it is large.

    Args:
        prompts: as for `has_messages`.
    """
    try:
        if not isinstance(prompts, str | Path):
            is_known = isinstance(prompts, list | tuple) or type(prompts).__module__.startswith("datasets.")
            return len(prompts) if is_known else None
        path = absolute(Path(prompts))
        if path.suffix != ".jsonl" or not path.is_file() or path.stat().st_size > _LARGEST:
            return None
        with path.open("rb") as file:
            return sum(not line.isspace() for line in file)
    except BaseException as error:
        if is_signal(error):
            raise
        return None


def _first(prompts: Any) -> Mapping[str, Any]:
    """Return the first record.

    Raises:
        ValueError, OSError: it cannot be read.
    """
    if isinstance(prompts, str | Path):
        path = absolute(Path(prompts))
        if path.suffix not in (".jsonl", ".json") or not path.is_file():
            raise ValueError(prompts)
        with path.open("rb") as file:
            text = file.read(_LONGEST).decode("utf-8-sig", errors="replace").lstrip("[ \t\r\n")
        first: Any = json.JSONDecoder().raw_decode(text)[0]
    else:
        is_known = isinstance(prompts, list | tuple) or type(prompts).__module__.startswith("datasets.")
        first = prompts[0] if is_known else None
    if not isinstance(first, Mapping):
        raise ValueError("no record")
    return first
