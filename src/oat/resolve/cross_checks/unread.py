"""Refusal of settings that nothing reads in the configured combination of parts."""

import dataclasses

from oat.config.fields import UNSAID, said, settings_below
from oat.errors import ConfigError
from oat.resolve.resolved import Resolved


def refuse_unread(resolved: Resolved) -> None:
    """Refuse settings that nothing reads.

    Raises:
        ConfigError: a setting was given another value than its default, and nothing reads it.
    """
    for path, value, default, own in settings_below(resolved.config):
        is_given = path in resolved.origins and value != default
        if own.read_if in (None, UNSAID) or not is_given or _has_others(value):
            continue
        if not own.read_if.holds(resolved):
            raise ConfigError(
                f"{resolved.origins[path]}: nothing reads {'.'.join(path)} with algorithm "
                f"{resolved.config.algorithm.name} and these settings; it is read only if "
                f"{own.read_if.words}; remove it"
            )


def _has_others(value: object) -> bool:
    """Return True for a section with fields that are read whatever holds of the section, as `evaluation`."""
    return dataclasses.is_dataclass(value) and any(
        said(field).read_if is None for field in dataclasses.fields(value)
    )
