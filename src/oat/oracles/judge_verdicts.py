"""Reads the verdict or the score in a judge's reply.

A reply can be read in two ways: its text says a verdict, and the log-probabilities of its tokens say how
probable each verdict was. **The two agree, or there is no verdict.** The text says which verdict, and at
which place. There, each alternative of the token is read as the text would be if it had this alternative. The
verdict of the text must be the most probable one, and all verdicts together must have the probability
`LEAST_SHARE`. If the tokens cannot be matched with the text, or have no alternatives, the text alone counts
where this is allowed, unless the tokens say another verdict.

**A text says a verdict** at its beginning, after quotation marks, brackets, markdown or a label such as
`Answer:`. It says none if this may be something else: an item of a list (`1. The first ...`), a part of a
number or a range, one of several verdicts in a line, or a line that the largest number of tokens has cut.
"""

import math
import re
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from oat.oracles.judge_replies import ChatCompletion, Token, answer_in

LEAST_SHARE = 0.5
"""Least probability that all verdicts together have at the place where a verdict is read. Below one half, the
judge would more probably have gone on with something else, and a few per cent would decide."""
_MOST_CHARACTERS = 1000
"""Largest number of characters of a text that are read. A verdict is at the beginning of the text. The limit
bounds the time to search for it, which may grow with the square of the length."""

V = TypeVar("V", str, float)
Reads = Literal["auto", "logprobs", "text"]

_LEAD = r"""(?:```[a-z]+\s|\#{1,6}\s|\$?\\boxed\{|[\s"'`*_“”‘’„«»‹›「」『』【(\[{<>:|])*+"""
_LABELLED = r"""\b[\s"'`*_”’»)\]}]*(?:[:=>]|is\b)"""
_CLOSE = r"""["'`*_”’»›」』】)\]}>$.:,;!]*"""
_VERDICT_LABEL = (
    rf"(?:(?:the\s+)?(?:final\s+)?(?:answer|verdict|identifier|decision|choice|winner){_LABELLED})?"
)
_SCORE_LABEL = (
    r"(?:(?:the\s+|my\s+)?(?:final\s+|overall\s+|total\s+)?(?:score|rating|grade|answer|verdict)\b"
    r"""[\s"'`*_”’»)\]}:=>]*+(?:is\b)?)?"""
)
_SCORE = re.compile(
    rf"(?P<lead>{_LEAD}{_SCORE_LABEL}{_LEAD})(?P<value>[+-]?\d+(?:\.\d+)?)(?![A-Za-z0-9]|[.,:]\d|\s\d)"
    r"""(?:["'`*_()\[\]\s]*(?:/|\bout\s+of\b|\bof\b)["'`*_(\[\s]*(?P<most>\d+(?:\.\d+)?)(?![A-Za-z0-9]|[.,:/]\d))?""",
    re.IGNORECASE,
)
_RANGE = re.compile(r"(?:[-–—~/,…±]|to\b|or\b|and\b|vs\b|versus\b)\s*[+-]?\d", re.IGNORECASE)
_AGAINST = re.compile(
    r"\b(?:worse|not|neither|nor|less|loses?|inferior|wrong)\b|n't\b|n’t\b|\?", re.IGNORECASE
)
"""What may turn the verdict round that comes before, as in "0 is worse"."""
_ITEM = re.compile(r"^\W{0,8}\d", re.MULTILINE)
_AMOUNT = re.compile(r"(?:%|=|/|points?\b|stars?\b|of\b|out\b)", re.IGNORECASE)
"""What makes the number that comes before an amount, as in "1 of 2"."""


@dataclass(frozen=True)
class Found(Generic[V]):
    """What a text says.

    Attributes:
        value: the verdict, or the score.
        start, end: the place in the text, in characters.
    """

    value: V
    start: int
    end: int


Reader = Callable[[str, bool], Found[V] | None]
"""Reads a text. The second argument is True if the largest number of tokens has cut the text."""


@dataclass(frozen=True)
class Reading(Generic[V]):
    """How a reply is read.

    Attributes:
        shares: the probability of each verdict or score, given that it is one of them; None: there is none.
        lacks: why there is none, in words; "" if the text says none.
    """

    shares: dict[V, float] | None
    lacks: str = ""


