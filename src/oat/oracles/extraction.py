"""Functions that extract the answer from a response, found by name. An evaluation by majority counts equal
answers as votes (`evaluation.answers`)."""

from collections.abc import Callable, Hashable

from oat.errors import ConfigError, OracleError, shown
from oat.plugins.calls import guarded
from oat.plugins.registry import ANSWERS

Extractor = Callable[[str], Hashable | None]
"""Maps the text of a response to its answer, or to None if the text has none. Responses with equal answers
are votes for the same answer."""


def load_extractor(name: str) -> Extractor:
    """Return the function of this name: one of ours, or a user's as `path/to/file.py:function` or
    `package.module:function`. If a user's function fails, or its answer cannot be hashed, the returned
    function raises OracleError.

    Raises:
        ConfigError: the name is unknown, or its code cannot be loaded or is no function.
    """
    function: Extractor = ANSWERS.load(name)
    if name in ANSWERS:
        return function
    if not callable(function):
        raise ConfigError(
            f"{name} is {type(function).__name__}, no function; name one that takes a text and returns "
            "its answer, or None"
        )

    def answer(text: str) -> Hashable | None:
        with guarded(
            name,
            lambda what: OracleError(
                f"{name} {what}, asked for the answer in {shown(text)}; repair the function"
            ),
        ):
            found: Hashable | None = function(text)
            hash(found)
        return found

    return answer
