"""The message about a field that nothing reads: what it is called here, and fields with a similar name.

`oat.config.load` imports this module when it makes an error. Only then are the tables of names read.
"""

import dataclasses
import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_type_hints

from oat.config.part_fields import PART_FIELDS
from oat.config.peers.table import Row, find, is_listed, names, values
from oat.config.settings import Config
from oat.errors import did_you_mean, shortened

PYTHON = "oat.Trainer"
"""Begins the places of arguments that were given from Python."""
_MOST = 4
"""Largest number of fields that a message proposes."""
_MOST_LEAVES = 8
"""Largest number of fields of an unknown section that a message translates."""
_LONGEST = 100
"""Number of characters of a name for which a similar one is sought."""
Leaf = tuple[tuple[str, ...], Any]
"""A field with the sections around it, and its value."""


def described(
    place: str,
    path: tuple[str, ...],
    valid: Sequence[str],
    hint: str,
    unknown: Mapping[str, Any],
    algorithm: str | None,
) -> str:
    """Return the message about the first unknown field of a section. If the tables of names have it, the
    message also translates the other ones that they have.

    The tables of names have the first word, since they know what a name means. Otherwise the message proposes
    the fields of other sections that `_elsewhere` finds, or the field of the same section with the most
    similar name.

    Args:
        place: where the field was set.
        path: path of the unknown field.
        valid: names of the fields that its section has.
        hint: text that follows the field's name in the message.
        unknown: the unknown fields of its section and their values, this one first. A value may be an object
            whose fields are settings, such as TRL's GRPOConfig.
        algorithm: name of the run's algorithm; None: not known.
    """
    wrong = f"{place}: nothing reads the field `{'.'.join(path)}`{hint}"
    value = unknown.get(path[-1])
    leaves = [leaf for leaf in _leaves(path, value) if _rows(leaf[0], algorithm)]
    last = path[-1].replace("-", "_")[:_LONGEST]
    near = difflib.get_close_matches(last, valid, n=1, cutoff=0.85)
    if leaves:
        others = (
            each
            for name in unknown
            if name != path[-1]
            for each in _leaves((*path[:-1], name), unknown[name])
        )
        leaves += [leaf for leaf in others if _rows(leaf[0], algorithm)]
        typo = [name for name in near if not _is_said(name, path, leaves, algorithm)]
        first = f"did you mean `{typo[0]}`? " if typo else ""
        return f"{wrong}; {first}{_translated(place, leaves, algorithm)}"
    is_typo = bool(near) and path[-1] not in {name.rpartition(".")[2] for name in field_names()}
    found = [] if is_typo else _elsewhere(path, valid)
    if found:
        written = f" (from Python: {_arguments(dict.fromkeys(found[:1], ...))})" if _is_python(place) else ""
        return (
            f"{wrong}; did you mean {' or '.join(f'`{name}`' for name in found)}{written}? valid here: "
            f"{', '.join(valid) or 'none'}"
        )
    listed = did_you_mean(path[-1], valid)
    theirs = difflib.get_close_matches(last, names(), n=1, cutoff=0.85)
    if theirs and not listed.startswith("did"):
        return (
            f"{wrong}; did you mean `{theirs[0]}`? {_translated(place, [((theirs[0],), value)], algorithm)}"
        )
    return f"{wrong}; {listed}"


def advice_on_value(path: tuple[str, ...], value: Any) -> str:
    """Return what a value of a setting is called here, if another library has it; otherwise ""."""
    row = values().get((".".join(path), value)) if isinstance(value, str) else None
    if row is None:
        return ""
    ours = row.converted(value)
    return f"write {_written('', ours)}. {row.remark.rstrip('.')}" if ours else _begun_small(row.remark)


def field_names(cls: Any = Config, above: str = "") -> Iterator[str]:
    """Yield the dotted names of the fields in all sections, and of the settings of our algorithms and
    engines. The latter are in a list, since the algorithms import torch."""
    types = get_type_hints(cls)
    for f in dataclasses.fields(cls):
        name = f"{above}{f.name}"
        parts = [
            t for t in (types[f.name], *getattr(types[f.name], "__args__", ())) if dataclasses.is_dataclass(t)
        ]
        if f.name != "options" and (above or not parts):
            yield name
        for part in parts:
            yield from field_names(part, f"{name}.")
        if cls is Config:
            yield from (f"{name}.{field}" for field in PART_FIELDS.get(f.name, ()))


def _leaves(path: tuple[str, ...], value: Any) -> Iterator[Leaf]:
    """Yield a field and its value or, if the value is a section that no table has as a whole, those of its
    fields."""
    section = _fields_of(value)
    if section and (path[-1] == "args" or not is_listed(path) or _is_listed_within(path, section)):
        for name, part in section.items():
            yield from _leaves((*path, str(name)), part)
    else:
        yield path, value


def _is_listed_within(path: tuple[str, ...], section: Mapping[Any, Any]) -> bool:
    """Return True if a table has a field of a section as a whole, such as `reward.remote_url`."""
    return any(
        is_listed((*path, str(name))) or _is_listed_within((*path, str(name)), _fields_of(part))
        for name, part in section.items()
    )


def _fields_of(value: Any) -> Mapping[Any, Any]:
    """Return the fields of a section. Of an object of a dataclass they are those that differ from their
    defaults and are plain, since a constructor fills in others."""
    if isinstance(value, Mapping):
        return value
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return {}
    given = {f.name: (getattr(value, f.name, None), f.default) for f in dataclasses.fields(value)}
    return {
        name: getattr(now, "value", now)
        for name, (now, before) in given.items()
        if before is not dataclasses.MISSING and now != before and (now or before) and not _is_object(now)
    }


