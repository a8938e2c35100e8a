"""Functions that extract the answer from a response. In an evaluation by majority (`evaluation.answers`),
responses with equal answers vote for the same answer."""

from collections.abc import Callable, Hashable

from oat.errors import ConfigError, OracleError, shown
from oat.plugins.calls import guarded
from oat.plugins.registry import ANSWERS

Extractor = Callable[[str], Hashable | None]
"""A function from the text of a response to its answer, or to None if the text has no answer."""


def load_extractor(name: str) -> Extractor:
    """Return the function of this name.

    Args:
        name: one of our names, or a user's `path/to/file.py:function` or `package.module:function`.

    Returns:
        The function. A user's function raises OracleError if it fails, or if its answer cannot be hashed.

    Raises:
        ConfigError: the name is unknown, its code cannot be loaded, or it is no function.
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
