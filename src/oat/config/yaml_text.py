"""YAML as this project reads and writes it."""

import re
from collections.abc import Mapping
from typing import Any

import yaml


# libyaml, where it is there, is ten times as fast
class Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """A YAML loader that reads `5e-4` as a number. In YAML 1.1 this is a string."""


class SlowLoader(yaml.SafeLoader):
    """The same in Python. Its errors say more than those of libyaml."""


_SAFE_LEVELS = 1000
"""Nesting that libyaml composes without harm; much deeper, it would end the process."""
_OPENING = re.compile(r"[ \t\-?:]+")
"""What opens levels without brackets: at most two levels a character. It stands at the beginning of a line,
and YAML has more ends of lines than Python's `^` knows."""


def loader_of(text: str) -> type[Loader | SlowLoader]:
    """Return the fast loader, or for a text that may be nested deeply the one that raises a
    RecursionError."""
    run = max(map(len, _OPENING.findall(text)), default=0)
    is_flat = text.count("[") + text.count("{") + 2 * run < _SAFE_LEVELS
    return Loader if is_flat else SlowLoader


class _Dumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]
    """Writes YAML that `Loader` reads back. The string "5e-4" is written in quotes. Line ends of every kind
    are written as escapes, since SafeDumper loses some."""

    def represent_str(self, data: str) -> yaml.ScalarNode:
        return self.represent_scalar("tag:yaml.org,2002:str", data, style=None if data.isprintable() else '"')


_Dumper.add_representer(str, _Dumper.represent_str)

for _side in (Loader, SlowLoader, _Dumper):
    _side.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"),
        list("-+0123456789"),
    )


def tree_to_yaml(tree: Mapping[str, Any]) -> str:
    """Return plain data as text, in the form that `load_config` reads."""
    return yaml.dump(dict(tree), Dumper=_Dumper, sort_keys=False, allow_unicode=True)
