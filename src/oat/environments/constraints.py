"""Constraints of a tool's argument, such as `Annotated[int, annotated_types.Ge(0)]`."""

import collections.abc as abc
import importlib
from collections.abc import Callable
from typing import Annotated, Any, get_args

import msgspec

_THEIRS = ("annotated_types", "pydantic")
"""Packages whose notes pydantic checks."""
_OF_META = ("gt", "ge", "lt", "le", "multiple_of", "pattern", "min_length", "max_length", "tz")
_CONTAINERS = ("builtins", "collections.abc")


def checks(wanted: Any, kind: Any, notes: tuple[Any, ...]) -> list[Callable[[Any], Any]]:
    """Return functions that take a value, return it, and raise an exception if a constraint does not hold. A
    function of the user's within a note (`pydantic.AfterValidator`) may return another value.

    Args:
        wanted: the annotated type, without its notes.
        kind: its class, or its origin.
        notes: the notes of `Annotated`. Those that are no constraint are passed over.

    Raises:
        Exception: a constraint does not fit the type.
    """
    metas = [note for note in notes if isinstance(note, msgspec.Meta) and _says_something(note)]
    theirs = [note for note in notes if type(note).__module__.partition(".")[0] in _THEIRS]
    return [*([_of_msgspec(wanted, kind, metas)] if metas else []), *_of_pydantic(wanted, kind, theirs)]


def _of_msgspec(wanted: Any, kind: Any, metas: list[Any]) -> Callable[[Any], Any]:
    is_listed = isinstance(kind, type) and issubclass(kind, abc.Iterable) and kind.__module__ in _CONTAINERS
    # msgspec need not know the elements' class
    plain = _base(kind) if is_listed and get_args(wanted) else wanted
    noted = _noted(plain, metas)
    msgspec.json.Decoder(noted)

    def check(value: Any) -> Any:
        msgspec.convert(value, noted)
        return value

    return check


def _base(kind: type) -> type:
    """Return the class of which a value of a container is made."""
    return next(
        (each for each in (list, dict, set, frozenset, tuple) if issubclass(kind, each)),
        dict if issubclass(kind, abc.Mapping) else set if issubclass(kind, abc.Set) else list,
    )


def _of_pydantic(wanted: Any, kind: Any, notes: list[Any]) -> list[Callable[[Any], Any]]:
    if not notes:
        return []
    pydantic: Any = importlib.import_module("pydantic")
    base = list if kind is abc.Iterable else wanted  # pydantic would make a generator
    try:
        return [pydantic.TypeAdapter(_noted(base, notes)).validate_python]
    except Exception:  # a class that pydantic does not know
        return [pydantic.TypeAdapter(_noted(Any, notes)).validate_python]


def _noted(wanted: Any, notes: list[Any]) -> Any:
    annotated: Any = Annotated
    return annotated[(wanted, *notes)]


def _says_something(note: msgspec.Meta) -> bool:
    return any(getattr(note, name) is not None for name in _OF_META)
