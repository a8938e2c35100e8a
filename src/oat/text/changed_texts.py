"""The texts that are learned otherwise than the data have them: the tokenizer changes them, or special tokens
in them become ordinary text."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from oat.errors import TemplateError
from oat.text.calls import template_calls
from oat.text.encoding import Encoder
from oat.text.renderer import Renderer
from oat.types import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PROBES = (
    "The sky is blue.",
    " a",
    "a  b",
    "a\n\nb\tc",
    "it's (so) , no!",
    "caf\u00e9 e\u0301",
    "\u5b57",
    "\U0001f33e",
    "a ",
    "a\n\n",
    "    a\n\tb",
    "a\r\nb\rc",
    "a\u00a0\u2009b",
    "\u201ca\u201d \u2018b\u2019 \u2013 c\u2026",
    "\ufb01 \u00bd \uff21 \u2460 \u212b",
    "\ufeffa\u200bb\u200dc",
)
"""Texts that some kinds of tokenizers change: capitals, blanks of all kinds at all places, line breaks,
punctuation, letters with accents, quotation marks, compatibility characters, invisible characters, and
characters that a vocabulary may lack."""


def changed_texts(tokenizer: "PreTrainedTokenizerFast") -> Iterator[tuple[str, str]]:
    """Yield each text of `PROBES` that a tokenizer changes, with what becomes of it. A text that the
    tokenizer refuses becomes "". Further probes are added tokens with white space beside them, if they take
    it away."""
    encoder = Encoder(tokenizer)
    takers = [(f"a  {token}  b", False) for token in encoder.takers()]
    for text, splits in [*((text, True) for text in PROBES), *takers]:
        try:
            ids = encoder.ids(text, adds=False, splits=splits)[0]
        except TemplateError:
            yield text, ""
            continue
        decoded = str(tokenizer.decode(ids, clean_up_tokenization_spaces=False))
        if decoded != text:
            yield text, decoded


def changed_part(
    renderer: Renderer, prompt: Sequence[Message], response: str | Sequence[Mapping[str, Any]] | None
) -> str | None:
    """Return the first content of a record that its ids do not give back; None if they give back all.

    A template may change a content itself; what it writes counts then. White space that the template writes
    around contents does not count.

    Args:
        response: as for `Renderer.recorded`; None: the record has no response.

    Raises:
        TemplateError: the record cannot be rendered.
    """
    messages = _messages(response)
    if response is None:
        ids = renderer.prompt(prompt)
    else:
        ids, _ = renderer.recorded(prompt, response if isinstance(response, str) else [*response])
    written, decoded = renderer.written(prompt, messages), renderer.decode(ids)
    if written in decoded:
        return None
    for content in (message.content for message in (*prompt, *messages)):
        for shown in dict.fromkeys((content, content.strip())):
            if shown and shown in written:
                if written.count(shown) > decoded.count(shown):
                    return content
                break
    return None


def unread_calls(response: str | Sequence[Mapping[str, Any]] | None) -> list[str]:
    """Return what is wrong with the calls of tools in the assistant's texts of a response that
    `oat.environments.tools` would not read."""
    said = [message.content for message in _messages(response) if message.role == "assistant"]
    return [call.fault for content in said for call in template_calls(content) if call.fault]


def made_ordinary(
    renderer: Renderer, prompt: Sequence[Message], response: str | Sequence[Mapping[str, Any]] | None
) -> list[str]:
    """Return the special tokens in a record's messages that are read as ordinary text."""
    messages = [*prompt, *_messages(response)]
    return [token for message in messages for token in renderer.made_ordinary(message)]


def _messages(response: str | Sequence[Mapping[str, Any]] | None) -> list[Message]:
    if response is None:
        return []
    if isinstance(response, str):
        return [Message("assistant", response)]
    return [Message.of(message) for message in response]
