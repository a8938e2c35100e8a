"""The labels of a plot's lines: directories, and the settings in which the lines differ."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_MOST_CHARACTERS = 60
"""A longer value of a setting is cut in its middle, because paths often differ at their ends."""


def directory_labels(directories: Sequence[Path]) -> list[str]:
    """Return a label for each of several distinct directories: the shortest end of its path that no other of
    them has."""
    parts = [Path(os.path.abspath(directory)).parts for directory in directories]
    ends = [[path[-size:] for size in range(1, len(path) + 1)] for path in parts]
    found = []
    for place, own in enumerate(ends):
        others = {end for number, each in enumerate(ends) if number != place for end in each}
        found.append(Path(*next((end for end in own if end not in others), own[-1])).as_posix())
    return found


def differences(trees: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Return for each configuration the settings in which the configurations differ, as texts such as
    "kl_coef 0.1"; the algorithm comes first.

    Some settings are in some of the configurations only. Options of a part (an algorithm, an oracle) that
    another configuration's part does not have are left out, unless they differ between two configurations
    with the same part. Of a section that another configuration does not have, only its name is shown.

    Args:
        trees: settings by dotted name.
    """
    fields = [*dict.fromkeys(field for tree in trees for field in tree)]
    texts = {field: _texts(field, trees) for field in fields}
    differ = [field for field, values in texts.items() if len({*values}) > 1]
    names = [field for field in differ if field.endswith(".name")]

    def follows_from_a_part(field: str) -> bool:
        parts = [name for name in names if field.startswith(name.removesuffix("name"))]
        same: dict[tuple[str | None, ...], set[str | None]] = {}
        for place, text in enumerate(texts[field]):
            same.setdefault(tuple(texts[name][place] for name in parts), set()).add(text)
        return None in texts[field] and bool(parts) and all(len(values) == 1 for values in same.values())

    shown = [field for field in differ if not follows_from_a_part(field)]
    shown.sort(key=lambda field: field != "algorithm.name")
    last = [field.rpartition(".")[2] for field in fields]
    short = {
        field: name if last.count(name) == 1 else field for field, name in zip(fields, last, strict=True)
    }
    return [
        [_named(short[field], field, text) for field in shown if (text := texts[field][place]) is not None]
        for place in range(len(trees))
    ]


def _texts(field: str, trees: Sequence[Mapping[str, Any]]) -> list[str | None]:
    """Return the value of a setting in each configuration as text. A name of a file's part is without the
    folder, if the folders do not differ."""
    texts = [_text(field, tree, trees) for tree in trees]
    if not field.endswith(".name"):
        return texts
    short = [text and text.rpartition("/")[2] for text in texts]
    return short if len({*short}) == len({*texts}) else texts


def _text(field: str, tree: Mapping[str, Any], trees: Sequence[Mapping[str, Any]]) -> str | None:
    """Return the value of a setting as text; "given" if it is a section here and a value in another
    configuration. Return None if the configuration lacks the setting, or if another has a value in place of
    the setting's section, which is shown then."""
    sections = {field[:place] for place, letter in enumerate(field) if letter == "."}
    if any(section in other for section in sections for other in trees):
        return None
    if field not in tree:
        return "given" if any(name.startswith(f"{field}.") for name in tree) else None
    value = tree[field]
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:.12g}" if isinstance(value, float) else str(value)


def _named(name: str, field: str, text: str) -> str:
    half = _MOST_CHARACTERS // 2
    if len(text) > _MOST_CHARACTERS:
        text = f"{text[: half - 1]}…{text[-half:]}"
    return text if field in ("algorithm.name", "oracle.name") else f"{name} {text}"
