"""The answer in a response, by name: what responses vote for when the majority is asked
(`evaluation.answers`)."""

from collections.abc import Callable, Hashable

from oat.errors import ConfigError, OracleError, did_you_mean, shown
from oat.oracles.rules.countdown import tagged_answer
from oat.oracles.rules.gsm8k import last_number, marked_number
from oat.plugins.calls import guarded
from oat.plugins.loading import load_symbol

Answers = Callable[[str], Hashable | None]
"""From the text of a response to its answer, or None where it has none. Responses that give equal answers
vote for the same."""

_NAMED: dict[str, Answers] = {
    "last_number": last_number,
    "marked_number": marked_number,
    "tagged_answer": tagged_answer,
}


def load_answers(name: str) -> Answers:
    """The function of this name: one of ours, or a user's as `path/to/file.py:function` or
    `package.module:function`.

    Raises:
        ConfigError: an unknown name, no function, or code that cannot be loaded. The function itself raises
        OracleError where a user's fails.
    """
    if name not in _NAMED and ":" not in name:
        raise ConfigError(
            f"no answers are called {name!r}; {did_you_mean(name, _NAMED)}, or your own as "
            "path/to/file.py:function"
        )
    if name in _NAMED:
        return _NAMED[name]
    function = load_symbol(name)
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
