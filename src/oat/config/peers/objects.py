"""What a user gave from Python, as plain data: values, sections, and objects such as TRL's GRPOConfig.

No code of the user's can end the making of a message: a value that raises when it is read counts as `...`.
"""

import contextlib
import dataclasses
import enum
import io
import warnings
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from oat.errors import is_signal

_DEEPEST = 20
"""Largest number of sections within each other that a message looks into."""
_LARGEST = 1000
"""Largest number of bits of a whole number that a message has."""
_MADE_BY = ("trl", "transformers", "openrlhf", "verl")
"""Packages whose constructors may be called to tell what they fill in. A user's own could do anything."""


class Fields(dict[str, Any]):
    """The fields that a user set in an object of a dataclass.

    Attributes:
        classes: names of the object's class and of the classes that it is derived from.
    """

    classes: tuple[str, ...] = ()


def plain(value: Any, around: tuple[int, ...] = ()) -> Any:
    """Return a value as plain data: None, bool, int, float, str, list, dict with names, or `Fields`. `...`
    stands for everything else, for what raises when it is read, and for what is too deep or within itself.

    Args:
        around: the ids of the values around this one.
    """
    if id(value) in around or len(around) > _DEEPEST:
        return ...
    try:
        return _plain(value, (*around, id(value)))
    except BaseException as error:
        if is_signal(error):
            raise
        return ...


def _plain(value: Any, around: tuple[int, ...]) -> Any:
    cls = type(value)  # isinstance would ask the object, which may raise
    if value is None or cls is bool:
        return value
    if issubclass(cls, enum.Enum):
        return plain(value.value, around)
    if issubclass(cls, int):
        return int(value) if int(value).bit_length() <= _LARGEST else ...
    for kind in (float, str):
        if issubclass(cls, kind):
            return value if cls is kind else kind(value)
    if issubclass(cls, PurePath):
        return str(value)
    if issubclass(cls, list | tuple):
        return [plain(part, around) for part in value]
    if issubclass(cls, Mapping):
        return {_name(name): plain(part, around) for name, part in value.items()}
    return _fields_set(value, around) if dataclasses.is_dataclass(cls) else ...


def _name(name: Any) -> str:
    text = plain(name)
    return text if isinstance(text, str) else str(text)


def _fields_set(value: Any, around: tuple[int, ...]) -> Fields:
    """Return the fields of an object that differ from their defaults and are plain. If the class is a
    peer's or derived from one, leave out those that the peer's constructor fills in.

    The constructor is asked once, without the fields that are None by default: one that is equal without
    having been given was not set by hand. If the constructor refuses, all of them count as set.
    """
    cls = type(value)
    found, empty = Fields(), []
    for field in dataclasses.fields(cls):
        now = _read(value, field.name, around) if field.init else ...
        if now is ... or isinstance(now, Fields):
            continue
        default = _default(field, around)
        if _differs(now, default):
            found[field.name] = now
            empty += [field.name] if default is None else []
    theirs = next((base for base in cls.__mro__ if _is_peers(base)), None)
    if empty and theirs is not None:
        known = {field.name for field in dataclasses.fields(theirs) if field.init}
        given = {name: getattr(value, name) for name in found if name in known and name not in empty}
        made = _made(theirs, given)
        for name in empty if made is not None else ():
            if not _differs(_read(made, name, around), found[name]):
                del found[name]
    found.classes = tuple(base.__name__ for base in cls.__mro__)
    return found


def _is_peers(cls: type) -> bool:
    return dataclasses.is_dataclass(cls) and cls.__module__.partition(".")[0] in _MADE_BY


def _read(value: Any, name: str, around: tuple[int, ...]) -> Any:
    """Return a field as plain data; `...`: it cannot be read."""
    try:
        return plain(getattr(value, name), around)
    except BaseException as error:
        if is_signal(error):
            raise
        return ...


def _default(field: "dataclasses.Field[Any]", around: tuple[int, ...]) -> Any:
    """Return a field's default as plain data; `...`: it has none, or none that can be made."""
    make: Any = field.default_factory
    if make is dataclasses.MISSING:
        return plain(field.default, around) if field.default is not dataclasses.MISSING else ...
    try:
        return plain(make(), around)
    except BaseException as error:
        if is_signal(error):
            raise
        return ...


def _made(cls: Any, given: Mapping[str, Any]) -> Any:
    """Return an object of a class with some fields; None: its constructor refuses them."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        try:
            return cls(**given)
        except BaseException as error:
            if is_signal(error):
                raise
            return None


def _differs(one: Any, other: Any) -> bool:
    """Return True if two plain values are not equal. Two empty collections or texts are equal."""
    if isinstance(one, str | list | dict) and isinstance(other, str | list | dict):
        return one != other and bool(one or other)
    return not (one is other or bool(one == other))
