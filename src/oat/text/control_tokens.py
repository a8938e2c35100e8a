"""Control tokens in data stay ordinary text, so data cannot end a turn or open another.

A template renders messages to one text. In this text, a control token that the template wrote looks like one
that was in a message. So the control tokens of messages are marked before rendering, by a character before
and one after, and `marked_ids` reads marked text as ordinary text. A message that contains one of the two
characters gets U+FFFD in its place.
"""

import json
import re
from collections.abc import Iterable
from typing import Any

import numpy as np

from oat.text.encoding import Encoder

_OPEN, _CLOSE = "\ufdd0", "\ufdd1"  # noncharacters of Unicode, which texts should not contain
_MARKED = re.compile(f"{_OPEN}(.*?){_CLOSE}", re.DOTALL)


def any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern that finds any of these texts. If several match at one place, it finds the longest.
    Without texts it finds nothing."""
    return re.compile(
        "|".join(re.escape(text) for text in sorted(texts, key=len, reverse=True) if text) or "(?!)"
    )


def marked(value: Any, control: re.Pattern[str]) -> Any:
    """Return a copy of a value in which control tokens are marked in every string, also within lists and
    dicts. The characters that mark are replaced by U+FFFD if a string contains them."""
    if isinstance(value, str):
        clean = value.replace(_OPEN, "\ufffd").replace(_CLOSE, "\ufffd")
        return control.sub(lambda match: _OPEN + match[0] + _CLOSE, clean)
    if isinstance(value, dict):
        return {marked(name, control): marked(part, control) for name, part in value.items()}
    return [marked(part, control) for part in value] if isinstance(value, list) else value


def without_json_escapes(text: str) -> str:
    """Return a text with the marking characters restored where a template wrote them as escapes of JSON
    (`\\ufdd0`)."""
    for mark in (_OPEN, _CLOSE):
        text = text.replace(json.dumps(mark)[1:-1], mark)
    return text


def marked_ids(encoder: Encoder, text: str) -> np.ndarray:
    """Return the ids of a text, (T,) int32. Its marked parts are read as ordinary text.

    Raises:
        TemplateError: the tokenizer does not know the text.
    """
    ids: list[int] = []
    for place, piece in enumerate(_MARKED.split(text)):
        piece = piece.replace(_OPEN, "").replace(_CLOSE, "")
        # `splits` affects special tokens only, so a marked token is also cut in two
        for part in (piece[:1], piece[1:]) if place % 2 else (piece,):
            ids += encoder.ids(part, adds=False, splits=bool(place % 2))[0]
    return np.array(ids, dtype=np.int32)
