"""Arguments of a tool that are pydantic models. pydantic reads `true` as the number 1, and passes over names
that are no fields."""

import dataclasses
import json
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

from oat.errors import shown


def is_model(kind: type) -> bool:
    """Return True if a class is a model of pydantic."""
    return hasattr(kind, "model_validate") and hasattr(kind, "model_rebuild")


def is_validated(kind: type) -> bool:
    """Return True if a class is a dataclass of pydantic, whose constructor has annotations of pydantic's."""
    return hasattr(kind, "__pydantic_validator__") and not is_model(kind)


def model_of(value: Any, kind: Any, is_exact: bool) -> Any:
    """Return a value of JSON as a pydantic model.

    Args:
        is_exact: True: no text and no number is converted.

    Raises:
        Exception: it is no such value.
    """
    return (
        kind.model_validate_json(json.dumps(value), strict=True) if is_exact else kind.model_validate(value)
    )


def check_kept(given: Any, made: Any) -> None:
    """Check what pydantic made of a value of JSON.

    Raises:
        ValueError: a part of the value was passed over; or a truth value became a number, or a number one.
    """
    is_truth = isinstance(given, bool)
    if isinstance(given, int | float) and isinstance(made, int | float | Decimal):
        if is_truth is not isinstance(made, bool):
            raise ValueError(f"{json.dumps(given)} is no {type(made).__name__}")
    elif hasattr(made, "__pydantic_root_model__") and made.__pydantic_root_model__:
        check_kept(given, made.root)
    elif isinstance(given, list) and isinstance(made, list | tuple):
        for pair in zip(given, made, strict=False):
            check_kept(*pair)
    elif isinstance(given, list) and isinstance(made, set | frozenset):
        if {type(each) for each in made} == {int} and bool in map(type, given):
            raise ValueError(f"{shown(given)} has truth values, which are no numbers")
    elif isinstance(given, dict):
        for pair in _pairs(given, made):
            check_kept(*pair)


def _pairs(given: dict[str, Any], made: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the values of an object, with what was made of each.

    Raises:
        ValueError: nothing was made of one.
    """
    kind = type(made)
    if isinstance(made, dict):
        lost = [name for name in given if name not in made]
        if lost and len(made) < len(given):
            raise ValueError(f"{shown(lost[0])} is no field")
        yield from zip(given.values(), made.values() if lost else map(made.get, given), strict=False)
        return
    names = _names(kind)
    for name, value in given.items() if names else ():
        if name in names:
            yield value, getattr(made, names[name], None)
        elif not _takes_more(kind):
            raise ValueError(f"{kind.__name__} has no field {shown(name)}")


def _names(kind: Any) -> dict[str, str]:
    """Return the names by which an object may give fields of a class, and the attributes for these."""
    fields = getattr(kind, "__pydantic_fields__", None) or getattr(kind, "model_fields", None)
    if not isinstance(fields, dict):
        plain = [each.name for each in dataclasses.fields(kind)] if dataclasses.is_dataclass(kind) else []
        plain = plain or [*getattr(kind, "_fields", ())]
        return dict(zip(plain, plain, strict=True))
    config = _config(kind)
    is_by_name = any(config.get(each) for each in ("populate_by_name", "validate_by_name"))
    found: dict[str, str] = {}
    for name, field in fields.items():
        alias = getattr(field, "validation_alias", None) or getattr(field, "alias", None)
        several = getattr(alias, "choices", [alias] if alias else [])
        for each in several:
            path = getattr(each, "path", None)
            # what a path leads to is a part of the value, which is not compared
            found[str(path[0]) if path else each] = "" if path else name
        if is_by_name or not alias:
            found[name] = name
    return found


def _config(kind: Any) -> dict[str, Any]:
    config = getattr(kind, "model_config", None) or getattr(kind, "__pydantic_config__", None)
    return config if isinstance(config, dict) else {}


def _takes_more(kind: Any) -> bool:
    """Return True if a class says itself what becomes of names that are no fields."""
    validators = getattr(getattr(kind, "__pydantic_decorators__", None), "model_validators", {})
    modes = [getattr(getattr(each, "info", None), "mode", "") for each in validators.values()]
    return "extra" in _config(kind) or "before" in modes or "wrap" in modes
