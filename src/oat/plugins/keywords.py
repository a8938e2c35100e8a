"""The options that users' classes and functions take."""

import inspect
from collections.abc import Callable
from typing import Any


def keywords(found: Callable[..., Any]) -> set[str] | None:
    """Return the names of the keywords that a function, or a class's constructor, takes. Return None if it
    takes any keyword (`**kwargs`), or has no signature that can be read."""
    try:
        parameters = inspect.signature(found).parameters.values()
    except ValueError:  # some built-in classes have no signature
        return None
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    return {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