def _is_object(value: Any) -> bool:
    return not isinstance(value, str | int | float | list | tuple | Mapping | None)


def _rows(path: tuple[str, ...], algorithm: str | None) -> tuple[Row, ...]:
    """Return the rows of a field, but for rows that would only repeat its name."""
    own = ".".join(path).replace("-", "_")
    return tuple(row for row in find(path, algorithm) if row.settings != (own,))


def _is_said(name: str, path: tuple[str, ...], leaves: Sequence[Leaf], algorithm: str | None) -> bool:
    """Return True if the tables propose the field with this name in the path's section."""
    ours = ".".join((*path[:-1], name))
    return any(ours in row.settings for leaf, _ in leaves for row in _rows(leaf, algorithm))


def _translated(place: str, leaves: Sequence[Leaf], algorithm: str | None) -> str:
    """Return what fields are called here: one or two with their remarks, more of them as a list."""
    if len(leaves) <= 2:
        said = [
            _sentence(place, row, path, value, algorithm)
            for path, value in leaves
            for row in _rows(path, algorithm)
        ]
        return " ".join(said).rstrip(".")
    ours: dict[str, Any] = {}
    texts, unused = [], []
    for path, value in leaves:
        row = _rows(path, algorithm)[0]
        given = row.converted(value)
        ours |= given or {}
        if given or (given is None and row.settings):
            verb = "is" if given else "belongs to"
            ours_of = given or dict.fromkeys(row.settings, ...)
            texts.append(f"`{row.field}` {verb} {_written(place, ours_of)}")
        else:
            unused.append(f"`{row.field}`")
    if unused:
        texts.append(f"{', '.join(unused)} {'mean' if unused[1:] else 'means'} nothing or needs no setting")
    more = f"; and {len(texts) - _MOST_LEAVES} more" if texts[_MOST_LEAVES:] else ""
    python = f" (from Python: {_arguments(ours)})" if ours and _is_python(place) else ""
    return f"here {'; '.join(texts[:_MOST_LEAVES])}{more}{python}. docs/names.md says what differs"


def _sentence(place: str, row: Row, path: tuple[str, ...], value: Any, algorithm: str | None) -> str:
    of = f"{row.peer}'s " if row.peer else ""
    is_one = len(_rows(path, algorithm)) == 1
    name = f"{of}`{row.field}`" + ("" if is_one else f" ({', '.join(row.groups)})")
    ours = row.converted(value)
    given = dict.fromkeys(row.settings, ...) if ours is None else ours
    python = f" (from Python: {_arguments(given)})" if given and _is_python(place) else ""
    if not row.settings:
        return f"{name} means nothing here: {_begun_small(row.remark)}."
    if not given:
        return f"{name} needs no setting here. {row.remark}"
    if row.field in {setting.rpartition(".")[2] for setting in row.settings}:
        return f"did you mean {' or '.join(f'`{setting}`' for setting in row.settings)}{python}? {row.remark}"
    return f"{name} is {_written(place, given)} here{python}. {row.remark}"


def _begun_small(remark: str) -> str:
    """Return a remark as it stands behind a colon."""
    return remark.rstrip(".") if remark[1:2].isupper() else f"{remark[:1].lower()}{remark[1:]}".rstrip(".")


def _written(place: str, ours: Mapping[str, Any]) -> str:
    """Return settings with their values, as a file or flags have them; `...` is a value that is not known."""
    texts = []
    for setting, value in ours.items():
        if value is ... or _is_python(setting):
            texts.append(f"`{setting}`")
        elif place.startswith("--"):
            texts.append(f"`--{setting} {_plain(value)}`")
        else:
            texts.append(f"`{setting}: {_plain(value)}`")
    return " and ".join(texts)


def _plain(value: Any) -> str:
    """Return a value as YAML has it on one line."""
    if isinstance(value, str):
        return shortened(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_plain, value))}]"
    try:
        return shortened(json.dumps(value))
    except (TypeError, ValueError):
        return "..."


def _arguments(ours: Mapping[str, Any]) -> str:
    """Return settings as arguments of `oat.Trainer`, each section once."""
    tree: dict[str, Any] = {}
    for setting, value in ours.items():
        if _is_python(setting):
            tree[setting.partition("(")[2].rstrip(")")] = ...
            continue
        *sections, last = setting.split(".")
        inner = tree
        for section in sections:
            if not isinstance(inner.get(section), dict):
                inner[section] = {}
            inner = inner[section]
        inner[last] = value
    return ", ".join(f"{name}={_code(value)}" for name, value in tree.items())


def _code(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f'"{name}": {_code(part)}' for name, part in value.items()) + "}"
    if isinstance(value, str):
        return json.dumps(shortened(value), ensure_ascii=False)
    return "..." if value is ... else shortened(repr(value))


def _is_python(place: str) -> bool:
    return place.startswith(PYTHON)


def _elsewhere(path: tuple[str, ...], valid: Sequence[str]) -> list[str]:
    """Return the dotted names of at most `_MOST` fields of other sections. The user may have meant one of
    these fields.

    They are the fields whose last part is equal to that of `path`. If there are none, they are the fields
    with the most similar last part. But if a field of the path's own section has a similar name, return none.

    Args:
        valid: the fields of the path's own section.
    """
    known = [name for name in dict.fromkeys(field_names()) if name.rpartition(".")[0] != ".".join(path[:-1])]
    lasts = [name.rpartition(".")[2] for name in known]
    nearest = [path[-1]]
    if path[-1] not in lasts and not difflib.get_close_matches(path[-1], valid, n=1):
        nearest = difflib.get_close_matches(path[-1], lasts, n=1, cutoff=0.75)
    return [name for name, last in zip(known, lasts, strict=True) if last in nearest][:_MOST]
