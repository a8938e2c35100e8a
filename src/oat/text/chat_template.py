"""Chat templates with a tokenizer: conversations are rendered to text, and the text is turned into ids.

The texts of chat templates, in Jinja: the built-in template, a tokenizer's template, or a file.
"""

import datetime
import json
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from oat.errors import TemplateError, described, did_you_mean, shortened, shown, warn
from oat.files import absolute
from oat.text.control_tokens import any_of, has_marks, is_own, marked, pieces_of, without_json_escapes
from oat.text.joining import Joiner
from oat.text.recorded_calls import CallStyle, check_calls, check_read_back, probe_message, study_calls
from oat.types import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


_DATE = re.compile(r"""\bstrftime_now\(\s*(?:"([^"]*)"|'([^']*)')\s*\)""")

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""Template of ChatML (OpenAI, 2023; the format of Qwen and others), without a default system prompt."""

CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")
"""Texts that a tokenizer must encode as single tokens if it is used with ChatML."""


def reads_date(template: str, tokenizer: "PreTrainedTokenizerFast") -> bool:
    """Return True if a template writes the current date into the text that it renders.

    Args:
        template: "chatml", "tokenizer" or the path of a .jinja file.

    Raises:
        TemplateError: the template is missing.
    """
    return _DATE.search(load_template(template, tokenizer)) is not None


def load_template(template: str, tokenizer: "PreTrainedTokenizerFast") -> str:
    """Return the text of a template.

    Args:
        template: "chatml", "tokenizer" for the tokenizer's template, or the path of a .jinja file.

    Raises:
        TemplateError: there is no such template, or its file cannot be read.
    """
    if template == "chatml":
        return CHATML
    if template == "tokenizer":
        try:
            return str(tokenizer.get_chat_template())
        except ValueError as error:
            found = tokenizer.chat_template
            names = list(found) if isinstance(found, Mapping) else []
            if names:
                raise TemplateError(
                    f"the tokenizer has several chat templates ({', '.join(names)}), and none is called "
                    "`default`; write one of them to a .jinja file, and set `render.template` to that file"
                ) from error
            raise TemplateError(
                f"the tokenizer has no chat template; {proposal(tokenizer)}, or leave it out for plain "
                "prompts"
            ) from error
    if not template.endswith(".jinja"):
        raise TemplateError(
            f"no template is called {template!r}; {did_you_mean(template, ('chatml', 'tokenizer'))}, or "
            "the path of a .jinja file"
        )
    try:
        return absolute(template).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TemplateError(
            f"cannot read the template {template} ({error}); give the path of a .jinja file in UTF-8"
        ) from error


def has_template(tokenizer: "PreTrainedTokenizerFast") -> bool:
    """Return True if a tokenizer has a chat template that `load_template` can return: the only one, or the
    one of several that is called `default`."""
    found = tokenizer.chat_template
    return bool(found.get("default") if isinstance(found, Mapping) else found)


def on_day(template: str, date: datetime.date) -> str:
    """Return the template with each call of `strftime_now("...")` replaced by the given date. In an
    unchanged template, transformers would use the present time.

    Raises:
        TemplateError: a call of `strftime_now` has an argument that is not a string literal.
    """
    source = _DATE.sub(lambda match: repr(date.strftime(match[1] or match[2] or "")), template)
    if re.search(r"\bstrftime_now\s*\(", source):
        raise TemplateError(
            "the chat template computes the format of its date; write the format into it, as in "
            'strftime_now("%d %b %Y")'
        )
    return source


def check_chatml(tokenizer: "PreTrainedTokenizerFast") -> None:
    """Check that each token of the ChatML template is one token of a tokenizer.

    Raises:
        TemplateError: one is none.
    """
    for token in CHATML_TOKENS:
        if len(tokenizer(token, add_special_tokens=False)["input_ids"]) != 1:
            raise TemplateError(
                f"the chatml template needs {token} as one token, and this tokenizer has none; add it "
                f"to the tokenizer and the model, or {proposal(tokenizer)}"
            )


def proposal(tokenizer: "PreTrainedTokenizerFast") -> str:
    """Return advice for an error message. It names the templates that can work with a tokenizer."""
    ours = [
        *(["tokenizer"] if has_template(tokenizer) else []),
        *(["chatml"] if {*CHATML_TOKENS} <= tokenizer.added_tokens_encoder.keys() else []),
    ]
    last = "a .jinja file that ends turns with {{ eos_token }}" if tokenizer.eos_token else "a .jinja file"
    return f'set `render.template` to {" or ".join([*ours, last])} (docs/data.md, "Chat templates")'


def plain_prompt(messages: Sequence[Message], tokenizer: "PreTrainedTokenizerFast") -> str:
    """Return the text of a prompt that has no template.

    Raises:
        TemplateError: it is more than one message of a user.
    """
    if len(messages) != 1 or messages[0].role != "user":
        roles = ", ".join(message.role for message in messages) or "nothing"
        raise TemplateError(f"a conversation of {roles} needs a chat template; {proposal(tokenizer)}")
    return messages[0].content


USER = Message("user", "oatuser")
"""A stand-in for the user's message, where only the rendered response is used."""
RESPONSE = Message("assistant", "oatassistant")
"""A stand-in for a response, for renderings of which only the text around the response is used."""
_INSTEAD = {
    "developer": "give it the role system",
    "system": "put its text into one system message at the beginning, or into a message of the user",
    "tool": "give it the role user",
    "function": "give it the role tool",
    "ipython": "give it the role tool",
}
"""What to do with a message that a template leaves out, by its role."""
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
        self._complete: set[tuple[Any, ...]] = set()
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
        """Return the text of a conversation without marks.

        Raises:
            TemplateError: an error of `complete`.
        """
        return "".join(piece for piece, _ in pieces_of(self.complete(messages, generate=False)))

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

    def complete(self, messages: Sequence[Message], *, generate: bool) -> str:
        """Return the text of a conversation, as `render` does, if something of each message's content is in
        it. The thoughts of earlier responses may be left out; of a text beside calls, a warning says so.

        To find out, the conversation is rendered with other contents, which stand nowhere else. This is done
        once for each sequence of roles and fields.

        Raises:
            TemplateError: an error of `render`; or the template writes nothing of a message's content.
        """
        shape = (generate, *map(_shape, messages))
        if shape not in self._complete:
            for place in self._left_out(messages, generate=generate):
                role = messages[place].role
                if messages[place].fields.get("tool_calls") and "tool_calls" in self.source:
                    warn(
                        "the chat template writes nothing of the text beside the calls of a message; where "
                        "it matters, choose another template"
                    )
                    continue
                raise TemplateError(
                    f"the chat template writes nothing of the message {shown(messages[place].content, 60)}, "
                    f"which has the role {role}; {_INSTEAD.get(role, 'give it another role')}, or choose "
                    "another template"
                )
            self._complete.add(shape)
        return self.render(messages, generate=generate)

    def _left_out(self, messages: Sequence[Message], *, generate: bool) -> list[int]:
        """Return the places of the messages whose content a template leaves out, whatever the content."""
        names = [f"oatmessage{place}x" * bool(each.content.strip()) for place, each in enumerate(messages)]
        named = [replace(each, content=name) for each, name in zip(messages, names, strict=True)]
        try:
            text = self.render(named, generate=generate).lower()
        except TemplateError:  # it may take other contents than its own as a fault
            return []
        return [place for place, name in enumerate(names) if name not in text]

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
            TemplateError: the template fails, or leaves the response or one of `messages` out.
        """
        write = self.complete if messages else self.render
        text = write([USER, RESPONSE, *messages], generate=generate)
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


def _shape(message: Message) -> tuple[Any, ...]:
    """Return what a template may look at in a message besides its texts."""
    return message.role, not message.content.strip(), *sorted(filter(message.fields.get, message.fields))


def special_tokens(tokenizer: "PreTrainedTokenizerFast") -> set[str]:
    """Return the texts of a tokenizer's special tokens."""
    return {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
