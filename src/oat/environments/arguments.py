"""The arguments of a tool's call, as the types with which the tool's parameters are annotated.

A value of JSON is converted only if nothing of it is lost or made up:

* An integer counts as a `float`, and 2.0 as an `int`. `true` is no number, and 1 no `bool`.
* A text counts as the value that it spells (`"3"`, `"[1, 2]"`), if the annotation takes no such text. Text
  that was written without quotes (`Written`) counts as a text only if it spells no value that the annotation
  takes. If the annotation takes texts too, `00123` and `+49` are texts: a template writes no number so.
* An object counts as a dataclass, a TypedDict, a NamedTuple or a pydantic model if its names are the fields.
  A list counts as a tuple or a set. A value of an Enum counts as its member.
* For a union, or a type variable with constraints, that member comes first which the whole value is already,
  with all its elements. Next come members of which each text and number is a part as it is, then those of the
  value's own type. Else the order of the union decides.
* Constraints within `Annotated` are checked: those of msgspec, annotated_types and pydantic. Other notes say
  nothing of the value.

What is not annotated may be any value of JSON. Whatever the value is, a conversion gives a value or a
ValueError, also where elements of a set cannot be hashed, or a user's class raises an exception.
"""

import collections.abc as abc
import dataclasses
import datetime
import decimal
import enum
import inspect
import json
import types
import typing
import uuid
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from math import isfinite
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec

from oat.environments.constraints import checks
from oat.environments.models import check_kept, is_model, is_validated, model_of
from oat.environments.results import error_text, same_text
from oat.errors import is_signal, shown
from oat.text.call_forms import Written, WrittenInJson, json_value, literal

_SAMPLES: tuple[Any, ...] = ("", 0, 0.5, True, None, [], {})
"""A value of each type of JSON."""
_TYPES = {type(sample) for sample in _SAMPLES}
_LISTS: dict[Any, Callable[[list[Any]], Any]] = {
    **dict.fromkeys((list, abc.Sequence, abc.MutableSequence, abc.Iterable, abc.Collection), list),
    **dict.fromkeys((set, abc.Set, abc.MutableSet), set),
    frozenset: frozenset,
}
_DICTS = (dict, abc.Mapping, abc.MutableMapping)
_FROM_TEXT = (
    *(bytes, decimal.Decimal, uuid.UUID),
    *(datetime.date, datetime.datetime, datetime.time, datetime.timedelta),
)
"""Classes whose objects have one text each, which msgspec reads."""
_ANY = (Any, object, inspect.Parameter.empty)


def converted(value: Any, wanted: Any, *, is_exact: bool = False) -> Any:
    """Return a value of JSON as the type that is wanted.

    Args:
        is_exact: True: each text and number of the value stays as it is.

    Raises:
        ValueError: it is no such value. The message says what is wanted.
    """
    if is_exact:
        return _strictly(value, wanted, is_exact)
    if isinstance(value, Written):
        return _of_written(value, wanted)
    return _first([value, *(_spelled(value) if isinstance(value, str) else [])], wanted)


def _of_written(written: Written, wanted: Any) -> Any:
    """Return what was written without quotes as a type.

    Raises:
        ValueError: it spells no such value.
    """
    text, spelled = str(written), _spelled(written)
    with suppress(ValueError):
        _strictly(text, wanted)
        write = json.dumps if isinstance(written, WrittenInJson) else str
        spelled = [each for each in spelled if isinstance(each, list | dict) or write(each) == text]
    return _first([*spelled, text], wanted) if _bare(wanted) is not str else text


