"""Modules that are imported when they are first used.

The file of a part, such as an algorithm, declares the part's settings and computes with torch. A mistake in
the settings is told before torch is imported, which takes a second. So the file imports torch, and modules
that import it, with `lazily`. Beside it, under `TYPE_CHECKING`, an ordinary import tells type checkers and
readers of imports the same.
"""

import importlib
from typing import Any


class _Lazy:
    def __init__(self, name: str):
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        module = importlib.import_module(self._name)
        self.__dict__ = module.__dict__  # from now on all names are found there, also those set later
        return getattr(module, attribute)


def lazily(name: str) -> Any:
    """Return a stand-in for a module, which is imported when one of its attributes is first read."""
    return _Lazy(name)
