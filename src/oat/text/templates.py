"""The texts of chat templates, in Jinja: the built-in template, a tokenizer's template, or a file."""

import datetime
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from oat.errors import TemplateError, did_you_mean
from oat.files import seen
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
        return seen(template).read_text(encoding="utf-8")
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
