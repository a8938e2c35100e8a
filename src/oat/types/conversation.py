"""Conversations and prompts."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Message:
    """One message of a conversation.

    Attributes:
        fields: what the data have beside role and text (`name`, `tool_calls`, `reasoning_content`, `weight`),
            none of it null; templates and reward functions get it.
    """

    role: str
    content: str
    fields: dict[str, Any] = field(default_factory=dict, hash=False, repr=False)

    @property
    def plain(self) -> dict[str, Any]:
        """The form of data, templates and reward functions: one dict."""
        return {"role": self.role, "content": self.content, **self.fields}

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> "Message":
        """The message that has this `plain` form."""
        return cls(
            plain["role"],
            plain["content"],
            {name: value for name, value in plain.items() if name not in ("role", "content")},
        )

    @property
    def parts(self) -> tuple[Any, ...]:
        """The form in which it is stored: arguments of `Message`, without empty `fields`."""
        return (self.role, self.content, self.fields) if self.fields else (self.role, self.content)


@dataclass(frozen=True)
class Prompt:
    """One prompt as taken by a run.

    Attributes:
        row: line of the record in its file, from 1.
        occurrence: prompts that the run had taken before this one; the same record taken twice has two
        occurrences.
        messages: the raw conversation, which oracles see.
        reference: the reference answer or response, if the data has one.
        columns: every further column of the record, by name.
        is_chat: the data have messages, so reward functions get messages too.
    """

    row: int
    occurrence: int
    messages: tuple[Message, ...]
    reference: str | None = None
    columns: dict[str, Any] = field(default_factory=dict)
    is_chat: bool = False
