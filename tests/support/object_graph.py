"""A walk over an object and everything that it holds: a fingerprint of every value that could be state, by
the path of attributes to it."""

import abc
import array
import asyncio
import collections
import datetime
import enum
import functools
import hashlib
import io
import itertools
import random
import re
import sqlite3
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch

_PLAIN = (
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
    Path,
    datetime.date,
    enum.Enum,
    torch.dtype,
    torch.device,
    torch.Size,
    np.dtype,
    np.generic,
)
_PLAIN += (type(Ellipsis), range, slice, itertools.count, re.Pattern, types.ModuleType)
_DESCRIPTORS = (
    property,
    classmethod,
    staticmethod,
    functools.cached_property,
    types.MemberDescriptorType,
    types.GetSetDescriptorType,
)
_MADE_LATER = 1 << 9
"""The flag of types that are not built into the interpreter."""
_Pair = collections.namedtuple("_Pair", "first second")
_IDS_FROM = 2**32
"""A whole number from here on, as a key of a dict, is the id of an object, and differs between processes."""

OPAQUE: dict[type, str] = {
    sqlite3.Connection: "its state is the file",
    type(threading.RLock()): "held for the length of a call",
    io.TextIOWrapper: "its state is the file, and cut back to the cursor when it is opened",
    tokenizers.Tokenizer: "read from the model's directory and never changed",
    tokenizers.AddedToken: "read from the model's directory and never changed",
    type(vars(abc.ABC)["_abc_impl"]): "which classes are subclasses of which",
    type(vars(_Pair)["first"]): "reads a field of a named tuple, whose values the walk sees",
}
"""Types whose inside the walk cannot see, each with the reason why this is safe. The walk fails at any other
such type. Their names are not the same in every Python."""


class UnknownTypeError(AssertionError):
    """The walk met an object of a type that hides its inside and is not in `OPAQUE`."""


def fingerprints(root: Any, name: str = "run") -> dict[str, str]:
    """Return the fingerprint of each value, by path:

    - a plain value: the value;
    - a tensor or an array: a hash;
    - a generator: its state;
    - an object that was met before: its first path.

    The walk follows attributes, slots, containers, closures, defaults, partial functions, and attributes of
    the project's classes. It does not follow globals of modules.

    Raises:
        UnknownTypeError: the walk cannot see the inside of an object.
    """
    found: dict[str, str] = {}
    first: dict[int, str] = {}
    kept: list[Any] = []
    waiting = collections.deque([(name, root)])
    while waiting:
        path, value = waiting.popleft()
        if isinstance(value, _PLAIN):
            found[path] = _plain(value)
        elif id(value) in first:
            found[path] = f"is {first[id(value)]}"
        else:
            first[id(value)] = path
            kept.append(value)
            leaf = _leaf(value)
            if leaf is not None:
                found[path] = leaf
            waiting.extend(
                (path + step, child) for step, child in _children(value, path, is_leaf=leaf is not None)
            )
    return found


def _plain(value: Any) -> str:
    return value.__name__ if isinstance(value, types.ModuleType) else repr(value)


def _leaf(value: Any) -> str | None:
    """Return the fingerprint of a value; None if the value consists of its parts only."""
    match value:
        case torch.Tensor():
            data = value.detach()
            content = (
                b"" if data.is_meta else data.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            )
            return f"{data.dtype} {tuple(data.shape)} {hashlib.sha256(content).hexdigest()[:16]}"
        case np.ndarray() | array.array():
            numbers = np.asarray(value)
            return f"{numbers.dtype} {numbers.shape} {hashlib.sha256(numbers.tobytes()).hexdigest()[:16]}"
        case torch.Generator():
            return hashlib.sha256(value.get_state().numpy().tobytes()).hexdigest()[:16]
        case np.random.Generator():
            return repr(value.bit_generator.state)
        case np.random.RandomState():
            return repr(value.get_state(legacy=False))
        case random.Random():
            return hashlib.sha256(repr(value.getstate()).encode()).hexdigest()[:16]
        case set() | frozenset():
            return repr(sorted(map(repr, value)))
        case type():
            return f"class {value.__module__}.{value.__qualname__}"
        case types.FunctionType() | types.BuiltinFunctionType():
            return value.__qualname__
    return None


