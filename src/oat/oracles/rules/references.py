"""The text of a reference answer. Data give it as a text or as a number. In a Parquet file, a column of whole
numbers with a missing value has floats, such as 42.0.

`prompts.reference_key` gives the rules each number as the text that Python writes for it. So a text that
Python writes for a float ("42.0", "1e-07") counts as this number. Any other text stays as it is: "007" and
"1.10" may be names.
"""

import math
import re
from decimal import Decimal
from typing import Any

_MAX_CHARACTERS = 100
_FLOAT = re.compile(r"-?[0-9]+(?:\.[0-9]+)?(?:e[-+][0-9]{2,3})?")
_PLAIN = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]*[1-9])?")
_NUMBER = re.compile(r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]{1,3})?")


def reference_text(reference: Any) -> str | None:
    """Return the text of a reference answer, without blanks at its ends. A number has neither an exponent nor
    zeros behind its last decimal: 42.0 is "42", and 1e-07 is "0.0000001". Return None if the answer is
    neither a text nor a finite number."""
    if isinstance(reference, str):
        text = reference.strip()
        return _plain(Decimal(text)) if _FLOAT.fullmatch(text) and repr(float(text)) == text else text
    if isinstance(reference, float) and math.isfinite(reference):
        return _plain(Decimal(str(reference)))
    is_exact = isinstance(reference, int | Decimal) and not isinstance(reference, bool)
    return _plain(Decimal(reference)) if is_exact and Decimal(reference).is_finite() else None


def is_equal(text: str, reference: str) -> bool:
    """Return True if a text without blanks at its ends equals a reference, which `reference_text` returned.
    If the reference is a plain number, texts of one number are compared with it by value, exactly."""
    if text == reference or not _PLAIN.fullmatch(reference):
        return text == reference
    is_number = len(text) <= _MAX_CHARACTERS and _NUMBER.fullmatch(text)
    return bool(is_number) and Decimal(text) == Decimal(reference)


def _plain(number: Decimal) -> str:
    text = f"{number:f}"
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return "0" if text == "-0" else text
