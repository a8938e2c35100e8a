"""Values that a field of a peer's, or our setting, cannot have: of another type, out of its range, or a name
that is only similar to one."""

import difflib
from collections.abc import Mapping
from typing import Any, get_type_hints

import msgspec
from msgspec import Meta

from oat.config.peers.our_defaults import default_of
from oat.config.peers.table import Row, values
from oat.config.peers.theirs import types_of
from oat.config.settings import Config

_NUMBERS = {"int", "float"}
_LEAST_SIMILAR = 0.7
"""Smallest ratio of `difflib` for a value that the user may have meant."""
_LONGEST = 100
_SHARE, _LEAST_1 = Meta(ge=0, le=1), Meta(ge=1)
_ABOVE_0, _LEAST_0 = Meta(gt=0), Meta(ge=0)
RANGES = {
    "beta": _ABOVE_0,
    "label_smoothing": Meta(ge=0, lt=0.5),
    "ld_alpha": _SHARE,
    "sft_weight": _LEAST_0,
    "tau": Meta(gt=0, le=1),
    "centring": _LEAST_0,
    "prompts": _LEAST_1,
    "samples": _LEAST_1,
    "epochs": _LEAST_1,
    "minibatches": _LEAST_1,
    "clip_low": Meta(ge=0, lt=1),
    "clip_high": _LEAST_0,
    "dual_clip": Meta(gt=1),
    "kl_coef": _LEAST_0,
    "kl_reward_coef": _LEAST_0,
    "gamma": _SHARE,
    "lam": _SHARE,
    "smooth.tau": _ABOVE_0,
    "smooth.negative_tau": _ABOVE_0,
    "entropy.coef": _LEAST_0,
    "entropy.target": _ABOVE_0,
    "entropy.step": _LEAST_0,
    "entropy.highest": _LEAST_0,
    "tokens.high_entropy_share": Meta(gt=0, le=1),
    "correction.low": _LEAST_0,
    "correction.high": _ABOVE_0,
    "correction.off_policy_bound": _ABOVE_0,
}
"""The ranges of numbers in the section `algorithm`. Its classes have them too, and import torch."""


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


def refused(settings: Mapping[str, tuple[Any, bool]]) -> str:
    """Return why the loader refuses one of our settings, such as "has to be above 0 here"; "": it does not,
    as far as the range of each of them tells.

    Args:
        settings: our settings for the value of a field, as `Row.claimed` gives them.
    """
    for setting, (ours, _) in settings.items():
        section, _, name = setting.partition(".")
        limit = RANGES.get(name) if section == "algorithm" else None
        if type(ours) in (int, float) and limit and not _is_within(limit, ours):
            return f"has to be {_range(limit)} here"
        if limit or type(ours) not in (int, float, type(None)):
            continue
        kind = _type_of(setting)
        if kind is not None and _takes(kind, 1) and not _takes(kind, ours):
            return "is out of range here" if ours is not None else "is none here: choose a number"
    return ""


def _takes(kind: Any, value: Any) -> bool:
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError:
        return False
    return True


def _type_of(setting: str) -> Any:
    """Return the annotation of a setting outside of the section `algorithm`; None: it is not known."""
    found: Any = Config
    for part in setting.split("."):
        kinds = (found, *getattr(found, "__args__", ()))
        section = next((kind for kind in kinds if hasattr(kind, "__dataclass_fields__")), None)
        found = get_type_hints(section, include_extras=True).get(part) if section else None
    return found


def _is_within(limit: Meta, value: float) -> bool:
    bounds = (limit.ge is None or value >= limit.ge, limit.gt is None or value > limit.gt)
    return all(bounds) and (limit.le is None or value <= limit.le) and (limit.lt is None or value < limit.lt)


def _range(limit: Meta) -> str:
    words = {"above": limit.gt, "at least": limit.ge, "below": limit.lt, "at most": limit.le}
    return " and ".join(f"{word} {bound}" for word, bound in words.items() if bound is not None)


def near_value(row: Row, value: Any) -> str | None:
    """Return the value that the user may have meant, if a field has named ones alone and this is none of
    them."""
    if isinstance(value, list | tuple) and len(value) == 1:
        value = value[0]
    names = [] if row.takes_any() else [name for name in row.named() if isinstance(name, str)]
    if not isinstance(value, str) or value in names:
        return None
    if f"`{value}`" in row.remark or any((setting, value) in values() for setting in row.settings):
        return None  # it is one of the peer's, and has no counterpart
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
