"""The record of a run's engine: which one drew its responses, in which way, and what it could do.

`environment.json` has it with the fingerprints of the inputs. A run goes on with an engine that differs only
if an earlier or later version of `oat` made the record, since this version may name or measure it otherwise.
"""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from oat.assemble.fingerprints import Inputs
from oat.errors import ConfigError
from oat.models.identity import listed
from oat.resolve.resolved import Resolved
from oat.rundir.provenance import versions

KEY = "engine"


def engine_record(resolved: Resolved) -> Inputs:
    """Return the record of this run's engine, as plain JSON."""
    traits = resolved.engine
    can = asdict(traits.capabilities)
    slots = traits.capabilities.slots
    record = {
        "name": resolved.config.engine.name,
        "way": traits.way,
        "can": {**can, "slots": None if slots is None else sorted(slots)},
        "oat": versions().get("oat-align", ""),
    }
    return {KEY: record}


def compare_engines(known: Inputs | None, now: Inputs) -> str | None:
    """Compare the engine of a run that goes on with its record.

    Args:
        known: the inputs that the run's own processes recorded; None: none did.
        now: the present inputs.

    Returns:
        A sentence for people, which is said once; None if there is nothing to say.

    Raises:
        ConfigError: this version of `oat` recorded another engine.
    """
    if known is None:
        return None
    before, here = known.get(KEY), now[KEY]
    if not isinstance(before, dict) or not _is_record(before):
        return (
            "no record says which engine drew this run's responses so far: an earlier version of oat began "
            f"it, or the record was removed; it goes on with {_named(here)}"
        )
    lines = [*_differences(before, here)]
    if not lines:
        return None
    if before["oat"] == here["oat"]:
        raise ConfigError(
            f"another engine drew this run's responses so far:{listed(lines)}\ngo on with that engine, or "
            "fork the run (`--from`)"
        )
    return (
        f"oat {before['oat']} recorded another engine for this run ({'; '.join(lines)}); it goes on with "
        f"{_named(here)}"
    )


def _is_record(found: Mapping[str, Any]) -> bool:
    """Return True if this has the form of a record. A file may have been edited."""
    is_named = all(isinstance(found.get(name), str) for name in ("name", "way", "oat"))
    return is_named and isinstance(found.get("can"), dict)


def _differences(before: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """Return a line for each field of two records that differs."""
    lines = [
        f"{what}: was {before[what]}, is {here[what]}"
        for what in ("name", "way")
        if before[what] != here[what]
    ]
    could, can = before["can"], here["can"]
    return lines + [
        f"{name}: was {could[name]}, is {can[name]}"
        for name in can
        if name in could and could[name] != can[name]
    ]


def _named(record: Mapping[str, Any]) -> str:
    return f"the engine {record['name']} ({record['way']})"
