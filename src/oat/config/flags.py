"""The words of a command line that set fields: flags of ours, and those of other libraries, whose names a
message then translates.

A flag of ours takes one value. One that nothing here reads may take several words, as TRL's `--reward_weights
1 0.5` does, or be `--no_NAME` for a false one; and a word of verl's is `section.name=value`. They are read as
their library reads them, so that the message about them has the value that was meant.
"""

import re
from collections.abc import Sequence
from typing import Any

import yaml

from oat.config.secrets import is_hidden, is_suspect, looks_secret
from oat.config.settings import Config
from oat.config.yaml_text import loader_of
from oat.errors import ConfigError
from oat.files import is_utf8

SHORT = {"serialise": "compute.serialise"}
"""Flags with a name of their own, and the settings that they stand for."""
_ASSIGNMENT = re.compile(r"\+{0,2}([A-Za-z_]\w*(?:\.\w+)*)=(.*)", re.DOTALL)
_OPPOSITE = {"": "false", "true": "false", "false": "true"}
HARMLESS = ("prompt-key", "token-file")
"""Flags of our commands whose names only look like those of secrets."""
_LEAST_MASKED = 6
"""Least number of characters of a word that is masked in messages."""


def read_flags(words: Sequence[str]) -> list[tuple[str, str, Any]]:
    """Return for each flag how it was given, the field that it sets, and the value.

    Raises:
        ConfigError: a word is no flag, a flag of ours has several values, or a value cannot be read.
    """
    flags, rest = [], list(words)
    are_assigned = any(_assigned(word) for word in words)  # a line of verl's has names of ours too
    while rest:
        flag = rest.pop(0)
        assigned = _assigned(flag, is_any=are_assigned)
        if not assigned and not flag.startswith("--"):
            raise ConfigError(f"{_no_flag(flag)}; write --section.field value")
        name, equals, text = flag[2:].partition("=") if not assigned else (assigned[0], "=", assigned[1])
        values = [text] if equals else []
        while (
            rest
            and not assigned
            and not rest[0].startswith("--")
            and not (values and _assigned(rest[0], is_any=are_assigned))
        ):
            values.append(rest.pop(0))
        if len(values) > 1 and _is_ours(name):
            raise ConfigError(
                f"--{name} takes one value, and {len(values)} words stand behind it; write a list as "
                f"--{name} '[a, b]', and quote a value with spaces"
            )
        denied = _denied(name, values)
        field, values = denied or (SHORT.get(name, name), values or ["true"])
        parsed = [parse_flag(f"--{name}", value) for value in values]
        flags.append((f"--{name}", field, parsed if len(parsed) > 1 else parsed[0]))
    return flags


def masked(text: str, words: Sequence[str]) -> str:
    """Return a message about a command line with `***` for its words that may be secrets: those that look so,
    and those behind a flag whose name may be a secret's.

    Args:
        words: the words of the command line.
    """
    is_behind, secrets = False, set()
    for word in words:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            is_behind = _may_be_secret(name)
            secrets |= {value} if equals and (is_behind or looks_secret(value)) else set()
        elif is_behind or looks_secret(word):
            secrets.add(word)
        elif re.search(r"[=\s]", word):  # `token=...`, `Bearer ...`
            name, value = re.split(r"[=\s]", word, maxsplit=1)
            secrets |= {value} if is_suspect(name) else set()
    for secret in sorted(secrets, key=len, reverse=True):
        if len(secret) >= _LEAST_MASKED:
            text = text.replace(repr(secret)[1:-1], "***").replace(secret, "***")
    return text


def _may_be_secret(name: str) -> bool:
    section, _, field = name.rpartition(".")
    is_ours = section.partition(".")[0] in Config.__dataclass_fields__
    return is_hidden(field) if is_ours else is_suspect(name) and name not in HARMLESS


def _no_flag(word: str) -> str:
    is_secret = looks_secret(word) or (re.search(r"[=\s]", word) is not None and is_suspect(word))
    return "a word that is not shown is not a flag" if is_secret else f"{word!r} is not a flag"


def _is_ours(name: str) -> bool:
    """Return True if a flag names a setting of ours, or one of a part of the user's."""
    return name in SHORT or (name.partition(".")[0] in Config.__dataclass_fields__ and not _is_peers(name))


def _is_peers(name: str) -> bool:
    """Return True if a field is none of ours, and the tables of other libraries have it."""
    from oat.config.peers.translated import rows_of
    from oat.config.unknown import field_names

    is_ours = name in Config.__dataclass_fields__ or name in field_names()
    return not is_ours and bool(rows_of(tuple(name.split(".")), None))


def _assigned(word: str, *, is_any: bool = False) -> tuple[str, str] | None:
    """Return the name and the value of a word `name=value` with a name of another library's; None: it is no
    such word.

    Args:
        is_any: it may have any name.
    """
    found = _ASSIGNMENT.fullmatch(word)
    return (found[1], found[2]) if found and (is_any or _is_peers(found[1])) else None


def _denied(name: str, values: Sequence[str]) -> tuple[str, list[str]] | None:
    """Return the field that a flag `--no_NAME` of TRL's says is false, and its value; None: it is none."""
    field = name.replace("-", "_")
    if not field.startswith("no_") or len(values) > 1:
        return None
    from oat.config.peers.theirs import types_of

    value = _OPPOSITE.get("".join(values).lower())
    return (field[3:], [value]) if value and "bool" in types_of(field[3:]) else None


def parse_flag(flag: str, text: str) -> Any:
    """Return the value of a flag: its text, read as YAML.

    Raises:
        ConfigError: it cannot be read.
    """
    if not is_utf8(text):
        raise ConfigError(f"{flag}: the value is no text in UTF-8; give it in UTF-8")
    try:
        value = yaml.load(text, Loader=loader_of(text))
    except (yaml.YAMLError, RecursionError, ValueError):
        is_ours = flag[2:].partition(".")[0] in Config.__dataclass_fields__
        is_shown = is_ours and not is_suspect(flag) and not looks_secret(text)
        raise ConfigError(
            f"{flag}: cannot read the value{f' {text!r}' if is_shown else ''}; quote it"
        ) from None
    # YAML would take ` #2` at the end of a folder's name for a comment
    return text if isinstance(value, str) and text[:1] not in ("'", '"') else value
