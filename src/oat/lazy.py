"""Modules that are imported when they are first used.

The file of a part, such as an algorithm, declares the part's settings and computes with torch. A mistake in
the settings is told before torch is imported, which takes a second. So the file imports torch, and modules
that import it, with `lazily`. Beside it, under `TYPE_CHECKING`, an ordinary import tells type checkers and
readers of imports the same.
"""

import importlib
from typing import Any


class _Lazy:
    __slots__ = ("__dict__", "_module")  # a slot stays when `__dict__` becomes that of the module

    def __init__(self, name: str):
        object.__setattr__(self, "_module", name)

    def __getattr__(self, attribute: str) -> Any:
        if attribute == "_module":
            raise AttributeError(attribute)  # of a copy that was not initialised
        module = importlib.import_module(self._module)
        object.__setattr__(self, "__dict__", module.__dict__)  # all names are found there from now on
        return getattr(module, attribute)

    def __setattr__(self, attribute: str, value: Any) -> None:
        setattr(importlib.import_module(self._module), attribute, value)


def lazily(name: str) -> Any:
    """Return a stand-in for a module, which is imported when one of its attributes is first read."""
    return _Lazy(name)
