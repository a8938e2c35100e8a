"""Refusal of settings that nothing reads in the configured combination of parts."""

from oat.config.fields import UNSAID, settings_below
from oat.errors import ConfigError
from oat.resolve.resolved import Resolved


def refuse_unread(resolved: Resolved) -> None:
    """Refuse settings that nothing reads.

    Raises:
        ConfigError: a setting was given another value than its default, and nothing reads it.
    """
    for path, value, default, said in settings_below(resolved.config):
        is_given = path in resolved.origins and value != default
        if said.read_if not in (None, UNSAID) and is_given and not said.read_if.holds(resolved):
            raise ConfigError(
                f"{resolved.origins[path]}: nothing reads {'.'.join(path)} with algorithm "
                f"{resolved.config.algorithm.name} and these settings; it is read only if "
                f"{said.read_if.words}; remove it"
            )
