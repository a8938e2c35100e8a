"""The text that is told of a tool's result.

The text is Python's `str` of the result. It must be the same in two equal runs, so some things are different:

* The elements of a set are told in order. Python's own order of texts differs from process to process.
* A result is refused if its text has the address of an object, or the state of something of the process. So
  functions, generators, threads, sockets and objects without a text of their own have no text.
* An address within a text, as a program's output may have it (`<A object at 0x7f1b2c3d4e5f>`), is left out.

A text that a tool itself makes shows nothing of this. `", ".join(words)` of a set of texts is the same in two
runs if `PYTHONHASHSEED` is, which `oat train` and `oat eval` see to (`cli/restart.py`). A table for the
terminal is the same, since each terminal has one size in a call (`plugins/calls.py`). An order by address, as
a set of plain objects has, `id` and `hash` of an object, the clock and the network are the tool's own, and
are not seen.
"""

import gc
import re
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from enum import Enum
from types import (
    AsyncGeneratorType,
    CodeType,
    CoroutineType,
    FrameType,
    FunctionType,
    GeneratorType,
    ModuleType,
    TracebackType,
)
from typing import Any

import numpy as np

from oat.errors import EpisodeError, is_signal, shortened

_AT = re.compile(r" at 0x([0-9A-Fa-f]+)")
_NUMBER = re.compile(r"(?<![\w.])(?:0x[0-9A-Fa-f]+|-?\d{6,30})\b")
_ADDRESSES = range(2**24, 2**48)
"""Numbers that are addresses if they are written in base 16 where addresses are. Smaller ones are colours and
offsets, larger ones hashes."""
_LONG_ADDRESSES = range(2**32, 2**48)
"""Numbers in base 16 that no object tells of itself, unless they are addresses."""
_OF_THE_PROCESS = (
    *("_asyncio", "_ctypes", "_socket", "_thread", "asyncio", "concurrent", "ctypes", "multiprocessing"),
    *("socket", "ssl", "threading", "weakref"),
)
"""Modules whose objects tell of the process: its threads, its pointers, its connections."""
_DATA = (type, Enum, BaseException)
"""Types whose objects tell nothing of the process, even if one of these modules defines them."""
_OPAQUE = (
    *(type, ModuleType, FunctionType, CodeType, FrameType, TracebackType),
    *(GeneratorType, CoroutineType, AsyncGeneratorType),
)
"""Types of objects whose parts are not a part of their text."""
_ATOMS = (str, bytes, int, float, complex, bool, type(None))
_MOST_PARTS = 10_000
"""Largest number of parts of a result, other than texts and numbers, that are looked at."""


def result_text(result: Any, tool: str) -> str:
    """Return the text of a tool's result.

    Raises:
        EpisodeError: the text differs from process to process.
        Exception: the result's class makes no text of it.
    """
    text = str(result)
    if type(result) in _ATOMS:
        return _without_addresses(text)
    text = _with_sets_in_order(result, text)
    if fault := _fault(result, text):
        told = shortened(_NUMBER.sub("...", _AT.sub("", text)))
        raise EpisodeError(
            f"the tool {tool} returned a {type(result).__name__} ({told}) whose text has {fault}, which "
            "differs from run to run; return text, numbers, or lists and dicts of these"
        )
    return _without_addresses(text)


def error_text(error: BaseException) -> str:
    """Return the text of an exception, without addresses; "" if none can be made."""
    try:
        return same_text(error, str(error))
    except BaseException as worse:
        if is_signal(worse):
            raise
        return ""


def same_text(value: Any, text: str) -> str:
    """Return the text of a value without addresses, and with the elements of its sets in order."""
    text = _AT.sub("", _with_sets_in_order(value, text))
    numbers = _identities(value) if _NUMBER.search(text) else set()

    def without(match: re.Match[str]) -> str:
        number = _number(match[0])
        if match[0].startswith("0x") and (number in _ADDRESSES or number in numbers):
            return "0x..."
        return "..." if number in numbers else match[0]

    return _NUMBER.sub(without, text)


