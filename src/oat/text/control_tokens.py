"""Control tokens in data stay ordinary text, so data cannot end a turn or open another.

A template renders messages to one text. Nothing in it tells a control token that the template wrote from one
that a message holds. So control tokens of messages are marked before rendering, with characters that no text
has, and `marked_ids` reads what is marked as ordinary text.
"""

import json
import re
from collections.abc import Iterable
from typing import Any

import numpy as np

from oat.text.encoding import Encoder

_OPEN, _CLOSE = "\ufdd0", "\ufdd1"  # noncharacters of Unicode: no text holds them
_MARKED = re.compile(f"{_OPEN}(.*?){_CLOSE}", re.DOTALL)


def any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """A pattern that finds any of these texts, the longest first; without texts it finds nothing."""
    return re.compile(
        "|".join(re.escape(text) for text in sorted(texts, key=len, reverse=True) if text) or "(?!)"
    )


def marked(value: Any, control: re.Pattern[str]) -> Any:
    """A copy of a value with control tokens marked in every text of it, within lists and dicts too."""
    if isinstance(value, str):
        clean = value.replace(_OPEN, "\ufffd").replace(_CLOSE, "\ufffd")
        return control.sub(lambda match: _OPEN + match[0] + _CLOSE, clean)
    if isinstance(value, dict):
        return {marked(name, control): marked(part, control) for name, part in value.items()}
    return [marked(part, control) for part in value] if isinstance(value, list) else value


def without_json_escapes(text: str) -> str:
    """A text in which marks that a template wrote as JSON in ASCII (`\\ufdd0`) are characters again."""
    for mark in (_OPEN, _CLOSE):
        text = text.replace(json.dumps(mark)[1:-1], mark)
    return text


def marked_ids(encoder: Encoder, text: str) -> np.ndarray:
    """The ids of a text, (T,) int32; what is marked in it is read as ordinary text.

    Raises:
        TemplateError: the tokenizer does not know the text.
    """
    ids: list[int] = []
    for place, piece in enumerate(_MARKED.split(text)):
        piece = piece.replace(_OPEN, "").replace(_CLOSE, "")
        # A control token that is no special one is matched all the same unless it is cut in two.
        for part in (piece[:1], piece[1:]) if place % 2 else (piece,):
            ids += encoder.ids(part, adds=False, splits=bool(place % 2))[0]
    return np.array(ids, dtype=np.int32)
