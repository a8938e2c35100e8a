"""The defaults of our settings by their dotted names, for messages."""

from typing import Any, get_type_hints

from oat.config.part_names import fields_of_parts
from oat.config.settings import Config


def default_of(setting: str, algorithm: str | None = None) -> Any:
    """Return the default of a setting; None: it is null, or there is none.

    Args:
        setting: its dotted name.
        algorithm: the run's algorithm, which decides about the section `algorithm`; None: the default that
            most of them have.
    """
    section, _, name = setting.partition(".")
    if of_parts := fields_of_parts(section):
        own = fields_of_parts(section, algorithm if section == "algorithm" else None)
        return own.get(name, of_parts.get(name))
    found: Any = get_type_hints(Config).get(section)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found