def read_reply(reply: ChatCompletion, read: Reader[V], reads: Reads) -> Reading[V]:
    """Read a reply.

    Args:
        reads: "text": the text alone. "logprobs": the log-probabilities too, or there is no verdict. "auto":
            the log-probabilities too, if the reply has usable ones.
    """
    if reply.end == "broken":
        return Reading(None, "it has ended before its end (finish_reason)")
    said = read(reply.answer, reply.end == "cut")
    if said is None:
        return Reading(None, "it was cut (max_tokens)" if reply.end == "cut" else "")
    if reads == "text" or (reply.tokens is None and reads == "auto"):
        return Reading({said.value: 1.0})
    place = _place(reply, said)
    if place is not None:
        before, token = place
        if _value(read, before + token.piece) == said.value and len(token.logps) > 1:
            return _at_place(token, before, said.value, read)
    if reads == "logprobs":
        return Reading(None, "its log-probabilities have no place of the verdict with alternatives")
    if place is None and _value(read, _joined(reply.tokens or ())) not in (None, said.value):
        return Reading(None, "its tokens say something else than its text")
    return Reading({said.value: 1.0})


def verdict_in(text: str, verdicts: Sequence[str], is_cut: bool = False) -> Found[str] | None:
    """Return the verdict that a text says; None if it says none (head of this file)."""
    plain, places = _plain(text)
    named = "|".join(map(re.escape, verdicts))
    found = re.match(
        rf"(?P<lead>{_LEAD}(?i:{_VERDICT_LABEL}){_LEAD})(?P<value>{named})(?![^\W_])(?!\W?\d)", plain
    )
    if found is None:
        return None
    value, rest = found["value"], plain[found.end() :]
    line, _, later = rest.partition("\n")
    tail = line[len(_close(line)) :].strip()
    others = "|".join(re.escape(each) for each in verdicts if each != value)
    is_listed = _is_item(found["lead"], line)
    if _is_unfinished(found["lead"], rest, is_cut) or _is_list(found["lead"], line, later):
        return None
    if tail and value.isdigit() and (is_listed or _AGAINST.search(tail) or _AMOUNT.match(tail)):
        return None
    if tail and (
        re.search(rf"(?<![\w.])(?:{others})(?!\w|\.\d)", tail)
        or re.search(rf"^{_LEAD}(?:{others})(?!\w)", later, re.MULTILINE)
    ):
        return None
    return Found(value, places[found.start("value")], places[found.end("value") - 1] + 1)


def score_in(text: str, low: float, high: float, is_cut: bool = False) -> Found[float] | None:
    """Return the score that a text says, such as "7", "Score: 7" or "**7.5** / 10". Return None if it says
    none (head of this file), or one that is not from `low` to `high`. What follows a `/` must be the highest
    score, or the next number, since [0, 9] has ten scores."""
    plain, places = _plain(text)
    found = _SCORE.match(plain)
    score = float(found["value"]) if found else math.nan
    if found is None or not low <= score <= high:
        return None
    rest, is_part = plain[found.end() :], found["most"] is not None
    line, _, later = rest.partition("\n")
    tail = line[len(_close(line)) :].strip()
    tail = tail[1:].lstrip() if tail.startswith("%") and high == 100 else tail
    is_listed = not is_part and found["value"] in ("0", "1") and _is_item(found["lead"], line)
    if (
        (is_part and not high <= float(found["most"]) <= high + 1)
        or (tail and (is_listed or tail.startswith("%") or _RANGE.match(tail)))
        or _RANGE.match(line.lstrip(" \t"))
        or _is_unfinished(found["lead"], rest, is_cut)
        or (is_cut and not rest.strip() and (is_part or _may_go_on(found["value"], low, high)))
        or "?" in tail
        or (found["value"] in ("0", "1") and tail and _ITEM.search(later))
        or (found["value"] in ("0", "1") and not is_part and _is_list(found["lead"], line, later))
    ):
        return None
    return Found(score, places[found.start("value")], places[found.end("value") - 1] + 1)


