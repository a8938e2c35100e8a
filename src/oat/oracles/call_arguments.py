"""The arguments with which a user's function is called: texts or messages, and the columns of the data."""

import re
from collections.abc import Sequence
from typing import Any

from oat.types import Question

_OF_SHAPES = re.compile(r"raised (TypeError|AttributeError): .*\b(str|string|list|dict)\b", re.DOTALL)


def is_plain(question: Question) -> bool:
    """Return True if the function gets prompt and responses as strings; False if as lists of messages."""
    return not question.is_chat and len(question.messages) == 1 and question.messages[0].role == "user"


def completion_of(question: Question, text: str) -> str | list[dict[str, str]]:
    """Return a response as the function gets it."""
    return text if is_plain(question) else [{"role": "assistant", "content": text}]


def columns_of(asked: Sequence[Question]) -> dict[str, list[Any]]:
    """Return the columns of the data, and the references, with one value for each entry of a call."""
    names = dict.fromkeys(name for question in asked for name in question.columns)
    columns = {name: [question.columns.get(name) for question in asked] for name in names}
    if any(question.reference is not None for question in asked):
        columns["reference"] = [question.reference for question in asked]
    return columns


def is_of_shapes(failure: str) -> bool:
    """Return True if a failure, such as "raised TypeError: string indices must be integers", may be that of a
    function that takes strings for lists of messages, or the other way round."""
    return _OF_SHAPES.match(failure) is not None


def in_shapes(names: Sequence[str], asked: Sequence[Question]) -> str:
    """Say whether arguments of a call were strings or lists of messages, and why.

    Args:
        names: the names of these arguments.
        asked: the question of each entry of the call.
    """
    plain = "strings, as prompts are texts in the data"
    listed = 'lists of messages ({"role": ..., "content": ...}), as prompts are messages in the data'
    kinds = {is_plain(question) for question in asked}
    found = [words for words, kind in ((plain, True), (listed, False)) if kind in kinds]
    return f"its {', '.join(names[:-1])} and {names[-1]} were {', and '.join(found)}"
