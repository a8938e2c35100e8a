"""Write docs/settings.md from the classes of settings and the docstrings of their fields: `python
tests/settings_page.py`."""

import ast
import dataclasses
import inspect
import re
import textwrap
import typing
from itertools import pairwise
from pathlib import Path
from typing import Any

from oat.config.fields import UNSAID, Said, said, said_at, within
from oat.config.settings import Component, Config, SinkConfig, SourceConfig
from oat.plugins.registry import ALGORITHMS, ENGINES, SINKS
from oat.tracking.sinks import FILES

PAGE = Path(__file__).parent.parent / "docs" / "settings.md"
INTRODUCTION = """# Settings

This page has the fields of a configuration; `python tests/settings_page.py` makes it from the code. The
fields of each oracle are in [oracles/](oracles/), and the fields of your own parts are those that you
declare. A field is set by a line of the YAML file, by a flag (`--learner.learning_rate 1e-5`), or by an
argument from Python (`oat.Trainer(learner={"learning_rate": 1e-5})`). A field without a default must be set.
In the texts, `None` is `null` in the file.

The sections `algorithm`, `oracle`, `engine` and `explorer` choose a part by the field `name`, which may be
`path/to/file.py:Name` or `package.module:Name` for a part of your own. The fields of the part are written in
the same section, beside `name`. Defaults of `name`: `torch` for the engine, `none` for the explorer. Such a
section may also be the name alone, as in `algorithm: grpo` or `--algorithm grpo`; `model` and `prompts` may
be their `path` alone.

"May change" says whether a run can be continued with another value (`yes`), or only forked with one (`in a
fork`). A setting that nothing in the run reads is refused.
"""
MAY_CHANGE = {"never": "no", "fork": "in a fork", "always": "yes"}
TYPES = {"str": "text", "int": "whole number", "float": "number", "bool": "true or false", "NoneType": "null"}


def sections(cls: type, above: str = "") -> list[tuple[str, type]]:
    """Return every section below a class, with its dotted name, in the order of the fields. If a field may
    hold one of several sections, each has an entry."""
    found: list[tuple[str, type]] = [(above, cls)]
    hints = typing.get_type_hints(cls)
    for f in dataclasses.fields(cls):
        for kind in (hints[f.name], *typing.get_args(hints[f.name])):
            if dataclasses.is_dataclass(kind) and kind is not Component and isinstance(kind, type):
                found += sections(kind, f"{above}.{f.name}".strip("."))
    return found


def documented(cls: type) -> dict[str, str]:
    """Return the docstring of each field by name, including the fields of base classes."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if dataclasses.is_dataclass(base):
            body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0].body  # type: ignore[attr-defined]
            for field, text in pairwise(body):
                if (
                    isinstance(field, ast.AnnAssign)
                    and isinstance(text, ast.Expr)
                    and isinstance(text.value, ast.Constant)
                ):
                    found[field.target.id] = " ".join(str(text.value.value).split())  # type: ignore[union-attr]
    return found


def table(cls: type, section: str = "") -> list[str]:
    """Return the table of a class of settings.

    Args:
        section: its dotted name; of a part's settings, the section that names the part.
    """
    hints, texts = typing.get_type_hints(cls), documented(cls)
    above = said_at(Config, section.split(".") if section else [], Said(None, "never"))
    lines = ["| field | type | default | may change | meaning |", "| --- | --- | --- | --- | --- |"]
    for f in dataclasses.fields(cls):
        nested = any(
            dataclasses.is_dataclass(kind) for kind in (hints[f.name], *typing.get_args(hints[f.name]))
        )
        if f.name == "options" or (nested and f.name not in texts):
            continue
        own = within(said(f), above)
        text = texts.get(f.name, "")
        if own.read_if is not None and said(f).read_if is not UNSAID:
            text += f" Read only if {own.read_if.words}."
        change = "" if nested else MAY_CHANGE[own.may_change]
        cells = [f"`{f.name}`", _type(hints[f.name]), _default(f), change, text.strip()]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return lines


def _condition(section: str) -> list[str]:
    """Return the line that says when the settings of a section are read."""
    found = said_at(Config, section.split(".")).read_if
    return (
        [] if found in (None, UNSAID) else [f"Where a field says nothing else, read only if {found.words}.\n"]
    )


def page() -> str:
    parts = [INTRODUCTION, "## At the top\n", *table(Config), ""]
    for name, cls in sections(Config)[1:]:
        parts += [f"## {name}\n", *_condition(name), *table(cls, name), ""]
        if name == "prompts":
            parts += ["## prompts.path: an entry of the list\n", *table(SourceConfig, "prompts"), ""]
    for name, engine in ENGINES.items():
        parts += [f"## engine: {name}\n", *table(engine.Config, "engine"), ""]
    parts += ["## tracking.sinks\n", *table(SinkConfig, "tracking"), ""]
    for name in SINKS:
        if name != FILES and dataclasses.fields(SINKS[name].Config):
            parts += [f"## tracking.sinks: {name}\n", *table(SINKS[name].Config, "tracking"), ""]
    shared: dict[type, list[str]] = {}
    for name, algorithm in ALGORITHMS.items():
        shared.setdefault(algorithm.Config, []).append(name)
    for cls, names in shared.items():
        parts += [f"## algorithm: {', '.join(names)}\n", *table(cls, "algorithm"), ""]
    for (name, cls), readers in inner_sections().items():
        parts += [f"## algorithm.{name}: {', '.join(readers)}\n", *table(cls, "algorithm"), ""]
    return "\n".join(parts).rstrip("\n") + "\n"


def inner_sections() -> dict[tuple[str, type], list[str]]:
    """Return the sections within the settings of algorithms, by name and class, each with the algorithms that
    have it."""
    found: dict[tuple[str, type], list[str]] = {}
    for algorithm, part in ALGORITHMS.items():
        for name, cls in sections(part.Config)[1:]:
            found.setdefault((name, cls), []).append(algorithm)
    return found


def _type(hint: Any) -> str:
    hint = typing.get_args(hint)[0] if typing.get_origin(hint) is typing.Annotated else hint
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is dict:
        return f"mapping of {_type(inner[0])} to {_type(inner[1])}"
    if origin is typing.Literal:
        return ", ".join(f"`{value}`" for value in inner)
    if origin is tuple:
        kinds = [kind for kind in inner if kind is not Ellipsis]
        return (
            f"list of {_type(kinds[0])}"
            if len(inner) != 2 or inner[1] is Ellipsis
            else f"list of {len(inner)} {_type(kinds[0])}s"
        )
    if inner:
        return " or ".join(dict.fromkeys(_type(kind) for kind in inner))
    if dataclasses.is_dataclass(hint):
        return "section"
    return TYPES.get(hint.__name__, hint.__name__)


def _default(f: "dataclasses.Field[Any]") -> str:
    if dataclasses.is_dataclass(f.default) and not isinstance(f.default, Component):
        return "see its section"
    if f.default is not dataclasses.MISSING:
        value = f.default.name if isinstance(f.default, Component) else f.default
        text = (
            "null"
            if value is None
            else str(value).lower()
            if isinstance(value, bool)
            else str(list(value))
            if isinstance(value, tuple)
            else value
        )
        return f"`{text}`" if re.fullmatch(r"\S.*", str(text)) else '""'
    if f.default_factory is dict:
        return "`{}`"
    return "" if f.default_factory is dataclasses.MISSING else "see its section"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
