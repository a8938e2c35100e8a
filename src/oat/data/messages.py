"""Reads the messages of records: {"role", "content"} or ShareGPT's {"from", "value"}, with contents as text
or as a list of parts, and with further fields."""

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from itertools import islice, pairwise
from typing import Any

from oat.errors import DataError, did_you_mean, warn
from oat.types import Message

ROLES = ("system", "developer", "user", "assistant", "tool")
_SHAREGPT = {
    "human": "user",
    "gpt": "assistant",
    "observation": "tool",
    "function_call": "assistant",
    **{role: role for role in ROLES},
}
OWN_FIELDS = frozenset({"role", "content", "from", "value"})
"""Names of the fields that hold a message's role and text."""
_INSTEAD = ("tool_calls", "reasoning_content", "reasoning", "thinking")
"""Fields of an assistant's message that make its text optional."""
KINDS = {
    dict: "an object",
    list: "a list",
    str: "a string",
    bool: "true or false",
    int: "a number",
    float: "a number",
    type(None): "null",
}


def as_prompt(value: Any, where: str) -> tuple[Message, ...]:
    """Return the messages of a prompt. A string is one user message.

    Raises:
        DataError: the value is neither a string nor a list of messages, a message is malformed, or the last
            message is not a user's or a tool's.
    """
    return ending(
        conversation_of([{"role": "user", "content": value}] if isinstance(value, str) else value, where),
        where,
    )


def conversation_of(value: Any, where: str) -> tuple[Message, ...]:
    """Return the messages of a list, without empty system messages.

    Raises:
        DataError: the value is no list, holds no message, or one of its messages is malformed.
    """
    if not isinstance(value, list):
        raise DataError(
            f"{where}: expected a string or a list of messages, got {kind_of(value)}; write the prompt as "
            "text"
        )
    if not value:
        raise DataError(
            f"{where}: expected a prompt, got an empty list; write at least one message or remove the record"
        )
    messages = tuple(
        _message(entry, f"{where}, message {number}")
        for number, entry in enumerate(value, start=1)
        if not _is_empty_system(entry)
    )
    if not messages:
        raise DataError(
            f"{where}: expected a prompt, got nothing but an empty system message; write at least one "
            "message or remove the record"
        )
    return messages


def with_system(messages: tuple[Message, ...], text: Any) -> tuple[Message, ...]:
    """Return the messages of a prompt behind a system message, if they have none.

    Args:
        text: the text of the system message; anything but a text with a visible character is none.
    """
    has_one = any(message.role in ("system", "developer") for message in messages)
    if has_one or not isinstance(text, str) or not text.strip():
        return messages
    return (Message("system", text), *messages)


def first_learned(messages: tuple[Message, ...]) -> int:
    """Return the index of the first message that is learned: an assistant's message of weight 1 (the default)
    directly after a user's or a tool's message. If no message is learned, return the index of the last
    message."""
    answers = (
        n
        for n in range(1, len(messages))
        if messages[n].role == "assistant" and messages[n - 1].role in ("user", "tool")
    )
    return next((number for number in answers if messages[number].fields.get("weight", 1)), len(messages) - 1)


def _is_empty_system(entry: Any) -> bool:
    """Return True if an entry is a system message without text. Some tables store one in every
    conversation that has no system message."""
    if role_of(entry) != "system":
        return False
    text = entry.get("value" if entry.get("from") is not None else "content", "?")
    return text is None or (isinstance(text, str) and not text.strip())


def ending(messages: tuple[Message, ...], where: str) -> tuple[Message, ...]:
    """Check that a prompt ends with a user's or a tool's message, and return its messages.

    Raises:
        DataError: there is no message, or the last message has another role.
    """
    last = messages[-1].role if messages else "none"
    if last not in ("user", "tool"):
        raise DataError(
            f"{where}: expected the last message from user or tool, got {last}; end the prompt with what "
            "is to be answered"
        )
    return messages


def response_of(value: Any, prompt: tuple[Message, ...], where: str) -> str | list[dict[str, Any]]:
    """Return a response as text, or as a list of messages that begins and ends with an assistant's message.
    If the response begins with the prompt's messages, these are removed.

    A response may be an empty text, or one empty message.

    Raises:
        DataError: a message is malformed; one of several messages is empty; all of the assistant's messages
            have weight 0; or two of the assistant's messages follow each other.
    """
    if isinstance(value, str):
        return value
    messages = messages_of(value, prompt, where)
    if len(messages) == 1 and not messages[0].fields:
        return [messages[0].plain]
    if not all(
        message.content.strip() or message.role == "tool" or _says_otherwise(message.fields)
        for message in messages
    ):
        raise DataError(f"{where}: expected text in every message of a response, got none; remove the record")
    if not any(message.fields.get("weight", 1) for message in messages if message.role == "assistant"):
        raise DataError(
            f"{where}: expected a message of weight 1, got weight 0 on all of the assistant's; remove the "
            "record, or the weights"
        )
    if any(first.role == second.role == "assistant" for first, second in pairwise(messages)):
        raise DataError(
            f"{where}: expected that somebody answers the assistant, got two of its messages in a row; "
            "join them"
        )
    return [message.plain for message in messages]


def messages_of(value: Any, prompt: tuple[Message, ...], where: str) -> tuple[Message, ...]:
    """Return the messages of a response. `value` is one message or a list of messages. If the list begins
    with the prompt's messages, these are removed.

    Raises:
        DataError: a message is malformed, or the first or last message of the result is not the assistant's.
    """
    messages = conversation_of([value] if isinstance(value, dict) else value, where)
    messages = messages[len(prompt) :] if messages[: len(prompt)] == prompt else messages
    if not messages or messages[0].role != "assistant" or messages[-1].role != "assistant":
        got = ", ".join(message.role for message in messages) or "the prompt alone"
        raise DataError(
            f"{where}: expected a response, or messages that end with an assistant's, got {got}; name "
            "another column"
        )
    return messages


