"""The fields that a user set in an object of a dataclass, such as TRL's GRPOConfig."""

import contextlib
import dataclasses
import io
import warnings
from collections.abc import Mapping
from typing import Any


def fields_set(value: Any) -> dict[str, Any]:
    """Return the fields of an object that differ from their defaults and are plain, but for those that its
    constructor makes of the others.

    The constructor is asked about that: a field that is equal without having been given was not set by hand.
    A field about which the constructor says nothing, since it refuses the others, counts as set.
    """
    now = {f.name: getattr(value, f.name, None) for f in dataclasses.fields(value) if f.init}
    found = {
        f.name: now[f.name]
        for f in dataclasses.fields(value)
        if f.init and _differs(now[f.name], _default(f)) and not _is_object(now[f.name])
    }
    is_smaller = True
    while is_smaller:  # a field that contradicts a made one is told only after this has gone
        before = len(found)
        for name in tuple(found):
            others = {other: found[other] for other in found if other != name}
            made = _made(type(value), others)
            if made is not None and not any(_differs(getattr(made, f, None), now[f]) for f in found):
                del found[name]
        is_smaller = len(found) < before
    return {name: getattr(now[name], "value", now[name]) for name in found}


def class_names(value: Any) -> tuple[str, ...]:
    """Return the names of an object's class and of the classes that it is derived from."""
    return tuple(cls.__name__ for cls in type(value).__mro__) if is_settings(value) else ()


def is_settings(value: Any) -> bool:
    """Return True if a value is an object whose fields are settings."""
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _default(field: "dataclasses.Field[Any]") -> Any:
    return field.default_factory() if callable(field.default_factory) else field.default


def _made(cls: Any, given: Mapping[str, Any]) -> Any:
    """Return an object of a class with some fields; None: its constructor refuses them."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        with contextlib.suppress(Exception):
            return cls(**given)
    return None


def _differs(one: Any, other: Any) -> bool:
    """Return True if two values are not equal, or cannot be compared. Two empty collections or texts are
    equal."""
    if isinstance(one, str | list | tuple | dict) and isinstance(other, str | list | tuple | dict):
        return one != other and bool(one or other)
    try:
        return not (one is other or bool(one == other))
    except Exception:  # an array, or an object of a user's
        return True


def _is_object(value: Any) -> bool:
    plain = str | int | float | list | tuple | Mapping | None
    return not isinstance(getattr(value, "value", value), plain)