def is_possible(wanted: Any, within: tuple[Any, ...] = (), needed: tuple[Any, ...] = ()) -> bool:
    """Return True if a value of JSON can be converted to a type.

    Args:
        within: the types of which the type is a part.
        needed: those of them of which each object has an object of the type.

    Raises:
        Exception: an annotation cannot be read, or its constraints do not fit the type.
    """
    wanted, notes = _opened(wanted)
    parts = get_args(wanted)
    kind = get_origin(wanted) or wanted
    checks(wanted, kind, notes)
    if wanted in _ANY or wanted is None:
        return True
    if kind is Literal:
        return any(type(each.value if isinstance(each, enum.Enum) else each) in _TYPES for each in parts)
    if kind in (Union, types.UnionType):
        others = [part for part in parts if part is not type(None)]
        return not others or any(is_possible(part, within, needed) for part in others)
    if kind in _LISTS or kind is tuple or kind in _DICTS:
        hashed = parts[:1] if kind in _DICTS or _LISTS.get(kind, list) is not list else ()
        all_needed = needed if kind is tuple and Ellipsis not in parts else ()
        return all(is_possible(part, within, all_needed) for part in parts if part is not Ellipsis) and all(
            _may_have_hash(part) for part in hashed
        )
    if not isinstance(kind, type) or wanted in needed:
        return False
    if wanted in within or kind in _FROM_TEXT:
        return True
    if issubclass(kind, enum.Enum):
        return any(type(each.value) in _TYPES for each in kind)
    if is_model(kind):
        kind.model_rebuild()  # type: ignore[attr-defined]
        return True
    fields = _fields(wanted)
    if fields is not None:
        inner = (*within, wanted)
        return all(
            is_possible(each, inner, (*needed, wanted) if is_needed else ())
            for each, is_needed in fields.values()
        )
    return any(isinstance(sample, kind) for sample in _SAMPLES)


def copied(value: Any) -> Any:
    """Return a value of JSON whose lists and dicts are new."""
    if type(value) is list:
        return [copied(each) for each in value]
    return {name: copied(each) for name, each in value.items()} if type(value) is dict else value


def annotation_text(wanted: Any) -> str:
    """Return the text of an annotation. Its notes may be objects without a text of their own."""
    return same_text(wanted, inspect.formatannotation(wanted))


def _may_have_hash(wanted: Any) -> bool:
    """Return True if a value of a type may be an element of a set, or the key of a dict."""
    wanted, parts = _bare(wanted), get_args(_bare(wanted))
    kind = get_origin(wanted) or wanted
    if kind in (Union, types.UnionType):
        return any(map(_may_have_hash, parts))
    if kind in _DICTS or kind in _LISTS:
        return _LISTS.get(kind) is frozenset
    if kind is tuple:
        return all(_may_have_hash(part) for part in parts if part is not Ellipsis)
    return not isinstance(kind, type) or kind.__hash__ is not None


def _first(values: Iterable[Any], wanted: Any) -> Any:
    """Return the first value that can be converted.

    Raises:
        ValueError: none can.
    """
    fault: ValueError | None = None
    for value in values:
        try:
            return _strictly(value, wanted)
        except ValueError as error:
            fault = fault or error
    raise fault or ValueError("no value")


def _spelled(text: str) -> list[Any]:
    """Return the values, other than texts, that a text spells: in JSON, in Python, or as a number."""
    found = []
    for read in (json_value, literal, int, float):
        try:
            value = read(text)
        except (ValueError, RecursionError):
            continue
        if not isinstance(value, str) and not (isinstance(value, float) and not isfinite(value)):
            found.append(value)
    return found


def _bare(wanted: Any) -> Any:
    """Return a type without its names and notes: of Annotated, NewType, Required and the `type` statement. A
    type variable is the union of its constraints, or its bound."""
    return _opened(wanted)[0]


def _opened(wanted: Any) -> tuple[Any, tuple[Any, ...]]:
    """Return a type without its names and notes, and its notes, those of inner types first."""
    notes: tuple[Any, ...] = ()
    while True:
        kind = get_origin(wanted)
        if kind is typing.Annotated:
            notes = (*wanted.__metadata__, *notes)
            wanted = get_args(wanted)[0]
        elif kind in (typing.Required, typing.NotRequired, typing.Final):
            wanted = get_args(wanted)[0]
        elif isinstance(wanted, typing.NewType):
            wanted = wanted.__supertype__
        elif type(kind or wanted).__name__ == "TypeAliasType":  # since Python 3.12
            alias: Any = kind or wanted
            given = dict(zip(alias.__type_params__, get_args(wanted), strict=False))
            wanted = _with(alias.__value__, given)
        elif isinstance(wanted, dataclasses.InitVar):
            wanted = wanted.type
        elif wanted is dataclasses.InitVar:
            wanted = Any
        elif wanted is typing.LiteralString:
            wanted = str
        elif isinstance(wanted, TypeVar):
            several, bound = wanted.__constraints__, wanted.__bound__
            # a type checker reads no tuple here
            wanted = Union[several] if several else Any if bound is None else bound  # noqa: UP007
        else:
            return wanted, notes