def _without_addresses(text: str) -> str:
    return _AT.sub(lambda match: "" if int(match[1], 16) in _ADDRESSES else match[0], text)


def _fault(value: Any, text: str) -> str:
    """Return what of a value's text differs from process to process; "" if nothing is known to."""
    for each in _parts(value):
        kind = type(each)
        if f"{kind.__module__}".partition(".")[0] in _OF_THE_PROCESS and not isinstance(each, _DATA):
            with suppress(Exception):  # a class may raise any
                if repr(each) in text or str(each) in text:
                    return f"the state of a {kind.__name__} of this process"
    text = _without_texts(value, text)
    if _AT.search(text):
        return "the address of an object"
    found = _NUMBER.findall(text)
    is_long = any(each.startswith("0x") and _number(each) in _LONG_ADDRESSES for each in found)
    if is_long or (found and not _identities(value).isdisjoint(map(_number, found))):
        return "the address of an object"
    return ""


def _number(text: str) -> int:
    return int(text, 16 if text.startswith("0x") else 10)


def _identities(value: Any) -> set[int]:
    """Return the numbers by which Python knows the parts of a value in this process."""
    return {number for each in _parts(value) for number in (id(each), object.__hash__(each))}


def _with_sets_in_order(value: Any, text: str, known: dict[int, str] | None = None) -> str:
    """Return the text of a value, with the elements of sets in order.

    Args:
        known: the texts of sets within the value that were made already, by identity.
    """
    known = {} if known is None else known
    done = set()
    for each in _parts(value):
        if _is_set(each) and 1 < len(each) <= len(text):  # a longer set has a longer text
            with suppress(Exception):  # an element of another class may raise any, and it may not be told
                told = repr(each)
                if told not in done and told in text:
                    text = text.replace(told, _in_order(each, known))
                done.add(told)
    return text


def _is_set(value: Any) -> bool:
    told: Any = type(value).__repr__
    return told is set.__repr__ or told is frozenset.__repr__


def _in_order(value: Any, known: dict[int, str]) -> str:
    """Return the `repr` of a set, with its elements in order, and those of sets within them."""
    if id(value) not in known:
        known[id(value)] = repr(value)  # of a set that has itself within
        is_sorted = all(type(each) is int for each in value)
        texts = (
            map(repr, sorted(value))
            if is_sorted
            else sorted(_with_sets_in_order(each, repr(each), known) for each in value)
        )
        told = ", ".join(texts)
        known[id(value)] = f"{{{told}}}" if type(value) is set else f"{type(value).__name__}({{{told}}})"
    return known[id(value)]


def _without_texts(value: Any, text: str) -> str:
    """Return a text without those parts of the value that are texts themselves. They may say " at 0x1f"."""
    texts = {each for each in _parts(value, atoms=True) if isinstance(each, str | bytes) and _has_hex(each)}
    for each in sorted(texts, key=len, reverse=True):
        if isinstance(each, str):
            text = text.replace(str(each), "")
        text = text.replace(repr(each).removeprefix("b")[1:-1], "")
    return text


def _has_hex(text: str | bytes) -> bool:
    return "0x" in text if isinstance(text, str) else b"0x" in text


def _parts(value: Any, *, atoms: bool = False) -> Iterator[Any]:
    """Yield a value and the objects to which it refers, outer ones first. No code of theirs runs.

    Args:
        atoms: True: also texts and numbers.
    """
    waiting: deque[Any] = deque([value])
    seen: dict[int, Any] = {}
    while waiting and len(seen) < _MOST_PARTS:
        each = waiting.popleft()
        if type(each) in _ATOMS:
            if atoms:
                yield each
            continue
        if id(each) in seen:
            continue
        seen[id(each)] = each  # an object that is kept keeps its id
        yield each
        if isinstance(each, np.ndarray):
            waiting += each.ravel().tolist() if each.dtype == object else []
        elif not isinstance(each, _OPAQUE):
            waiting += gc.get_referents(each)