def _children(value: Any, path: str, *, is_leaf: bool) -> Iterator[tuple[str, Any]]:
    """Yield the parts of a value, each with the suffix of its path."""
    if isinstance(value, asyncio.AbstractEventLoop):  # what runs in it ends with the call of an environment
        return
    if isinstance(value, type):
        if _is_ours(value):
            yield from (
                (f".{name}", part)
                for name, part in vars(value).items()
                if not name.startswith("__") and not isinstance(part, _DESCRIPTORS)
            )
        return
    parts = next((parts for kind, parts in _PARTS if isinstance(value, kind)), None)
    if parts is not None:
        yield from parts(value)
    elif not is_leaf:
        _check(value, path)
    if _is_ours(type(value)):
        yield ".class", type(value)
    for holder in type(value).__mro__:
        slots = vars(holder).get("__slots__", ())
        yield from (
            (f".{slot}", getattr(value, slot))
            for slot in ((slots,) if isinstance(slots, str) else slots)
            if _has(value, slot)
        )
    yield from ((f".{name}", part) for name, part in getattr(value, "__dict__", {}).items())


def _of_mapping(mapping: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the values of a mapping. A key that is an object appears as its fingerprint and a number, and as
    a part of its own."""
    names: collections.Counter[str] = collections.Counter()
    for key, part in mapping.items():
        is_name = isinstance(key, _PLAIN) and not (isinstance(key, int) and key >= _IDS_FROM)
        name = repr(key) if is_name else f"{'' if isinstance(key, int) else _leaf(key) or ''}#"
        names[name] += 1
        name += "" if is_name else str(names[name])
        yield f"[{name}]", part
        if not isinstance(key, _PLAIN):
            yield f".key[{name}]", key


def _of_function(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # a cell may be empty
            yield f".closure.{name}", cell.cell_contents
    yield ".defaults", (function.__defaults__, function.__kwdefaults__)


def _of_builtin(function: types.BuiltinFunctionType) -> Iterator[tuple[str, Any]]:
    yield ".self", function.__self__


_PARTS: tuple[tuple[Any, Callable[[Any], Iterable[tuple[str, Any]]]], ...] = (
    (Mapping, _of_mapping),
    (
        (list, tuple, collections.deque),
        lambda parts: ((f"[{number}]", part) for number, part in enumerate(parts)),
    ),
    (types.FunctionType, _of_function),
    (types.BuiltinFunctionType, _of_builtin),
    (types.MethodType, lambda method: ((".self", method.__self__), (".function", method.__func__))),
    (
        functools.partial,
        lambda made: ((".function", made.func), (".arguments", made.args), (".keywords", made.keywords)),
    ),
    (array.array, lambda _: ()),
    (torch.Tensor, lambda tensor: ((".grad", tensor.grad if tensor.is_leaf else None),)),
)


def _check(value: Any, path: str) -> None:
    """Check that a value that is no container has visible attributes, or that `OPAQUE` has its type;
    otherwise raise UnknownTypeError."""
    kind = type(value)
    has_attributes = hasattr(value, "__dict__") or any("__slots__" in vars(holder) for holder in kind.__mro__)
    hidden = next(
        (holder for holder in kind.__mro__[:-1] if _is_compiled(holder)), None if has_attributes else kind
    )
    if hidden is not None and hidden not in OPAQUE:
        raise UnknownTypeError(
            f"{path}: a {hidden.__module__}.{hidden.__qualname__} cannot be looked into; say in OPAQUE why "
            "it holds no state of a run, or give the walk a way in"
        )


def _is_compiled(kind: type) -> bool:
    """Return True if a type is written in another language, and may thus hold values that no attribute
    shows."""
    return not kind.__flags__ & _MADE_LATER or any(
        isinstance(part, types.MethodDescriptorType) for part in vars(kind).values()
    )


def _has(value: Any, slot: str) -> bool:
    return slot not in ("__dict__", "__weakref__") and hasattr(value, slot)


def _is_ours(kind: type) -> bool:
    return kind.__module__.split(".")[0] == "oat" or kind.__module__.startswith("oat_plugin_")