def _message(entry: Any, where: str) -> Message:
    """Return an entry as a message. A field that is null counts as missing, because tables store a missing
    field as null."""
    keys = (
        ("from", "value")
        if isinstance(entry, dict) and entry.get("from") is not None
        else ("role", "content")
    )
    given = _without_null(entry) if isinstance(entry, dict) else {}
    _say_null_arguments(given.get("tool_calls"), entry)
    fields = {name: value for name, value in given.items() if name not in keys}
    role = role_of(entry)
    needs_no_text = role == "assistant" and _says_otherwise(fields)
    if (
        not isinstance(entry, dict)
        or keys[0] not in entry
        or (keys[1] not in entry and not needs_no_text)
        or fields.keys() & OWN_FIELDS
    ):
        got = f"the fields {listed(entry)}" if isinstance(entry, dict) else kind_of(entry)
        raise DataError(
            f'{where}: expected {{"role": ..., "content": ...}}, got {got}; write role and text in these '
            "two fields"
        )
    if role is None:
        valid = ROLES if keys[0] == "role" else _SHAREGPT
        found = entry[keys[0]]
        raise DataError(
            f"{where}: expected a role, got {repr(found)[:80]}; {did_you_mean(str(found)[:80], valid)}"
        )
    content = "" if needs_no_text and entry.get(keys[1]) is None else _text(entry[keys[1]], where)
    if entry[keys[0]] == "function_call" and not needs_no_text:
        content, fields = "", {**fields, "tool_calls": _calls_of(content, where)}
    if not content.strip() and role not in ("assistant", "tool"):
        raise DataError(
            f"{where}: expected text, got an empty message; write the prompt or remove the record"
        )
    weight = fields.get("weight", 0)
    if weight not in (0, 1) or (weight and role != "assistant"):
        raise DataError(
            f"{where}: expected weight 0, or 1 on an assistant's message, got {repr(weight)[:40]} on "
            f"{role}'s; remove it"
        )
    return Message(role, content, fields)


def _calls_of(text: str, where: str) -> list[dict[str, Any]]:
    """Return the calls of tools in the text of ShareGPT's `function_call`: the JSON of one, or of a list."""
    with suppress(ValueError, RecursionError):
        found = json.loads(text)
        calls = found if isinstance(found, list) else [found]
        if calls and all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls):
            return [{"type": "function", "function": call} for call in calls]
    raise DataError(
        f'{where}: expected the JSON of a call as value of `function_call`, {{"name": ..., "arguments": '
        f"{{...}}}}, or of a list of calls, got {repr(text)[:80]}; repair it, or write `gpt` as its role if "
        "it is to be learned as text"
    )


def _say_null_arguments(calls: Any, entry: Any) -> None:
    """Warn if a call of a message has other arguments without their null fields."""
    if not isinstance(calls, list):
        return
    for call, stored in zip(calls, (each for each in entry["tool_calls"] if each is not None), strict=False):
        pair = [each.get("function", each) if isinstance(each, dict) else {} for each in (call, stored)]
        ours, theirs = [each.get("arguments") if isinstance(each, dict) else None for each in pair]
        if isinstance(theirs, dict) and ours != theirs:
            warn(
                "calls of tools have arguments that are null, and null counts as missing, since tables store "
                "it for each field that a record lacks; to keep null, give the arguments as JSON text"
            )
            return


def _says_otherwise(fields: Mapping[str, Any]) -> bool:
    """Return True if an assistant's message with these fields needs no text: one of them holds tool calls or
    reasoning."""
    return any(fields.get(name) for name in _INSTEAD)


def _text(content: Any, where: str) -> str:
    """Return the content of a message as text. The texts of several parts are joined without a separator."""
    if isinstance(content, list):
        return "".join(_part(part, f"{where}, part {number}") for number, part in enumerate(content, start=1))
    if not isinstance(content, str):
        raise DataError(
            f"{where}: expected a string as content, got {kind_of(content)}; write the message as text"
        )
    return content


def _part(part: Any, where: str) -> str:
    given = _without_null(part)
    if (
        not isinstance(given, dict)
        or given.keys() != {"type", "text"}
        or given["type"] != "text"
        or not isinstance(given["text"], str)
    ):
        kind = given.get("type") if isinstance(given, dict) else None
        got = f"a part of the type {repr(kind)[:40]}" if kind not in (None, "text") else kind_of(part)
        raise DataError(
            f'{where}: expected {{"type": "text", "text": ...}}, got {got}; only text is read: remove the '
            "part, or the record"
        )
    return given["text"]


def _without_null(value: Any) -> Any:
    """Return a value without its null fields, at every depth. Tables store missing fields as null."""
    if isinstance(value, dict):
        return {name: _without_null(part) for name, part in value.items() if part is not None}
    return [_without_null(part) for part in value] if isinstance(value, list) else value


def role_of(entry: Any) -> str | None:
    """Return the role of a message, or None if it has no known role."""
    if not isinstance(entry, dict):
        return None
    sender = entry.get("from")
    name = entry.get("role") if sender is None else _SHAREGPT.get(sender) if isinstance(sender, str) else None
    return name if isinstance(name, str) and name in ROLES else None


def is_conversation(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(entry, dict) for entry in value)


def listed(names: Iterable[str]) -> str:
    """Return the first 20 names as text for a message. A name longer than 80 characters is shortened."""
    return ", ".join(repr(name)[:80] for name in islice(names, 20)) or "none"


def kind_of(value: Any) -> str:
    return KINDS.get(type(value), f"a value of the type {type(value).__name__}")
