"""The rules of GSM8K (arXiv:2110.14168): a response is right if its final number is that of the reference.

Departures from the graders that come with the data set:
1. Numbers are compared by value, exactly: 72, 72.0, $72 and 7.2e1 are equal.
2. The sign U+2212 is a minus too. A minus directly after a letter, a digit or a closing bracket is no sign:
   20-5 ends in 5.
3. A number of more than 100 characters, or with an exponent of more than three digits, equals no number.
4. A comma is part of a number only between two digits.
5. After the last "####", only the number that follows directly counts. The text after this number (a unit, a
   sentence, the /5 of 72/5) is ignored; the graders compare all of the text after "####".
6. The rules return scores only, because a reward function returns only numbers. The graders also return the
   extracted answers (`info: predicted_answers`). `last_number` and `marked_number` extract them from the
   responses in samples.jsonl.

Not handled: fractions (3/4 is two numbers), numbers in words, digits of other scripts.
"""

import re
from collections import deque
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any

from oat.oracles.rules.texts import completion_texts

_MARK = "####"
_MAX_CHARACTERS, _MAX_EXPONENT_DIGITS = 100, 3
_NUMBER = re.compile(
    r"(?:\\?[$€£](?=[-+\u2212]))?(?P<sign>(?<![0-9A-Za-z)\]])[-+\u2212])?(?:\\?[$€£])?"
    r"(?P<digits>[0-9]+(?:,[0-9]+)*(?:\.[0-9]+)?|\.[0-9]+)(?:[eE](?P<exponent>[-+]?[0-9]+))?"
)


def gsm8k(
    prompts: Sequence[Any], completions: Sequence[Any], reference: Sequence[Any], **columns: Any
) -> list[float | None]:
    """Return 1.0 if the last number of a completion equals the reference's number, otherwise 0.0. If the
    reference has no number, there is no reward (None).

    Args:
        completions: texts; for conversations, lists that hold one assistant message.
        reference: a number ("1,234", "$72", "-3.50", 72), or an answer of the data set, with its number after
            "####".
    """
    return _grade(completions, reference, last_number)


def gsm8k_marked(
    prompts: Sequence[Any], completions: Sequence[Any], reference: Sequence[Any], **columns: Any
) -> list[float | None]:
    """The rule `gsm8k`, with one difference: in the completion, only the number directly after the last
    "####" counts."""
    return _grade(completions, reference, marked_number)


def last_number(text: str) -> Decimal | None:
    """Return the last number of a text; None if there is none, or if it is too long."""
    found = deque(_NUMBER.finditer(text), maxlen=1)
    return _value(found[0]) if found else None


def marked_number(text: str) -> Decimal | None:
    """Return the number directly after the last "####"; blanks and a currency sign may come before it. Return
    None if there is no such number, or if it is too long."""
    _, mark, tail = text.rpartition(_MARK)
    found = _NUMBER.match(tail.lstrip()) if mark else None
    return _value(found) if found else None


def _grade(
    completions: Sequence[Any], reference: Sequence[Any], extract: Callable[[str], Decimal | None]
) -> list[float | None]:
    texts = completion_texts(completions)
    rights = [None if answer is None else _reference_number(str(answer)) for answer in reference]
    return [
        None if right is None else float(extract(text) == right)
        for text, right in zip(texts, rights, strict=True)
    ]


def _reference_number(reference: str) -> Decimal | None:
    if _MARK in reference:
        return marked_number(reference)
    found = _NUMBER.fullmatch(reference.strip().removesuffix(".").removesuffix("%"))
    return _value(found) if found else None


def _value(found: re.Match[str]) -> Decimal | None:
    exponent = found["exponent"] or "0"
    if len(found[0]) > _MAX_CHARACTERS or len(exponent.lstrip("+-")) > _MAX_EXPONENT_DIGITS:
        return None
    sign = "-" if found["sign"] in ("-", "\u2212") else ""
    return Decimal(f"{sign}{found['digits'].replace(',', '')}e{exponent}")
