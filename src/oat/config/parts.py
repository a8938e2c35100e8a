"""The settings of parts. The field `name` of a section chooses a part, and the other fields become an
instance of the part's class `Config`. It is made once, when a configuration is read for a run."""

import copy
import dataclasses
import datetime
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, get_args, get_type_hints

import msgspec

from oat.config.fields import UNSAID, said
from oat.config.load import Origins, blaming, convert, unknown_field, where
from oat.config.part_names import REGISTRIES, readers_of
from oat.config.settings import Component, Config, Part
from oat.errors import ConfigError

_TAKEN = ("name", "options", "settings")
"""Names that a field of a user's settings cannot have, since the section has them."""
_PLAIN = (type(None), bool, int, float, str, datetime.date)
_OBJECTIVE = ("oat.algorithms.base", "Objective")


@dataclass(frozen=True)
class NoOptions:
    """Takes the place of `Config` for a part that has no such class, and so no options."""


def with_settings(config: Config, origins: Origins, like: Config | None = None) -> Config:
    """Return the configuration with a `Part` in each section that names one. Where the section has one, it
    stays.

    Args:
        like: a configuration that has its parts. Where a section has the same settings, its part is taken.

    Raises:
        ConfigError: there is no such part, it has no such setting, or it refuses a value.
    """
    found: dict[str, Any] = {}
    if ":" in config.explorer.name:  # a user's explorer is loaded before the settings of any part are checked
        find_part(config, "explorer", origins)
    for section in REGISTRIES:
        component: Component = getattr(config, section)
        if not isinstance(component, Part):
            part = find_part(config, section, origins)
            before = getattr(like, section, None)
            with blaming(config, origins, section):
                found[section] = _same(component, part, before) or _part(config, section, part, origins)
    return replace(config, **found)


def _same(component: Component, part: Any, before: Any) -> Part | None:
    """Return the part in another configuration, with the values that it leaves open and `component` has, if
    all other settings are the same. Return None if they are not."""
    cls = getattr(part, "Config", NoOptions)
    if not isinstance(before, Part) or type(before.settings) is not cls:
        return None
    is_open = {f.name: before.options[f.name] == said(f).open for f in dataclasses.fields(cls)}
    if before.options.keys() != component.options.keys():
        return None
    others = {name: value for name, value in component.options.items() if before.options[name] != value}
    if not all(is_open[name] for name in others):
        return None
    return replace(filled(before, others), name=component.name)


def _part(config: Config, section: str, part: Any, origins: Origins) -> Part:
    component: Component = getattr(config, section)
    cls = getattr(part, "Config", NoOptions)
    if not dataclasses.is_dataclass(cls):
        raise ConfigError(f"`Config` of {component.name} is {cls!r}; make it a dataclass, or leave it out")
    names = {f.name for f in dataclasses.fields(cls)}
    for option in component.options:
        if option not in names:
            readers = readers_of(option) if section == "algorithm" else ()
            hint = f" of {component.name}" + (f" (it is read by {', '.join(readers)})" if readers else "")
            unknown = {name: value for name, value in component.options.items() if name not in names}
            own = {"name": component.name, **component.options}
            own = {name: value for name, value in own.items() if name not in unknown}
            raise unknown_field(
                (section, option),
                names,
                origins,
                hint,
                unknown=unknown,
                algorithm=config.algorithm.name,
                given=own,
            )
    settings = convert(cls, component.options, (section,), origins)
    if ":" in component.name:
        _check_own(component.name, settings)
    return Part(component.name, dataclasses.asdict(settings), settings)


def _check_own(name: str, settings: Any) -> None:
    """Refuse settings of a user's part that a run could not store, continue, or act on.

    Raises:
        ConfigError: a field has a name that its section uses, or is not given to the class, or says what only
            settings of oat's own say; or its value cannot be written into `config.yaml`.
    """
    for path, field in _own_fields(type(settings)):
        place, words = f"the field `{'.'.join(path)}` of {name}", said(field)
        if field.name in _TAKEN:
            raise ConfigError(f"{place} has a name that the section uses itself; give it another name")
        if not field.init:
            raise ConfigError(
                f"{place} has init=False, and a continued run sets all fields; make it a property, or "
                "let it be given"
            )
        for word in ("open", "follows", "earlier"):
            if getattr(words, word) is not UNSAID:
                raise ConfigError(
                    f"{place} says `{word}`, as only oat's own settings do; say no more than `read_if` and "
                    "`may_change`"
                )
    for option, value in dataclasses.asdict(settings).items():
        if (kind := _unwritable(value)) is not None:
            raise ConfigError(
                f"the field `{option}` of {name} has a value of the type {kind.__name__}, which config.yaml "
                "cannot hold; use numbers, texts, tuples, dicts, or dataclasses of these"
            )


