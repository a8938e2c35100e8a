"""Chat templates with a tokenizer: conversations are rendered to text, and the text is turned into ids."""

import json
import re
from collections.abc import Collection, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from oat.errors import TemplateError, described, shortened
from oat.text.control_tokens import any_of, has_marks, is_own, marked, pieces_of, without_json_escapes
from oat.text.joining import Joiner
from oat.text.recorded_calls import CallStyle, check_calls, check_read_back, probe_message, study_calls
from oat.types import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

USER = Message("user", "oatuser")
"""A stand-in for the user's message, where only the rendered response is used."""
RESPONSE = Message("assistant", "oatassistant")
"""A stand-in for a response, for renderings of which only the text around the response is used."""
_REASONING = ("reasoning_content", "reasoning", "thinking")
"""Fields of an assistant's message that have its reasoning."""


class ChatTemplate:
    """A renderer of conversations with one template and one tokenizer. Before `set_control`, the control
    tokens are the tokenizer's special tokens.

    Args:
        source: the template's text, with the date written into it.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerFast", joiner: Joiner, source: str):
        self.tokenizer = tokenizer
        self.joiner = joiner
        self.source = source
        self._read_back: set[str] = set()
        self._written: dict[tuple[str, bool], bool] = {}
        self.set_control(special_tokens(tokenizer))

    def set_control(self, tokens: Collection[str], ends: str = "") -> None:
        """Set the control tokens. In messages, they become ordinary text.

        Args:
            ends: the texts that the template writes behind a response. The tokens in them are not own tokens
                (`is_own`).
        """
        self._control = any_of(tokens)
        self._control_but_own = any_of(token for token in tokens if not is_own(token) or token in ends)

    def content(self, message: Message) -> str:
        """Return the content of a message. Its control tokens are marked, so that they become ordinary text.
        In an assistant's message, and in a system message, which may ask for them, those of `is_own` are not
        marked."""
        content: str = marked(message.content, self._control_of(message))
        return content

    def made_ordinary(self, message: Message) -> list[str]:
        """Return the control tokens in the content of a message that `content` marks."""
        return [*self._control_of(message).findall(message.content)]

    def _control_of(self, message: Message) -> re.Pattern[str]:
        return self._control_but_own if message.role in ("assistant", "system") else self._control

    def written(self, messages: Sequence[Message]) -> str:
        """Return the text of a complete conversation without marks."""
        return "".join(piece for piece, _ in pieces_of(self.render(messages, generate=False)))

    def render(self, messages: Sequence[Message], *, generate: bool) -> str:
        """Return the text of a conversation, with the control tokens of its messages marked.

        Args:
            generate: True ends the text with the generation prompt.

        Raises:
            TemplateError: the template fails; it leaves out a call of a tool; a call cannot be rendered, or
                not so that it is read back.
        """
        conversation = [
            {**marked(message.fields, self._control), "role": message.role, "content": self.content(message)}
            for message in messages
        ]
        if not any(message.fields.get("tool_calls") for message in messages):
            return self._rendered(conversation, generate=generate)
        put = [self.calls.put(message) for message in conversation]
        text = self._rendered(put, generate=generate)
        if "tool_calls" in self.source:
            check_calls(put, text, lambda renamed: self._rendered(renamed, generate=generate))
            for calls in filter(None, (message.fields.get("tool_calls") for message in messages)):
                self._check_read_back(calls)
        return text

    def _check_read_back(self, calls: list[Any]) -> None:
        key = json.dumps(calls, default=repr)
        if key not in self._read_back:
            # no marks: what is written here is what a response will have as text
            check_read_back(calls, self.calls, lambda messages: self._rendered(messages, generate=False))
            self._read_back = {*islice(self._read_back, 100), key}  # a record is rendered several times

    @cached_property
    def calls(self) -> CallStyle:
        """How the template takes the calls of a message."""
        return study_calls(lambda messages: self._rendered(messages, generate=False))

    def _rendered(self, conversation: Sequence[dict[str, Any]], *, generate: bool) -> str:
        try:
            text = self.tokenizer.apply_chat_template(
                conversation, chat_template=self.source, tokenize=False, add_generation_prompt=generate
            )
        except Exception as error:  # a template is a program and may raise any error
            roles = shortened(", ".join(message["role"] for message in conversation), 200)
            raise TemplateError(
                f"the chat template cannot render a conversation of {roles} ({described(error)}); choose "
                "another template or change the roles"
            ) from error
        if "tojson" in self.source and any(map(has_marks, conversation)):
            return without_json_escapes(str(text))
        return str(text)

    def reads(self, field: str, *, beside_calls: bool = False) -> bool:
        """Return True if the template names a field of messages, such as `tool_calls`. If the field has
        reasoning, the template must also write it for a response at the end of a conversation.

        Args:
            beside_calls: True: the message has calls of tools.
        """
        is_named = re.search(rf"\b{re.escape(field)}\b", self.source) is not None
        if not is_named or field not in _REASONING:
            return is_named
        known = self._written.get((field, beside_calls))
        if known is not None:
            return known
        plain, text = probe_message() if beside_calls else RESPONSE.plain, "oatfield"
        with suppress(TemplateError):
            text = self.render([USER, Message.of({**plain, field: "oatfield"})], generate=False)
        return self._written.setdefault((field, beside_calls), "oatfield" in text)

    def behind_response(self, messages: Sequence[Message] = (), *, generate: bool) -> str:
        """Return the text that follows a response: the end of its turn, then `messages`.

        Args:
            generate: True ends the text with the generation prompt.

        Raises:
            TemplateError: the template fails, or leaves the response out.
        """
        text = self.render([USER, RESPONSE, *messages], generate=generate)
        head, found, tail = text.partition(RESPONSE.content)
        if not found:
            raise TemplateError(
                f"the chat template leaves out an assistant's message (it renders {head[-80:]!r}); choose "
                "one that keeps it"
            )
        return tail

    def ids(self, text: str) -> np.ndarray:
        """Return the ids of rendered text, (T,) int32."""
        return self.joiner.marked(text)


def special_tokens(tokenizer: "PreTrainedTokenizerFast") -> set[str]:
    """Return the texts of a tokenizer's special tokens."""
    return {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