def _with(wanted: Any, given: Mapping[Any, Any]) -> Any:
    """Return a type with other types in place of its type variables."""
    if isinstance(wanted, TypeVar):
        return given.get(wanted, wanted)
    inner = getattr(wanted, "__parameters__", ()) if get_origin(wanted) is not None else ()
    return wanted[tuple(given.get(each, each) for each in inner)] if inner and given else wanted


def _variables(wanted: Any) -> dict[Any, Any]:
    """Return what the type variables of a class and of its bases stand for, such as {T: int} for Box[int]."""
    kind = get_origin(wanted) or wanted
    found = dict(zip(getattr(kind, "__parameters__", ()), get_args(wanted), strict=False))
    for base in getattr(kind, "__orig_bases__", ()):
        if get_origin(base) not in (typing.Generic, typing.Protocol):
            found |= {each: _with(part, found) for each, part in _variables(base).items()}
    return found


def _strictly(value: Any, wanted: Any, is_exact: bool = False) -> Any:
    """Return a value as a type, without reading texts as the values that they spell.

    Args:
        is_exact: True: nor are texts and numbers within the value converted.
    """
    wanted, notes = _opened(wanted)
    parts = get_args(wanted)
    kind = get_origin(wanted) or wanted
    made = _unchecked(value, wanted, kind, parts, is_exact)
    for check in checks(wanted, kind, notes):
        made = _by_its_class(partial(check, made))
    return made


def _unchecked(value: Any, wanted: Any, kind: Any, parts: tuple[Any, ...], is_exact: bool) -> Any:
    if wanted in _ANY:
        return value
    if kind in (Union, types.UnionType):
        return _of_union(value, parts, is_exact)
    if kind is Literal:
        for part in parts:
            own = part.value if isinstance(part, enum.Enum) else part
            if own == value and type(own) is type(value) and not (is_exact and own is not part):
                return part
        return _no(value, wanted)
    if kind in _LISTS:
        items = [converted(each, *parts or [Any], is_exact=is_exact) for each in _a(list, value, wanted)]
        return _by_its_class(lambda: _LISTS[kind](items))
    if kind is tuple:
        return _tuple(_a(list, value, wanted), parts, wanted, is_exact)
    if kind in _DICTS:
        name, part = parts or (Any, Any)
        pairs = [
            (converted(key, name, is_exact=is_exact), converted(each, part, is_exact=is_exact))
            for key, each in _a(dict, value, wanted).items()
        ]
        found = _by_its_class(lambda: dict(pairs))
        return found if len(found) == len(pairs) else _no(value, wanted)
    return _of_class(value, kind, wanted, is_exact)


def _of_class(value: Any, kind: Any, wanted: Any, is_exact: bool) -> Any:
    if kind in (None, type(None)):
        return value if value is None else _no(value, wanted)
    if type(value) is kind:
        return value
    if kind in (int, float):
        return _number(value, kind) if not is_exact else _no(value, wanted)
    if not isinstance(kind, type):
        return _no(value, wanted)
    if is_model(kind):
        made = _by_its_class(lambda: model_of(value, kind, is_exact))
        check_kept(value, made)
        return made
    fields = _fields(wanted)
    if fields is not None:
        is_listed = isinstance(value, list) and issubclass(kind, tuple) and len(value) <= len(fields)
        given = dict(zip(fields, value, strict=False)) if is_listed else _a(dict, value, wanted)
        return _made(kind, given, fields, is_exact)
    if issubclass(kind, enum.Enum) and not is_exact:
        same = [each for each in kind if type(each.value) is type(value) and each.value == value]
        return same[0] if same else _no(value, wanted)
    if kind in _FROM_TEXT and not is_exact:
        return _by_its_class(lambda: msgspec.convert(value, kind))
    is_one = isinstance(value, kind) and not (isinstance(value, bool) and issubclass(int, kind))
    return value if is_one else _no(value, wanted)


