"""What a block to copy keeps of what the user gave: fields of their own in the sections that it replaces."""

from collections.abc import Iterator, Mapping
from typing import Any

from oat.config.peers.copied import is_python
from oat.config.peers.objects import GIVEN, plain
from oat.config.peers.shown import own
from oat.config.peers.table import is_peers, is_read
from oat.config.secrets import is_hidden
from oat.config.settings import MAIN_FIELDS

Given = dict[str, Any]
_OBJECTS = ("model.path", "prompts.path", "evaluation.path", "evaluation.pairs")
"""Settings that may be objects from Python."""


def with_own(place: str, ours: Mapping[str, Any], tree: Mapping[str, Any]) -> tuple[Given, dict[str, str]]:
    """Return the settings of a block with the user's own ones, and comments on those whose values cannot be
    written. The block of a file has all of them, so that it can be the whole file. The block from Python has
    those of its sections, and that of flags none: flags replace no section.

    Args:
        place: where the names were set.
        ours: the settings of the block by dotted names; `...` is a value that the user has to choose.
        tree: what the user gave as sections of ours, with any values.
    """
    found: Given = {}
    comments: dict[str, str] = {}
    algorithm = ours.get("algorithm.name")
    sections = dict.fromkeys(setting.partition(".")[0] for setting in ours if not is_python(setting))
    sections |= {} if is_python(place) else dict.fromkeys(map(str, tree))
    for section in sections if not place.startswith("--") else ():
        given = tree.get(section, ...)
        fields = dict(_fields(section, given)) if section not in ours and given is not ... else {}
        name = f"{section}.name"
        if section != "algorithm" and fields.get(name) != ours.get(name, fields.get(name)):
            continue  # it becomes another part, with other options
        for setting, value in fields.items():
            if setting in ours or not is_read(setting, algorithm) or is_peers(setting):
                continue
            found[setting] = _written(place, setting, value)
            if found[setting] is GIVEN:
                is_main = setting == f"{section}.{MAIN_FIELDS.get(section)}"
                comments[setting] = f"what you gave as {section if is_main else setting}"
    places = {section: place for place, section in enumerate(sections)}
    whole = {**found, **ours}
    return {
        name: whole[name] for name in sorted(whole, key=lambda name: places.get(name.partition(".")[0], -1))
    }, comments


def is_given(setting: str, tree: Mapping[str, Any]) -> bool:
    """Return True if the user's tree has a setting in its sections."""
    found: Any = tree
    for name in setting.split("."):
        if not issubclass(type(found), dict) or name not in found:
            return False
        found = found[name]
    return True


def _fields(section: str, given: Any) -> Iterator[tuple[str, Any]]:
    """Yield the settings of a section of the user's; of a value alone, its main field."""
    main = MAIN_FIELDS.get(section, "")
    is_section = issubclass(type(given), Mapping) and (main != "path" or main in given)
    if is_section:
        yield from _within(given, section)
    elif main and given is not None:
        yield f"{section}.{main}", given
    elif not main and not isinstance(given, Mapping):
        yield section, given


def _within(section: Mapping[Any, Any], above: str) -> Iterator[tuple[str, Any]]:
    for name, value in section.items():
        is_section = issubclass(type(value), dict) and value and not is_hidden(str(name))
        if is_section and f"{above}.{name}" not in _OBJECTS:
            yield from _within(value, f"{above}.{name}")
        else:
            yield f"{above}.{name}", value


def _written(place: str, setting: str, value: Any) -> Any:
    """Return a value as a block has it: itself if it is plain and no secret."""
    shown = own(setting, plain(value))
    is_records = setting in _OBJECTS and not _is_source(shown)
    if is_records or _has_unknown(shown):
        return GIVEN if is_python(place) else ...
    return shown


def _is_source(value: Any) -> bool:
    return isinstance(value, str) or (
        isinstance(value, list) and all(isinstance(each, str) for each in value)
    )


def _has_unknown(value: Any) -> bool:
    """Return True if a value or a part of it cannot be written."""
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return value is ... or any(map(_has_unknown, parts))
