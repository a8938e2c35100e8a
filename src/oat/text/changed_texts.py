"""The texts that a tokenizer changes: what it decodes is not what it encoded."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from oat.errors import TemplateError
from oat.text.encoding import Encoder

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
)
"""Texts that some kinds of tokenizers change: capitals, blanks, line breaks, punctuation, letters with
accents, and characters that a vocabulary may lack."""


def changed_texts(tokenizer: "PreTrainedTokenizerFast") -> Iterator[tuple[str, str]]:
    """Yield each text of `PROBES` that a tokenizer changes, with what becomes of it. A text that the
    tokenizer refuses becomes ""."""
    encoder = Encoder(tokenizer)
    for text in PROBES:
        try:
            ids = encoder.ids(text, adds=False, splits=True)[0]
        except TemplateError:
            yield text, ""
            continue
        decoded = str(tokenizer.decode(ids, clean_up_tokenization_spaces=False))
        if decoded != text:
            yield text, decoded
