"""Calls into other processes, and their replies, as bytes of `wire.py`. Groups travel as the bytes of a round
(`blobs.py`), which is several times faster."""

import traceback
from collections.abc import Callable, Sequence
from typing import Any

from oat import blobs, errors, wire
from oat.errors import ActorError, OatError, warn
from oat.types import Group


def call_of(name: str, *arguments: Any) -> bytes:
    """Return a call as bytes.

    Raises:
        WireError: an argument cannot be encoded.
    """
    return wire.encode((name, [_sent(argument) for argument in arguments]))


def parts_of(name: str, *arguments: Any) -> list[bytes | memoryview]:
    """Return a call as parts (`wire.encode_parts`). Large tensors in it are not copied, and are read where
    they arrive.

    Raises:
        WireError: an argument cannot be encoded.
    """
    return wire.encode_parts((name, [_sent(argument) for argument in arguments]))


def answered(
    do: Callable[[str, Sequence[Any]], Any], data: bytes | memoryview, warnings: Sequence[str] = ()
) -> list[bytes | memoryview]:
    """Do what a call asks, and return the reply as parts (`wire.encode_parts`): large tensors in it are not
    copied.

    Args:
        do: function that is called with a name and its arguments.
        warnings: what was warned of; read after the call.

    Returns:
        The encoded result, or the encoded error, beside the warnings.
    """
    try:
        name, arguments = wire.decode(data)
        value = _sent(do(name, [_arrived(each) for each in arguments]))
        return wire.encode_parts({"value": value, "warnings": list(warnings)})
    except OatError as error:
        kind, text = type(error).__name__, str(error)
    except Exception as error:
        traceback.print_exc()
        kind, text = ActorError.__name__, f"{type(error).__name__}: {error}"
    return [wire.encode({"error": kind, "text": text, "warnings": list(warnings)})]


def value_of(reply: bytes | memoryview, who: str) -> Any:
    """Return the result that a reply has. Repeat its warnings here.

    Args:
        who: the process that replied, for messages.

    Raises:
        OatError: the call raised one there.
    """
    found = wire.decode(reply)
    for text in found["warnings"]:
        warn(f"{who}: {text}")
    if "error" not in found:
        return _arrived(found["value"])
    error = getattr(errors, found["error"], OatError)
    raise error.__new__(error, f"{who}: {found['text']}")


def _sent(value: Any) -> tuple[str, Any]:
    if isinstance(value, list | tuple) and value and all(isinstance(each, Group) for each in value):
        return "groups", blobs.pack(value, with_features=True)
    return "value", value


def _arrived(value: tuple[str, Any]) -> Any:
    kind, content = value
    return blobs.unpack(content) if kind == "groups" else content
