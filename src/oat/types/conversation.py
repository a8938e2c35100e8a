"""Conversations and prompts."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Message:
    """One message of a conversation.

    Attributes:
        fields: further fields of the message in the data (`name`, `tool_calls`, `reasoning_content`,
            `weight`), without those that are null. Chat templates and reward functions get them.
    """

    role: str
    content: str
    fields: dict[str, Any] = field(default_factory=dict, hash=False, repr=False)

    @property
    def plain(self) -> dict[str, Any]:
        """The message as one dict. Chat templates and reward functions get this form."""
        return {"role": self.role, "content": self.content, **self.fields}

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> "Message":
        """Return the message with this `plain` form."""
        return cls(
            plain["role"],
            plain["content"],
            {name: value for name, value in plain.items() if name not in ("role", "content")},
        )

    @property
    def parts(self) -> tuple[Any, ...]:
        """The stored form of the message: the arguments of `Message`, without `fields` if they are empty."""
        return (self.role, self.content, self.fields) if self.fields else (self.role, self.content)


@dataclass(frozen=True)
class Opening:
    """The beginning of a response that its prompt has written already.

    Attributes:
        text: this beginning, such as "<think>\\nOkay, "; "" if the prompt has written none.
        tags: the tags in `text` that it opens and does not close, such as `<think>` or `[THINK]`.
    """

    text: str = ""
    tags: tuple[str, ...] = ()


@dataclass(frozen=True)
class Prompt:
    """One prompt as taken by a run. A record that is taken twice gives two prompts.

    Attributes:
        row: line of the record in its file, from 1.
        occurrence: number of prompts that came before this one, in the run or in an evaluation.
        messages: the raw conversation, which oracles see.
        reference: the reference answer or response, if the data has one.
        columns: every further column of the record, by name.
        is_chat: True if the record has messages instead of a text; reward functions then get messages too.
    """

    row: int
    occurrence: int
    messages: tuple[Message, ...]
    reference: str | None = None
    columns: dict[str, Any] = field(default_factory=dict)
    is_chat: bool = False