def _own_fields(
    cls: type, path: tuple[str, ...] = (), around: tuple[type, ...] = ()
) -> Iterator[tuple[tuple[str, ...], "dataclasses.Field[Any]"]]:
    """Yield the fields that a user's class has, and those of the dataclasses in its types. Fields of oat's
    own classes, from which it may inherit, are left out."""
    ours = [
        field
        for base in cls.__mro__
        if base.__module__.startswith("oat.") and dataclasses.is_dataclass(base)
        for field in dataclasses.fields(base)
    ]
    hints = get_type_hints(cls)
    for field in dataclasses.fields(cls):
        if not any(field is other for other in ours):
            yield (*path, field.name), field
            for kind in (hints[field.name], *get_args(hints[field.name])):
                if isinstance(kind, type) and dataclasses.is_dataclass(kind) and kind not in (cls, *around):
                    yield from _own_fields(kind, (*path, field.name), (cls, *around))


def _unwritable(value: Any) -> type | None:
    """Return the type of a value, or of one in it, that is no plain data; None if there is none."""
    inner: Iterable[Any] = ()
    if isinstance(value, dict):
        inner = [*value, *value.values()]
    elif type(value) in (list, tuple):
        inner = value
    elif type(value) not in _PLAIN:
        return type(value)
    return next((kind for each in inner if (kind := _unwritable(each)) is not None), None)


def own_settings(config: Config, section: str) -> Any:
    """Return the settings that a part gets. A user's part gets a copy, which it may change."""
    settings = settings_of(config, section)
    return copy.deepcopy(settings) if ":" in getattr(config, section).name else settings


def filled(part: Part, values: Mapping[str, Any], section: str = "") -> Part:
    """Return the part with other values of some settings. No settings of our own parts are made anew for it:
    these are a copy. Those of a user's part are made by the user's class.

    Raises:
        ConfigError: the part has no such setting, or refuses a value.
    """
    if not values:
        return part
    if not type(part.settings).__module__.startswith("oat."):
        settings = convert(type(part.settings), {**part.options, **values}, (section,), {})
        return replace(part, options=dataclasses.asdict(settings), settings=settings)
    settings, types = copy.copy(part.settings), get_type_hints(type(part.settings), include_extras=True)
    for name, value in values.items():
        try:
            object.__setattr__(settings, name, msgspec.convert(value, types[name]))
        except msgspec.ValidationError as error:
            raise ConfigError(f"the field `{name}` is {value!r}: {error}") from None
    getattr(settings, "__post_init__", lambda: None)()
    return replace(part, options=dataclasses.asdict(settings), settings=settings)


def settings_of(config: Config, section: str) -> Any:
    """Return the settings of a section's part."""
    component: Component = getattr(config, section)
    if isinstance(component, Part):
        return component.settings
    return _part(config, section, find_part(config, section, {}), {}).settings


def find_part(config: Config, section: str, origins: Origins) -> Any:
    """Return the class of the part that a section names. One of oat's own parts is named by its name, a
    user's part by its path.

    Raises:
        ConfigError: there is no such part, or it cannot be loaded.
    """
    name, registry = getattr(config, section).name, REGISTRIES[section]
    place = where((section, "name"), origins)
    try:
        registry.refuse_unknown(name)
    except ConfigError as error:
        from oat.config.peers.answer import advice_on_value

        advice = advice_on_value((section, "name"), name)
        said = f"there is no {section} {name!r}; {advice}" if advice else str(error)
        raise ConfigError(f"{place}: {said}") from None
    with blaming(config, origins, f"{section}.name"):
        found = registry.load(name)
    is_objective = any(
        (base.__module__, base.__name__) == _OBJECTIVE for base in getattr(found, "__mro__", ())
    )
    if section == "algorithm" and not (
        is_objective and dataclasses.is_dataclass(getattr(found, "Config", None))
    ):
        raise ConfigError(
            f"{place}: {name} is no algorithm; subclass Objective of oat/algorithms/base.py, with a "
            "dataclass `Config` in it"
        )
    return found