def verdict_reader(verdicts: Sequence[str]) -> Reader[str]:
    """Return a reader of verdicts."""
    return lambda text, is_cut: verdict_in(text, verdicts, is_cut)


def score_reader(low: float, high: float) -> Reader[float]:
    """Return a reader of scores from `low` to `high`."""
    return lambda text, is_cut: score_in(text, low, high, is_cut)


def _at_place(token: Token, before: bytes, said: V, read: Reader[V]) -> Reading[V]:
    """Read a token and its alternatives, which stand behind the bytes `before` of the answer."""
    found: dict[V, float] = {}
    for piece, logp in token.logps.items():
        value = _value(read, before + piece)
        if value is not None:
            found[value] = found.get(value, 0.0) + math.exp(logp)
    total = math.fsum(found.values())
    if total < LEAST_SHARE:
        return Reading(None, "something else than a verdict was as probable (log-probabilities)")
    if found.get(said, 0.0) < max(found.values()):
        return Reading(None, "another verdict was more probable (log-probabilities)")
    return Reading({value: share / total for value, share in found.items()})


def _place(reply: ChatCompletion, said: Found[V]) -> tuple[bytes, Token] | None:
    """Return the token that has the first character of what the answer says, and the bytes of the answer
    before this token. Return None if the tokens do not have the answer up to there."""
    first = len(reply.answer[: said.start].encode("utf-8", "surrogatepass"))
    if len(reply.answer[: said.end].encode("utf-8", "surrogatepass")) > reply.agreed:
        return None
    end = 0
    for token in reply.tokens or ():
        begin, end = end, end + len(token.piece)
        if end > reply.start + first:
            before = max(0, begin - reply.start)
            return reply.answer.encode("utf-8", "surrogatepass")[:before], token
    return None


def _value(read: Reader[V], text: bytes) -> V | None:
    found = read(answer_in(text.decode("utf-8", "replace")), False)
    return None if found is None else found.value


def _joined(tokens: Sequence[Token]) -> bytes:
    return b"".join(token.piece for token in tokens)


def _plain(text: str) -> tuple[str, list[int]]:
    """Return the beginning of a text without invisible characters, and with digits and fullwidth characters
    as ASCII. Also return the place of each of its characters in `text`."""
    kept = [(place, _ascii(c)) for place, c in enumerate(text[:_MOST_CHARACTERS])]
    kept = [(place, c) for place, c in kept if c]
    return "".join(c for _, c in kept), [place for place, _ in kept]


def _ascii(c: str) -> str:
    if c.isascii():
        return c
    if c.isdecimal():
        return str(unicodedata.decimal(c))
    if unicodedata.category(c) == "Cf":
        return ""
    return chr(ord(c) - 0xFEE0) if "！" <= c <= "～" else "-" if c == "\u2212" else c


def _close(line: str) -> str:
    """Return the punctuation with which the rest of a line begins."""
    found = re.match(_CLOSE, line)
    return found[0] if found else ""


def _is_item(lead: str, line: str) -> bool:
    """Return True if a digit before `line` may be the number of an item, as in "1. Some text"."""
    return _numbers(lead, _close(line)) or bool(re.match(r"\s*[-–—]\s", line[len(_close(line)) :]))


def _is_list(lead: str, line: str, later: str) -> bool:
    """Return True if a number before `line` has the punctuation of an item, and a later line has a number."""
    return _numbers(lead, _close(line)) and bool(_ITEM.search(later))


def _numbers(lead: str, close: str) -> bool:
    """Return True if the punctuation after a number makes it the number of an item."""
    return any(mark in close for mark in ".:") or (")" in close and "(" not in lead)


def _is_unfinished(lead: str, rest: str, is_cut: bool) -> bool:
    """Return True if a cut text ends in the line of its verdict, and more might change what it says."""
    if not is_cut or "\n" in rest:
        return False
    close = _close(rest)
    return bool(rest[len(close) :].strip()) or _numbers(lead, close)


def _may_go_on(number: str, low: float, high: float) -> bool:
    """Return True if a number in [low, high] may be the beginning of one with more digits in [low, high]."""
    value = float(number)
    return "." not in number and ((value > 0 and 10 * value <= high) or (value < 0 and 10 * value >= low))
