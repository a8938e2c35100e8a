"""Values that a field of a peer's cannot have: of another type, or a name that is only similar to one."""

import difflib
from typing import Any

from oat.config.peers.our_defaults import default_of
from oat.config.peers.table import Row
from oat.config.peers.theirs import types_of

_NUMBERS = {"int", "float"}
_LEAST_SIMILAR = 0.7
"""Smallest ratio of `difflib` for a value that the user may have meant."""
_LONGEST = 100


def fault_of(row: Row, value: Any) -> str:
    """Return what is wrong with the type of a value, such as "is no number"; "": nothing is known to be."""
    kinds = _kinds(row)
    if not row.settings or not kinds or value is ... or value in row.named():
        return ""
    if value is None:
        return "" if "None" in kinds else f"is {_called(kinds)}"
    kinds = kinds - {"None"}
    if kinds <= _NUMBERS:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        is_fitting = is_number and ("float" in kinds or float(value).is_integer())
    else:
        is_fitting = isinstance(value, bool if kinds == {"bool"} else str)
    return "" if is_fitting else f"is {_called(kinds)}"


def near_value(row: Row, value: Any) -> str | None:
    """Return the value that the user may have meant, if a field has named ones alone and this is none of
    them."""
    if isinstance(value, list | tuple) and len(value) == 1:
        value = value[0]
    names = [] if row.takes_any() else [name for name in row.named() if isinstance(name, str)]
    if not isinstance(value, str) or value in names:
        return None
    key = value[:_LONGEST].strip().lower().replace("-", "_")
    alike = [name for name in names if name.lower().replace("-", "_") == key]
    near = alike or difflib.get_close_matches(key, names, n=1, cutoff=_LEAST_SIMILAR)
    return near[0] if near else None


def _kinds(row: Row) -> set[str]:
    """Return the types of a field: `int`, `float`, `bool`, `str` and `None`; empty: others, or not known."""
    kinds = types_of(row.field) if row.peer == "TRL" and "older" not in row.groups[0] else set()
    if not kinds and row.takes_any():
        default = default_of(row.settings[0]) if row.settings else None
        kinds = {"bool", "None"} if isinstance(default, bool) else {"float", "None"}
        kinds = kinds if isinstance(default, int | float) else set()
    known = [{"bool"}, {"str"}, _NUMBERS]
    is_known = any(kinds - {"None"} <= each for each in known) and kinds - {"None"}
    is_open = kinds - {"None"} == {"str"} and not row.takes_any()
    return kinds if is_known and not is_open else set()


def _called(kinds: set[str]) -> str:
    kinds = kinds - {"None"}
    if kinds == {"int"}:
        return "no whole number"
    return {"bool": "neither true nor false", "str": "no text"}.get(min(kinds), "no number")
