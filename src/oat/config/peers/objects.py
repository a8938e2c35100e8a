"""What a user gave from Python, as plain data: values, sections, and objects such as TRL's GRPOConfig.

No code of the user's can end the making of a message: a value that raises when it is read counts as `...`.
"""

import argparse
import contextlib
import dataclasses
import enum
import io
import types
import warnings
from collections.abc import Callable, Mapping, MutableSequence
from functools import partial
from pathlib import PurePath
from typing import Any

from oat.errors import is_signal

_DEEPEST = 20
"""Largest number of sections within each other that a message looks into."""
_LARGEST = 1000
"""Largest number of bits of a whole number that a message has."""
_MOST = 1000
"""Largest number of entries of a list that a message looks at. A longer one has records, not settings."""
_MADE_BY = ("trl", "transformers", "openrlhf", "verl", "peft")
"""Packages whose constructors may be called to tell what they fill in. A user's own could do anything."""
_STATED = {"LoraConfig": ("r", "lora_alpha", "target_modules")}
"""Fields of a class that count as set with their defaults too, since ours differ and decide together."""


class Fields(dict[str, Any]):
    """The fields that a user set in an object, such as one of a dataclass or a namespace.

    Attributes:
        classes: names of the object's class and of the classes that it is derived from.
    """

    classes: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Named:
    """A function or a class that the user gave, by its name. As Python it is the name."""

    name: str

    def __repr__(self) -> str:
        return self.name


GIVEN = Named("...")
"""Stands in Python that is to be copied for a value that cannot be written, such as records."""


def plain(value: Any, around: tuple[int, ...] = (), *, is_section: bool = False) -> Any:
    """Return a value as plain data: None, bool, int, float, str, list, dict with names, `Fields`, or `Named`.
    `...` stands for everything else, for what raises when it is read, and for what is too deep or within
    itself.

    Args:
        around: the ids of the values around this one.
        is_section: True: the value stands for settings, so the attributes of any object are its fields.
    """
    if id(value) in around or len(around) > _DEEPEST:
        return ...
    try:
        found = _plain(value, (*around, id(value)))
        return _attributes(value, (*around, id(value))) if is_section and _is_opaque(found) else found
    except BaseException as error:
        if is_signal(error):
            raise
        return ...


def is_peers(value: Any) -> bool:
    """Return True if a value is an object with the settings of another library, such as a GRPOConfig."""
    return any(_is_peers(base) for base in type(value).__mro__)


def _is_opaque(found: Any) -> bool:
    return found is ... or isinstance(found, Named)


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
    if issubclass(cls, tuple | MutableSequence):  # omegaconf has sequences and mappings of its own
        return [plain(part, around) for part in value] if len(value) <= _MOST else ...
    if issubclass(cls, set | frozenset):
        return sorted(plain(part, around) for part in value)
    return _section(value, cls, around)


def _section(value: Any, cls: type, around: tuple[int, ...]) -> Any:
    """Return a mapping, an object with settings or a function as plain data."""
    if issubclass(cls, Mapping):
        return {_name(name): _read(value.__getitem__, name, around) for name in value}
    if issubclass(cls, type) or cls in (types.FunctionType, types.BuiltinFunctionType):
        return Named(value.__name__) if value.__name__.isidentifier() else ...
    if dataclasses.is_dataclass(cls):
        return _fields_set(value, around)
    is_section = issubclass(cls, types.SimpleNamespace | argparse.Namespace) or _models(cls)
    return _attributes(value, around) if is_section else ...


def _attributes(value: Any, around: tuple[int, ...]) -> Any:
    """Return the attributes of an object, or of a class, that are not None and no methods; `...`: it has
    none."""
    cls = value if isinstance(value, type) else type(value)
    if cls.__module__.partition(".")[0] in _MADE_BY:
        return ...
    names = [] if cls is value else [*getattr(value, "__dict__", ())]
    if hasattr(cls, "__attrs_attrs__"):
        names = [field.name for field in cls.__attrs_attrs__]
    elif not _models(cls):
        names = [*_plain_names(cls), *names]
    found = Fields()
    for name in dict.fromkeys(names):
        now = ... if name.startswith("_") else _read(partial(getattr, value), name, around)
        if now is not None and now is not ...:
            found[name] = now
    found.classes = tuple(base.__name__ for base in cls.__mro__)
    return found or ...


def _models(cls: type) -> bool:
    """Return True for a class of pydantic or attrs, whose objects have fields as those of a dataclass do."""
    is_attrs = hasattr(cls, "__attrs_attrs__")
    return is_attrs or any(base.__module__.partition(".")[0] == "pydantic" for base in cls.__mro__)


def _plain_names(cls: type) -> list[str]:
    """Return the names of a class and its bases that no method and no property has."""
    pairs = (pair for base in reversed(cls.__mro__[:-1]) for pair in vars(base).items())
    return [name for name, value in pairs if not (callable(value) or hasattr(value, "__get__"))]


def _name(name: Any) -> str:
    text = plain(name)
    return text if isinstance(text, str) else str(text)


def _fields_set(value: Any, around: tuple[int, ...]) -> Any:
    """Return the fields of an object that differ from the defaults of a peer's class and are plain. Leave out
    those that the peer's constructor fills in. If the class is the user's alone, return all fields but None.

    The constructor is asked once, without the fields that are None by default: one that is equal without
    having been given was not set by hand. If the constructor refuses, all of them count as set.
    """
    cls = type(value)
    bases = [base.__name__ for base in cls.__mro__]
    if "PeftConfig" in bases and "LoraConfig" not in bases:  # an adapter of another kind
        return ...
    theirs = next((base for base in cls.__mro__ if _is_peers(base)), None)
    defaults = {field.name: field for field in dataclasses.fields(theirs)} if theirs is not None else {}
    stated = next((_STATED[base] for base in bases if base in _STATED), ())
    found, empty = Fields(), []
    for field in dataclasses.fields(cls):
        now = _read(partial(getattr, value), field.name, around) if field.init else ...
        is_own = field.name not in defaults
        if now is ... or (is_own and now is None) or (isinstance(now, Fields) and theirs is not None):
            continue
        default = ... if is_own or field.name in stated else _default(defaults[field.name], around)
        if _differs(now, default):
            found[field.name] = now
            empty += [field.name] if default is None else []
    if empty and theirs is not None:
        known = {field.name for field in defaults.values() if field.init}
        given = {name: getattr(value, name) for name in found if name in known and name not in empty}
        made = _made(theirs, given)
        for name in empty if made is not None else ():
            if not _differs(_read(partial(getattr, made), name, around), found[name]):
                del found[name]
    found.classes = tuple(bases)
    return found


def _is_peers(cls: type) -> bool:
    return dataclasses.is_dataclass(cls) and cls.__module__.partition(".")[0] in _MADE_BY


def _read(get: Callable[[Any], Any], name: Any, around: tuple[int, ...]) -> Any:
    """Return what a function gives for a name as plain data; `...`: it cannot be read."""
    try:
        return plain(get(name), around)
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
