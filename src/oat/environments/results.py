"""The text that is told of a tool's result.

The text is Python's `str` of the result. It must be the same in two equal runs, so two things are different:

* The elements of a set are told in order. Python's own order of texts differs from process to process.
* A result is refused if its text has the address of an object. So functions, generators and objects without
  a text of their own have no text.
"""

import re
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from types import ModuleType
from typing import Any

import numpy as np

from oat.errors import EpisodeError, is_signal, shortened

_ADDRESS = re.compile(r" at 0x[0-9A-Fa-f]+")
_MOST_PARTS = 10_000
"""Largest number of parts of a result that are looked at."""


def result_text(result: Any, tool: str) -> str:
    """Return the text of a tool's result.

    Raises:
        EpisodeError: the text has the address of an object.
        Exception: the result's class makes no text of it.
    """
    text = str(result)
    if isinstance(result, str | int | float | None):
        return text
    text = _with_sets_in_order(result, text)
    if _ADDRESS.search(_without_texts(result, text)):
        told = shortened(_ADDRESS.sub("", text))
        raise EpisodeError(
            f"the tool {tool} returned a {type(result).__name__} ({told}) whose text has the address of an "
            "object, which differs from run to run; return text, numbers, or lists and dicts of these"
        )
    return text


def error_text(error: BaseException) -> str:
    """Return the text of an exception, without addresses; "" if none can be made."""
    try:
        return without_addresses(error, str(error))
    except BaseException as worse:
        if is_signal(worse):
            raise
        return ""


def without_addresses(value: Any, text: str) -> str:
    """Return the text of a value without addresses, and with the elements of its sets in order."""
    return _ADDRESS.sub("", _with_sets_in_order(value, text))


def _with_sets_in_order(value: Any, text: str) -> str:
    for each in _parts(value):
        if _is_set(each) and len(each) > 1 and (told := repr(each)) in text:
            text = text.replace(told, _in_order(each))
    return text


def _is_set(value: Any) -> bool:
    told: Any = type(value).__repr__
    return told is set.__repr__ or told is frozenset.__repr__


def _in_order(value: Any) -> str:
    """Return the `repr` of a value, with the elements of sets in order."""
    if type(value) is tuple:
        return f"({', '.join(map(_in_order, value))}{',' if len(value) == 1 else ''})"
    if not _is_set(value) or not value:
        return repr(value)
    is_sorted = all(type(each) is int for each in value)
    told = ", ".join(map(repr, sorted(value)) if is_sorted else sorted(map(_in_order, value)))
    return f"{{{told}}}" if type(value) is set else f"{type(value).__name__}({{{told}}})"


def _without_texts(value: Any, text: str) -> str:
    """Return a text without those parts of the value that are texts themselves. They may say " at 0x1f"."""
    texts = {str(each) for each in _parts(value) if isinstance(each, str) and _ADDRESS.search(each)}
    for each in sorted(texts, key=len, reverse=True):
        text = text.replace(each, "").replace(repr(each)[1:-1], "")
    return text


def _parts(value: Any) -> Iterator[Any]:
    """Yield a value and what it consists of, outer parts first: elements, and the attributes of objects."""
    waiting: deque[Any] = deque([value])
    seen: dict[int, Any] = {}
    while waiting and len(seen) < _MOST_PARTS:
        each = waiting.popleft()
        if id(each) in seen:
            continue
        seen[id(each)] = each  # an object that is kept keeps its id
        yield each
        if isinstance(each, dict):
            waiting += [*each.keys(), *each.values()]
        elif isinstance(each, list | tuple | set | frozenset | deque):
            waiting += each
        elif isinstance(each, BaseException):
            waiting += each.args
        elif isinstance(each, np.ndarray) and each.dtype == object:
            waiting += each.ravel().tolist()
        if not isinstance(each, type | ModuleType | str | int | float):
            waiting += _attributes(each)


def _attributes(value: Any) -> list[Any]:
    found = [*getattr(value, "__dict__", {}).values()]
    for kind in type(value).__mro__:
        for name in vars(kind).get("__slots__", ()):
            with suppress(Exception):  # the code of the attribute may raise any
                found.append(getattr(value, name))
    return found
