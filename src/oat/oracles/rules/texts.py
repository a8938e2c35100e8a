"""What reward functions get, as texts and messages."""

from collections.abc import Sequence
from typing import Any

from oat.types import Message


def completion_texts(completions: Sequence[Any]) -> list[str]:
    """Return the texts of completions, each of which is a text or a list with one assistant message."""
    return [each if isinstance(each, str) else each[-1]["content"] for each in completions]


def prompt_messages(prompt: Any) -> list[Message]:
    """Return the messages of a prompt, which is a text or a list of messages."""
    return [Message("user", prompt)] if isinstance(prompt, str) else [Message.of(each) for each in prompt]