def _of_union(value: Any, parts: tuple[Any, ...], is_exact: bool) -> Any:
    def made(is_exact: bool) -> list[Any]:
        found = []
        for part in parts:
            with suppress(ValueError):
                found.append(_strictly(value, part, is_exact))
        return found

    if exact := made(True):
        return next((each for each in exact if _is_same(each, value)), exact[0])
    found = [] if is_exact else made(False)
    if not found:
        raise ValueError(f"{shown(value)} is none of {', '.join(map(annotation_text, parts))}")
    return next((each for each in found if type(each) is type(value)), found[0])


def _is_same(made: Any, value: Any) -> bool:
    """Return True if what was made of a value is the value itself, with all its elements."""
    if type(made) is not type(value):
        return False
    if isinstance(value, dict):
        return all(map(_is_same, made, value)) and all(map(_is_same, made.values(), value.values()))
    return all(map(_is_same, made, value)) if isinstance(value, list) else True


def _number(value: Any, kind: type) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return _no(value, kind)
    try:
        number = kind(value)
    except OverflowError:
        return _no(value, kind)
    return number if number == value or kind is float else _no(value, kind)


def _tuple(value: list[Any], parts: tuple[Any, ...], wanted: Any, is_exact: bool) -> tuple[Any, ...]:
    if not parts:
        return tuple(value)
    if parts[-1] is Ellipsis:
        parts = parts[:1] * len(value)
    if len(value) != len(parts):
        return _no(value, wanted)
    return tuple(converted(each, part, is_exact=is_exact) for each, part in zip(value, parts, strict=True))


def _fields(wanted: Any) -> dict[str, tuple[Any, bool]] | None:
    """Return the fields of a class that is made from an object: their types, and whether they are needed.
    None: it is no such class."""
    found, given = _own_fields(get_origin(wanted) or wanted), _variables(wanted)
    return found and {name: (_with(part, given), is_needed) for name, (part, is_needed) in found.items()}


def _own_fields(kind: type) -> dict[str, tuple[Any, bool]] | None:
    """Return the fields of a class as `_fields`, with its type variables."""
    if typing.is_typeddict(kind):
        needed: Iterable[str] = kind.__required_keys__  # type: ignore[attr-defined]
    elif dataclasses.is_dataclass(kind):
        # its constructor knows which fields are given, and those that are no attributes (InitVar)
        made = {} if is_validated(kind) else get_type_hints(kind.__init__, include_extras=True)
        hints = {**get_type_hints(kind, include_extras=True), **made}
        given = inspect.signature(kind).parameters.values()
        named = [each for each in given if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
        return {each.name: (hints.get(each.name, Any), each.default is each.empty) for each in named}
    elif issubclass(kind, tuple) and hasattr(kind, "_field_defaults"):
        names = kind._fields  # type: ignore[attr-defined]
        hints = get_type_hints(kind, include_extras=True)
        return {name: (hints.get(name, Any), name not in kind._field_defaults) for name in names}
    elif issubclass(kind, msgspec.Struct):
        return {each.name: (each.type, each.required) for each in msgspec.structs.fields(kind)}
    else:
        return None
    return {name: (part, name in needed) for name, part in get_type_hints(kind, include_extras=True).items()}


def _made(
    kind: type, given: Mapping[str, Any], fields: Mapping[str, tuple[Any, bool]], is_exact: bool
) -> Any:
    unknown = [name for name in given if name not in fields]
    missing = [name for name, (_, is_needed) in fields.items() if is_needed and name not in given]
    if unknown or missing:
        what = f"no field {shown(unknown[0])}" if unknown else f"the field {shown(missing[0])}"
        raise ValueError(f"{kind.__name__} has {what}")
    arguments = {name: converted(value, fields[name][0], is_exact=is_exact) for name, value in given.items()}
    return _by_its_class(lambda: kind(**arguments))


def _by_its_class(make: Callable[[], Any]) -> Any:
    """Return an object that is made by the code of a user's class, such as its constructor or its hash, which
    may raise any exception.

    Raises:
        ValueError: it did.
    """
    try:
        return make()
    except BaseException as error:
        if is_signal(error):
            raise
        raise ValueError(error_text(error) or type(error).__name__) from error


def _a(kind: type, value: Any, wanted: Any) -> Any:
    return value if isinstance(value, kind) else _no(value, wanted)


def _no(value: Any, wanted: Any) -> Any:
    raise ValueError(f"{shown(value)} is no {annotation_text(wanted)}")
