"""Joins a chat completion that an endpoint streams although it was not asked to: lines with `data:`
(server-sent events), each with a chunk, whose choices have a `delta`."""

import re
from collections.abc import Callable, Iterator
from typing import Any

_DONE = "[DONE]"
_FIELDS = ("data:", "event:", "id:", "retry:")
_TEXTS = ("content", "reasoning_content", "reasoning", "refusal")


def is_stream(text: str) -> bool:
    """Return True if a body is a stream of events."""
    return text.startswith(_FIELDS)


def joined(text: str, decode: Callable[[str, int], tuple[Any, int]]) -> dict[str, Any]:
    """Return a chat completion with the first choice of a stream.

    Args:
        decode: reads JSON at a place of a text, and returns its value and its end.

    Raises:
        ValueError: the stream has no chunk, has ended before its end, or has something else than chunks.
    """
    lines = [line[5:].strip() for line in re.split(r"[\r\n]+", text) if line.startswith("data:")]
    chunks = list(_values("\n".join(line for line in lines if line not in ("", _DONE)), decode))
    found: dict[str, Any] = {}
    choice: dict[str, Any] = {}
    message: dict[str, Any] = {}
    logprobs: list[Any] = []
    for chunk in chunks:
        if not isinstance(chunk, dict):
            raise ValueError("a stream with something else than chunks")
        found |= {name: value for name, value in chunk.items() if value is not None}
        for part in _first(chunk.get("choices")):
            choice |= {name: value for name, value in part.items() if value is not None}
            piece = part.get("delta")
            for name, value in piece.items() if isinstance(piece, dict) else ():
                is_more = name in _TEXTS and isinstance(value, str) and isinstance(message.get(name), str)
                if value is not None:
                    message[name] = message[name] + value if is_more else value
            own = part.get("logprobs")
            tokens = own.get("content") if isinstance(own, dict) else None
            logprobs += tokens if isinstance(tokens, list) else []
    if not chunks or not (choice.get("finish_reason") or _DONE in lines or "error" in found):
        raise ValueError("a stream of events that was cut")
    if isinstance(choice.get("message"), dict):
        return {**found, "choices": [choice]}
    whole = {"logprobs": {"content": logprobs}} if logprobs else {}
    return {**found, "choices": [{**choice, "message": message, **whole}]}


def _values(text: str, decode: Callable[[str, int], tuple[Any, int]]) -> Iterator[Any]:
    """Yield the values of JSON in a text. Each has lines of its own, which may be several."""
    place = 0
    while place < len(text):
        value, end = decode(text, place)
        place = end + 1
        yield value


def _first(choices: Any) -> list[dict[str, Any]]:
    """Return the parts of the first choice in a chunk."""
    sound = [each for each in choices if isinstance(each, dict)] if isinstance(choices, list) else []
    return [each for each in sound if each.get("index") in (0, None)]
