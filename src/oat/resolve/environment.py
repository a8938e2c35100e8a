"""The environment that a configuration names, with its options."""

from dataclasses import fields, replace
from typing import TYPE_CHECKING

from oat.config.load import Origins, blaming, unknown_field
from oat.config.settings import Component, Config
from oat.environments.base import build_environment, environment_options
from oat.lazy import lazily
from oat.plugins.loading import load_symbol

if TYPE_CHECKING:
    from oat.environments import batched
else:
    batched = lazily("oat.environments.batched")


def environment_part(config: Config) -> Component | None:
    """Return the name and the options of the environment; None if there is none."""
    given = config.sampling.environment
    return Component(given) if isinstance(given, str) else given


def with_environment(config: Config, origins: Origins) -> Config:
    """Return the configuration with its environment in the shortest form: only the name if there are no
    options. So a run that was begun with one form can be continued with the other.

    Raises:
        ConfigError: there are options, and the environment cannot be loaded, or takes no such option.
    """
    part = environment_part(config)
    if part is None or not part.options:
        name = part and part.name
        return replace(config, sampling=replace(config.sampling, environment=name))
    with blaming(config, origins, _field(config)):
        takes = environment_options(part.name)
    for option in part.options:
        if takes is not None and option not in takes:
            valid = {f.name for f in fields(part)} | takes
            raise unknown_field(("sampling", "environment", option), valid, origins, f" of {part.name}")
    return config


def has_async_methods(config: Config) -> bool:
    """Return True if a method of the environment is `async`."""
    part = environment_part(config)
    return part is not None and batched.is_async(load_symbol(part.name))


def make_batched(config: Config, origins: Origins) -> "batched.BatchedEnvironment | None":
    """Make the run's environment; None if there is none.

    Raises:
        ConfigError: the environment cannot be made.
    """
    part = environment_part(config)
    if part is None:
        return None
    with blaming(config, origins, _field(config)):
        environment = build_environment(part.name, part.options)
    return batched.BatchedEnvironment(environment, config.sampling.environment_deadline_s)


def _field(config: Config) -> str:
    is_name = isinstance(config.sampling.environment, str)
    return "sampling.environment" + ("" if is_name else ".name")
