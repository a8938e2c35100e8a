"""The defaults of our settings by their dotted names, for messages. No algorithm is imported for them."""

from typing import Any, get_type_hints

from oat.config.part_fields import OTHER_DEFAULTS, PART_FIELDS
from oat.config.settings import Config


def default_of(setting: str, algorithm: str | None = None) -> Any:
    """Return the default of a setting; None: it is null, or there is none.

    Args:
        setting: its dotted name.
        algorithm: the run's algorithm, which decides about the section `algorithm`; None: the default that
            most of them have.
    """
    section, _, name = setting.partition(".")
    if section in PART_FIELDS:
        own = OTHER_DEFAULTS.get(algorithm or "", {}) if section == "algorithm" else {}
        return own.get(name, PART_FIELDS[section].get(name))
    found: Any = get_type_hints(Config).get(section)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found
