"""The settings of parts. The field `name` of a section chooses a part, and the other fields become an
instance of the part's class `Config`. It is made once, when a configuration is read for a run."""

import copy
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, get_type_hints

import msgspec

from oat.config.fields import UNSAID, said, settings_below
from oat.config.load import Origins, blaming, convert, unknown_field, where
from oat.config.part_names import REGISTRIES, readers_of
from oat.config.settings import Component, Config, Part
from oat.errors import ConfigError

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
        _refuse_own_words(component.name, settings)
    return Part(component.name, dataclasses.asdict(settings), settings)


def _refuse_own_words(name: str, settings: Any) -> None:
    """Refuse what a setting of a user's part cannot say of itself, since a run fills in only settings of
    oat's own."""
    for path, _, _, own in settings_below(settings):
        for word in ("open", "follows", "earlier"):
            if getattr(own, word) is not UNSAID:
                raise ConfigError(
                    f"the field `{'.'.join(path)}` of {name} says `{word}`, as only oat's own settings do; "
                    "say no more than `read_if` and `may_change`"
                )


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
