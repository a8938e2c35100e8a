"""Functions that turn control tokens in messages into ordinary text, so data cannot end or begin a turn.

A template renders messages to one text. In this text, a control token from the template cannot be told from a
control token in a message. So the control tokens in messages are marked before rendering: one special
character is put before the token, and another after it. `Joiner.marked` reads marked text as ordinary text.
If a message itself contains one of the two characters, the character is replaced by U+FFFD.
"""

import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

_OPEN, _CLOSE = "\ufdd0", "\ufdd1"  # Unicode's noncharacters, which texts should not contain
_MARKED = re.compile(f"{_OPEN}(.*?){_CLOSE}", re.DOTALL)


_NAMESPACE = re.compile(r"^(?!system|user|assistant|tool)[a-z]\w*:(?=\w)")
_THOUGHTS = frozenset(
    {
        "think",
        "thinking",
        "thought",
        "thoughts",
        "reason",
        "reasoning",
        "reflection",
        "cot",
        "scratchpad",
        "toolcall",
        "toolcalls",
    }
)
_ANSWERS = frozenset({"answer", "solution", "action"})
_CALLS, _TOOLS = frozenset({"call", "calls"}), frozenset({"tool", "tools", "function", "functions"})
_BOUNDS = frozenset({"begin", "start", "end"})
_BESIDE = frozenset(
    {"of", "section", "sep", "arg", "args", "argument", "arguments", "name", "id", "budget", "reflect"}
)
_OWN = frozenset(
    {
        "[ARGS]",
        "[CALL_ID]",
        "<|python_tag|>",
        "<answer>",
        "</answer>",
        "<arg_key>",
        "</arg_key>",
        "<arg_value>",
        "</arg_value>",
    }
)


def is_own(token: str) -> bool:
    """Return True for a control token that a model writes within its turn: a tag around its reasoning, its
    answer or a call of a tool, or one of a few published tokens.

    Such a tag (`<think>`, `[/THINK]`, `<|begin_of_thought|>`, `<seed:think>`) consists only of words of
    these things. A token with any other word, such as `user`, `result`, `response` or `turn`, may begin or
    end a turn. So may `<|call|>` and `<|answer|>`, which do not name a tool or a boundary.
    """
    inner = re.fullmatch(r"[<\[\u25c1](.+)[>\]\u25b7]", token)
    if token in _OWN or inner is None:
        return token in _OWN
    name = _NAMESPACE.sub("", inner[1].strip("|\uff5c/").lower())
    words = set(re.findall(r"[^\W_]+", name.replace("\u2581", " ")))
    is_named = bool(
        words & _THOUGHTS
        or (words & _CALLS and words & _TOOLS)
        or (words & _ANSWERS and words & _BOUNDS)
        or words == {"tool", "sep"}
    )
    return is_named and words <= _THOUGHTS | _ANSWERS | _CALLS | _TOOLS | _BOUNDS | _BESIDE


def any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern that finds each of the texts. If several texts match at one place, it finds the
    longest. If `texts` is empty, it finds nothing."""
    return re.compile(
        "|".join(re.escape(text) for text in sorted(texts, key=len, reverse=True) if text) or "(?!)"
    )


def marked(value: Any, control: re.Pattern[str]) -> Any:
    """Return a copy of a value with the control tokens marked in every string, also within lists and dicts.
    If a string contains one of the marking characters, the character is replaced by U+FFFD."""
    if isinstance(value, str):
        clean = value.replace(_OPEN, "\ufffd").replace(_CLOSE, "\ufffd")
        return control.sub(lambda match: _OPEN + match[0] + _CLOSE, clean)
    if isinstance(value, dict):
        return {marked(name, control): marked(part, control) for name, part in value.items()}
    return [marked(part, control) for part in value] if isinstance(value, list) else value


def has_marks(value: Any) -> bool:
    """Return True if `marked` has marked a control token in a value."""
    if isinstance(value, str):
        return _OPEN in value
    if isinstance(value, dict):
        return any(has_marks(name) or has_marks(part) for name, part in value.items())
    return isinstance(value, list) and any(map(has_marks, value))


def without_json_escapes(text: str) -> str:
    """Return the text with the JSON escapes of the marking characters, such as `\\ufdd0`, replaced by these
    characters."""
    for mark in (_OPEN, _CLOSE):
        text = text.replace(json.dumps(mark)[1:-1], mark)
    return text


def pieces_of(text: str) -> Iterator[tuple[str, bool]]:
    """Yield the pieces of a text in which `marked` has marked control tokens, at least one. Each piece is
    ordinary text, which may be empty and may have control tokens of a template; or, with True, a marked
    control token."""
    for place, piece in enumerate(_MARKED.split(text)):
        yield piece.replace(_OPEN, "").replace(_CLOSE, ""), bool(place % 2)
