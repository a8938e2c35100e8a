"""The names of the settings of our parts, and their defaults, for messages."""

import dataclasses
import functools
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, get_args, get_type_hints

from oat.plugins.registry import ALGORITHMS, ENGINES, EXPLORERS, Registry

REGISTRIES: Mapping[str, Registry] = {
    "engine": ENGINES,
    "explorer": EXPLORERS,
    "algorithm": ALGORITHMS,
}
"""The registry of each section that names a part, in the order in which the sections are checked."""


def fields_of_parts(section: str, name: str | None = None) -> Mapping[str, Any]:
    """Return the names of the settings of our parts of a section, and of the sections within them, with their
    defaults; `...` is a section. If parts differ, it is the default that most of them have.

    Args:
        section: "algorithm" or "engine"; any other has none.
        name: of one of our parts: only its settings count; None: those of all.
    """
    if name is not None and name in REGISTRIES.get(section, ()):
        return _defaults(REGISTRIES[section][name].Config)
    return _of_all(section)


@functools.cache
def _of_all(section: str) -> Mapping[str, Any]:
    parts = REGISTRIES[section].values() if section in ("algorithm", "engine") else ()
    own = [_defaults(part.Config) for part in parts]
    names = dict.fromkeys(name for found in own for name in found)
    return {name: Counter(each[name] for each in own if name in each).most_common(1)[0][0] for name in names}


@functools.cache
def readers_of(name: str) -> tuple[str, ...]:
    """Return our algorithms that read a setting of the section `algorithm`; empty: it is no such setting."""
    return tuple(each for each, part in ALGORITHMS.items() if name in _defaults(part.Config))


@functools.cache
def _defaults(cls: type) -> Mapping[str, Any]:
    return dict(_named_defaults(cls))


def _named_defaults(cls: type, above: str = "") -> Iterator[tuple[str, Any]]:
    hints = get_type_hints(cls)
    for field in dataclasses.fields(cls):
        is_made = field.default_factory is not dataclasses.MISSING
        value = field.default_factory() if is_made else field.default  # type: ignore[operator]
        is_plain = value is None or isinstance(value, str | int | float | tuple)
        yield f"{above}{field.name}", value if is_plain else ...
        for kind in (hints[field.name], *get_args(hints[field.name])):
            if dataclasses.is_dataclass(kind) and isinstance(kind, type):
                yield from _named_defaults(kind, f"{above}{field.name}.")
