"""Which values a message may show. A text may be a secret that stands in the wrong place, so it is shown only
where it is known to be none: as a value that a field is known to have, or where a setting of ours is a text.
"""

import re
from collections.abc import Mapping
from typing import Any, Literal, get_origin, get_type_hints

from oat.config.part_names import fields_of_parts
from oat.config.peers.faults import near_value
from oat.config.peers.objects import Named
from oat.config.peers.rewards import REWARDS
from oat.config.peers.table import Row
from oat.config.secrets import is_hidden, is_suspect, looks_secret
from oat.config.settings import Config
from oat.errors import shortened, shown

TEXTS = (
    "evaluation.pairs",
    "evaluation.path",
    "evaluation.split",
    "model.adapter",
    "model.critic",
    "model.lora.targets",
    "model.path",
    "model.reference",
    "prompts.path",
    "prompts.prompt_key",
    "prompts.reference_key",
    "prompts.split",
    "render.system",
    "render.template",
    "run_dir",
)
"""Our settings whose values are texts of the user's. A message shows them, since they are to be copied."""
_WORD = re.compile(r"[a-z][a-z0-9_-]{0,15}")


def listed(row: Row, value: Any) -> Any:
    """Return the value of a field that a table has, if a message may show it; otherwise `...`.

    Args:
        row: the field's row.
    """
    if value is None or isinstance(value, bool | Named):
        return value
    if isinstance(value, list):
        parts = [listed(row, part) for part in value]
        return ... if any(part is ... for part in parts) else value
    if isinstance(value, int | float):
        return value if row.copies() or not is_suspect(row.field) else ...
    if not isinstance(value, str):
        return ...
    is_known = value in row.named() or near_value(row, value) is not None
    is_text = row.field in REWARDS or (row.copies() and any(setting in TEXTS for setting in row.settings))
    is_word = row.copies() and any(_has(setting, value) for setting in row.settings)
    return value if is_known or (not looks_secret(value) and (is_text or is_word)) else ...


def unlisted(name: str, value: Any, meant: str, rows: tuple[Row, ...]) -> Any:
    """Return the value of a field that no table has, if a message may show it; otherwise `...`.

    Args:
        name: the field.
        meant: the name that the user may have meant, of a peer's or of ours.
        rows: the rows of that name; empty: it is one of ours.
    """
    if is_suspect(name):
        return ...
    if isinstance(value, list):
        parts = [unlisted(name, part, meant, rows) for part in value]
        return ... if any(part is ... for part in parts) else value
    if isinstance(value, str):
        is_known = any(
            value in row.named() or any(_has(each, value) for each in row.settings) for row in rows
        )
        return value if _WORD.fullmatch(value) and (is_known or _has(meant, value)) else ...
    return value if value is None or isinstance(value, bool | int | float) else ...


def own(setting: str, value: Any) -> Any:
    """Return the value of a setting of ours with `...` for what may be a secret by its name or its form, and
    for what is not plain.

    Args:
        setting: its dotted name.
    """
    if is_hidden(setting.rpartition(".")[2]) and value not in (None, ""):
        return ...
    if isinstance(value, Mapping):
        return {name: own(f"{setting}.{name}", part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [own(setting, part) for part in value]
    return ... if isinstance(value, str) and looks_secret(value) else value


def as_text(path: tuple[str, ...], value: Any) -> str:
    """Return the value of a setting of ours as a message about it has it."""
    if isinstance(value, Mapping):  # its fields are not ours, so nobody knows what they hold
        return f"a section with {', '.join(shortened(str(name)) for name in [*value][:4]) or 'no fields'}"
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 1000:
        return "a very large number"
    texts = value if isinstance(value, list) else [value]
    is_secret = any(isinstance(each, str) and looks_secret(each) for each in texts)
    return "a value that is not shown" if is_secret or is_hidden(path[-1]) else shown(value)


def _has(setting: str, value: str) -> bool:
    """Return True if a setting of ours has named values, and a text is one of them; of a part's setting with
    a text as its default, that a text is a short word."""
    section, _, name = setting.partition(".")
    if of_parts := fields_of_parts(section):
        return isinstance(of_parts.get(name), str) and bool(_WORD.fullmatch(value))
    kind: Any = Config
    for part in setting.split("."):
        kinds = (kind, *getattr(kind, "__args__", ()))
        hints: dict[str, Any] = next(
            (
                get_type_hints(each, include_extras=True)
                for each in kinds
                if hasattr(each, "__dataclass_fields__")
            ),
            {},
        )
        kind = hints.get(part)
    choices = [each for each in (kind, *getattr(kind, "__args__", ())) if get_origin(each) is Literal]
    return any(value in each.__args__ for each in choices)
