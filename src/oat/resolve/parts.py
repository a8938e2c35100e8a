"""Defaults and checks of settings by the parts that a configuration names. They get the facts of the run."""

import re
from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from typing import Any

from oat.config.load import Origins, where
from oat.config.part_names import REGISTRIES
from oat.config.parts import filled, find_part, own_settings
from oat.config.settings import Component, Config
from oat.errors import ConfigError
from oat.plugins.calls import guarded
from oat.types.part import Check, Derived, RunFacts


def run_facts(config: Config) -> RunFacts:
    """Return the facts about a run that its parts get before its prompts and its oracle are known."""
    return RunFacts(
        profile=config.compute.profile,
        max_new_tokens=config.sampling.max_new_tokens,
        is_sampling=not config.prompts.responses or config.answering is not None,
        has_recorded=bool(config.prompts.responses) or config.oracle.name == "recorded",
        num_recorded=len(config.prompts.responses),
        has_environment=config.sampling.environment is not None,
        has_buffer=config.learner.buffer is not None,
        measures_pairs=config.evaluation is not None and config.evaluation.pairs is not None,
        is_quantized=config.model.quantize is not None,
        max_steps=config.stop.max_steps,
        max_queries=config.stop.max_queries,
        whole_groups=config.oracle.whole_groups is not False,
    )


def part_defaults(config: Config, section: str, origins: Origins) -> Mapping[str, Derived]:
    """Return, by name, the values of a part's settings that follow from other settings of the run. If the
    part has no method `defaults`, return an empty dict.

    Raises:
        ConfigError: `defaults` fails, gives a wrong value, or gives a value to a setting that does not exist
            or is not None. The message begins with the place of the setting or of the section.
    """
    part = find_part(config, section, origins)
    if not hasattr(part, "defaults"):
        return {}
    settings = own_settings(config, section)
    try:
        with _calling(config, section, "defaults"):
            found: dict[str, Derived] = dict(part.defaults(settings, run_facts(config)))
        _require_open(config, section, settings, found)
    except ConfigError as error:
        named = re.search(rf"\b{section}\.(\w+)", str(error))
        path = (section, named[1]) if named else (section,)
        raise ConfigError(f"{where(path, origins)}: {error}") from error
    return found


def part_checks(config: Config, facts: RunFacts) -> list[Check]:
    """Return the checks of settings that the methods `checks` of the configured parts make.

    Raises:
        ConfigError: a part's `checks` fails, or returns a check of a setting that does not exist.
    """
    found: list[Check] = []
    for section in REGISTRIES:
        part = find_part(config, section, {})
        if hasattr(part, "checks"):
            settings = own_settings(config, section)
            with _calling(config, section, "checks"):
                checks = list[Check](part.checks(settings, facts))
            for check in checks:
                _require_setting(config, section, check)
            found += checks
    return found


def setting(config: Config, path: tuple[str, ...]) -> Any:
    """Return the value of a setting, such as ("algorithm", "rewards", "clip"). In a section that is missing,
    all settings are None.

    Raises:
        LookupError: there is no such setting.
    """
    value: Any = config
    for name in path:
        if value is None:
            break
        options = value.options if isinstance(value, Component) else value
        if isinstance(options, Mapping) and name in options:
            value = options[name]
        elif hasattr(value, name):
            value = getattr(value, name)
        else:
            raise KeyError(name)
    return value


def _require_open(config: Config, section: str, settings: Any, found: Mapping[str, Derived]) -> None:
    by = getattr(config, section).name
    for name, default in found.items():
        if not isinstance(default, Derived):
            raise ConfigError(f"`defaults` of {by} gives {default!r}; give an oat.types.part.Derived")
        if not hasattr(settings, name):
            raise ConfigError(f"`defaults` of {by} gives a value to {name!r}, which is no setting of it")
        if getattr(settings, name) is not None:
            raise ConfigError(
                f"`defaults` of {by} gives a value to {section}.{name}, which is "
                f"{getattr(settings, name)!r}; give values only to settings that are None"
            )
    try:
        given = {name: default.value for name, default in found.items()}
        filled(getattr(config, section), given, section)
    except ConfigError as error:
        raise ConfigError(f"`defaults` of {by} gives a wrong value: {error}") from error


def _require_setting(config: Config, section: str, check: Check) -> None:
    by = getattr(config, section).name
    if not isinstance(check, Check):
        raise ConfigError(f"`checks` of {by} returned {check!r}; return oat.types.part.Check")
    path = tuple(check.field.split("."))
    with suppress(LookupError):
        if len(path) > 1:
            setting(config, path)
            return
    raise ConfigError(
        f"`checks` of {by} checks {check.field!r}, which is no setting; name one as `section.field`"
    )


def _calling(config: Config, section: str, function: str) -> AbstractContextManager[None]:
    """Return a context for a call of a part's function. In it, an error of the function, which may be a
    user's, becomes a `ConfigError`."""
    name = getattr(config, section).name
    return guarded(name, lambda what: ConfigError(f"`{function}` of {name} {what}; repair it"))
