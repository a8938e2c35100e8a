"""The sources of the package, for tests that read them and run nothing."""

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import oat

ROOT = Path(oat.__file__).parent


@functools.cache
def texts() -> dict[str, str]:
    """Return the text of each file by its path below the package."""
    return {
        file.relative_to(ROOT).as_posix(): file.read_text(encoding="utf-8")
        for file in sorted(ROOT.rglob("*.py"))
    }


def trees(*words: str, outside: tuple[str, ...] = ()) -> Iterator[tuple[str, ast.Module]]:
    """Parse the files in which one of the words stands, and yield them by their paths. To parse all of them
    takes a second, and few have the word.

    Args:
        outside: packages whose files are left out.
    """
    for name, text in texts().items():
        if name.split("/")[0] not in outside and any(word in text for word in words):
            yield name, ast.parse(text)
