"""Settings in the form that a message offers to copy: lines of YAML, flags, or arguments of `oat.Trainer`.

Settings that a peer decides by its defaults are marked by a comment.
"""

import json
import shlex
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from oat.config.peers.objects import GIVEN
from oat.config.settings import MAIN_FIELDS
from oat.config.yaml_text import tree_to_yaml
from oat.errors import shortened

PYTHON = "oat.Trainer"
"""Begins the places of arguments that were given from Python."""
MARK = "  # TRL's default"


def block(
    place: str, known: Mapping[str, Any], marked: Collection[str], comments: Mapping[str, str] | None = None
) -> str:
    """Return settings as they can be copied, each line after a line break.

    Args:
        place: where the user's settings were set, which decides the form.
        known: the settings by dotted names, with plain values.
        marked: those of them that a peer decides by default, which get a comment.
        comments: comments on further ones, which arguments alone have.
    """
    if is_python(place):
        ends = {
            **{name: f"  # {text}" for name, text in (comments or {}).items()},
            **dict.fromkeys(marked, MARK),
        }
        lines = [line for name, value in tree_of(known).items() for line in _arguments(name, value, ends)]
    elif place.startswith("--"):
        mine = {name: value for name, value in known.items() if name not in marked}
        parts = [_flags(mine), _flags({name: known[name] for name in known if name in marked})]
        lines = [" \\\n  ".join(filter(None, parts)) + (MARK + "s" if parts[1] else "")]
    else:
        lines = list(_yaml(tree_of(known), "", marked))
    return "".join(f"\n  {line}" for line in lines)


def _flags(ours: Mapping[str, Any]) -> str:
    return " ".join(f"--{name} {shlex.quote(plain(value))}" for name, value in ours.items())


def _yaml(tree: Mapping[str, Any], above: str, marked: Collection[str]) -> Iterator[str]:
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            yield f"{name}:"
            yield from (f"  {line}" for line in _yaml(value, f"{above}{name}.", marked))
            continue
        are_numbers = isinstance(value, list) and all(isinstance(part, int | float) for part in value)
        text = f"{name}: {plain(value)}" if are_numbers else tree_to_yaml({name: value}).rstrip("\n")
        first, *more = text.split("\n")
        yield first + (MARK if f"{above}{name}" in marked else "")
        yield from more


def _arguments(name: str, value: Any, ends: Mapping[str, str]) -> Iterator[str]:
    """Yield a section as an argument: one line, or one for each field if one of them has a comment.

    Args:
        ends: the comments by dotted names.
    """
    main = MAIN_FIELDS.get(name, "")
    if value == {main: GIVEN}:
        yield f"{name}=...," + ends.get(f"{name}.{main}", "")
        return
    if not any(each.startswith(f"{name}.") for each in ends):
        yield f"{name}={code(value, most=0)}," + ends.get(name, "")
        return
    yield f"{name}={{"
    for field, part in value.items():
        inner = f"{name}.{field}"
        found = [each for each in ends if each == inner or each.startswith(f"{inner}.")]
        yield f'    "{field}": {code(part, most=0)},' + (ends[found[0]] if found else "")
    yield "},"


def is_python(place: str) -> bool:
    return place.startswith(PYTHON)


def arguments(ours: Mapping[str, Any]) -> str:
    """Return settings as arguments of `oat.Trainer`, each section once."""
    return ", ".join(f"{name}={code(value)}" for name, value in tree_of(ours).items())


def tree_of(ours: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings in their sections. An argument of `oat.Trainer` alone stands beside the sections."""
    tree: dict[str, Any] = {}
    for setting, value in ours.items():
        if is_python(setting):
            tree[setting.partition("(")[2].rstrip(")")] = ...
            continue
        *sections, last = setting.split(".")
        inner = tree
        for section in sections:
            if not isinstance(inner.get(section), dict):
                inner[section] = {}
            inner = inner[section]
        inner.setdefault(last, value)
    return tree


def code(value: Any, most: int = 80) -> str:
    """Return a value as Python. A text of more than `most` characters is cut; 0: none is."""
    if isinstance(value, dict):
        return "{" + ", ".join(f'"{escaped(name)}": {code(part, most)}' for name, part in value.items()) + "}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(code(part, most) for part in value)}]"
    text = json.dumps(value, ensure_ascii=not value.isprintable()) if isinstance(value, str) else repr(value)
    return "..." if value is ... else shortened(text, most) if most else text


def plain(value: Any) -> str:
    """Return a value as YAML has it on one line."""
    if isinstance(value, str):
        return shortened(value) if value.isprintable() else shortened(json.dumps(value))
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(plain, value))}]"
    try:
        return shortened(json.dumps(value))
    except (TypeError, ValueError):
        return "..."


def escaped(text: str) -> str:
    """Return a name or a place with escapes for line breaks and what else is not visible."""
    return text if text.isprintable() else json.dumps(text)[1:-1]
