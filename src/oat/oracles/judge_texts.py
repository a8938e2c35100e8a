"""Reads what a judge's text says: a verdict, or a score.

**A text says a verdict only if nothing else in it could be another one, or turn it round.** Otherwise it says
none. Three things follow.

* A verdict *stands* alone in its line, behind a label (`Verdict: 0`, `<answer>0</answer>`), or in an object
  of JSON whose keys are all known. Quotation marks, brackets, bold type or `\\boxed{}` may be around it. All
  verdicts that stand in a text are the same. No line begins with a verdict and goes on as prose, such as
  `1 fails to answer`.
* Behind a verdict, in its line and below, come only words that are known to be neutral or in its favour. This
  is a list of what is allowed, because no list of what turns a verdict round is complete.
* Before a verdict may come prose, such as a chain of thought, if the verdict has a label: then it is the one
  that the judge calls its verdict. The prose may name any verdict, but may not give another one a label.

The same holds for scores. A `Reader` has what differs between the two.
"""

import json
import math
import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

V = TypeVar("V", str, float)

_MOST_CHARACTERS = 100_000
"""Largest number of characters of a text that is read. It is longer than any answer to this question."""

_OPEN = r"""(?:\$?\\boxed\{|\\\(|[ \t"'`“”‘’„«»‹›「」『』【(\[]|[*_]+(?!\s))*+"""
_CLOSING = r"""["'`*_“”’»«›‹」』】)\]}$.!。 \t]|\\[)\]]"""
_CLOSE = rf"(?:{_CLOSING})*+"
_OPENING = " \t\n\"'`*_“”‘’„«»‹›「」『』【([{"
_MARKS = r"""["'`*_”’»)\] \t]*+"""
_LINE = re.compile(r"[^\n]+")
_SKIPPED = re.compile(r"(?:`{3,}[a-z]*|[-*_=]{3,}|</\w+>)?", re.IGNORECASE)
"""Lines that say nothing: fences of code, rules, and the ends of elements."""
_ITEM = re.compile(r"\W{0,4}?(\d+)[.)]\W{0,4}\s")
_INTRODUCES = re.compile(r"[:,?]\W{0,4}\Z|\b(?:example|format|template|opposite)\b", re.IGNORECASE)
"""Prose from which what comes next is no verdict, but is asked for, shown, or turned round."""
_WORD = re.compile(r"[^\W_]+(?:['’-][^\W_]+)*")
_ODD = re.compile(r"""[^\w\s.,:;!*_"'`“”‘’()\[\]{}$…–—#-]""")
"""Characters beside words that may say something, such as `?`, `→` or an emoji."""

_VERDICT_NAMES = (
    r"(?:(?:final|overall)[ \t_]+){0,2}(?:answer|verdict|decision|choice|winner|identifier|judge?ment"
    r"|preference|(?:better|best|preferred)(?:[ \t_]+(?:response|answer|one))?|final)"
)
_SCORE_NAMES = r"(?:(?:final|overall|total)[ \t_]+){0,2}(?:score|rating|grade|answer|verdict|final)"
_REASON_NAMES = re.compile(
    r"(?:(?:brief|short)[ _])?(?:reasons?|reasoning|explanation|rationale|justification|analysis|thoughts?"
    r"|thinking|comments?|feedback|critique)",
    re.IGNORECASE,
)

_FAVOURABLE = (
    r"(?:is\s+(?:(?:the|a|a\s+bit|a\s+little|clearly|definitely|slightly|much|far|overall|marginally"
    r"|significantly|somewhat)\s+){0,3}(?:better|best|superior|preferred|preferable|stronger|winner)"
    r"(?:\s+(?:response|answer|one|choice|overall))?|wins)\b(?P<reason>[ \t,]+(?:because|since|as)\b.*)?"
)
_QUALITY = (
    r"[-–—]\s+(?:(?:very|quite|mostly|fairly|well|well-written|written|good|great|excellent|clear|concise"
    r"|decent|fair|average|mediocre|weak|poor|bad|and|but)\b[\s,]*)+"
)
_WORDS = """
    because since as reason reasons reasoning explanation rationale justification analysis the this it its
    that which is was has does and also with of to for in a an on response answer reply better best more most
    clearly slightly much far overall generally accurate correct clear clearer complete detailed relevant
    helpful useful concise direct directly informative coherent creative thorough precise specific natural
    engaging polite safe honest fluent readable structured well-written written well good great excellent
    stronger strong superior preferred preferable winner wins answers addresses follows gives provides offers
    explains includes contains question prompt instruction instructions request user user's detail details
    information
"""
_OF_SCORES = """
    but though could be lacks lacking weak poor bad fair average decent short long brief vague unclear generic
    incomplete inaccurate repetitive simple basic limited shallow confusing irrelevant
"""
_OF_VERDICTS = {
    "0": frozenset({"0", "first"}),
    "1": frozenset({"1", "second"}),
    "T": frozenset({"t", "tie", "tied", "both", "neither", "equal", "equally"}),
}
"""Words that name a verdict. They are known behind this verdict alone."""


@dataclass(frozen=True)
class Found(Generic[V]):
    """What a text says.

    Attributes:
        value: the verdict, or the score.
        start, end: the place in the text, in characters; of a score, that of its number.
        opening: the place at which the marks begin that may stand before it, such as blanks and brackets.
    """

    value: V
    start: int
    end: int
    opening: int


@dataclass(frozen=True)
class _Stand(Generic[V]):
    """A value where values stand.

    Attributes:
        place, end: the place in the plain text.
        is_labelled: a label or a key names it.
        behind: the words behind it in its line.
        is_item: its punctuation may be that of an item of a list, as in `1.`.
    """

    value: V
    place: int
    end: int
    is_labelled: bool
    behind: str = ""
    is_item: bool = False


@dataclass(frozen=True)
class _Parts(Generic[V]):
    """A text, in parts.

    Attributes:
        stands: the values where values stand.
        prose: everything else, with its places in the plain text.
    """

    stands: list[_Stand[V]] = field(default_factory=list)
    prose: list[tuple[int, str]] = field(default_factory=list)


class Reader(Generic[V]):
    """Reads texts for values of one kind.

    Args:
        value: a regular expression of a value.
        names: a regular expression of what a label or a key calls a value.
        tail: a regular expression of what may follow in the line of a value. The group `reason` has words
            that must be known too.
        parse: returns the value of a match, in which the group `said` is `value`, and `rest` is what follows
            in the line; None if it is no value. The second argument is True if the text was cut there.
        has_other: True if prose before a value may say another one.
        known: the words that may come behind a value.
        unit: a regular expression of what may belong to a value behind it.
    """

    def __init__(
        self,
        value: str,
        names: str,
        tail: str,
        parse: Callable[[re.Match[str], bool], V | None],
        has_other: Callable[[str, V], bool],
        known: Callable[[V], frozenset[str]],
        unit: str = "",
    ) -> None:
        self._parse: Callable[[re.Match[str], bool], V | None] = parse
        self._has_other: Callable[[str, V], bool] = has_other
        self._known: Callable[[V], frozenset[str]] = known
        label = _label(names, r"(?:[:=]|\bis\b:?)")
        self._line = re.compile(
            rf"(?P<label>{label})?(?P<open>{_OPEN})(?P<said>{value}){unit}(?![^\W_])(?!\W?\d)"
            rf"(?P<close>{_CLOSE}(?:</(?i:{names})>)?)(?P<rest>.*)"
        )
        self._begins = re.compile(rf"(?:{label})?{_OPEN}(?:{value}){unit}(?![^\W_])")
        self._tail = re.compile(rf"(?:{tail})?{_CLOSE}", re.IGNORECASE)
        self._label_alone = re.compile(_label(names, r"(?:[:=]|\bis\b:?)?"))
        self._unread = re.compile(_label(names, "[:=]"))
        self._key = re.compile(names, re.IGNORECASE)
        self._item = rf'"\s*:\s*"?{_OPEN}(?P<said>{value})'
        self._alone = re.compile(
            rf"[{re.escape(_OPENING)}]*(?P<said>{value}){unit}(?![^\W_])(?:{_CLOSING}|[,\n])*+(?P<rest>)"
        )

    def says(self, text: str, is_cut: bool = False) -> Found[V] | None:
        """Return the value that a text says; None if it says none (head of this file).

        Args:
            is_cut: the largest number of tokens has cut the text.
        """
        if len(text) > _MOST_CHARACTERS:
            return None
        plain, places = _plain(text)
        parts = self._parts(plain, is_cut)
        found = None if parts is None else self._one(parts, is_cut)
        if found is None:
            return None
        opening = len(plain[: found.place].rstrip(_OPENING))
        return Found(
            found.value,
            places[found.place],
            places[found.end - 1] + 1,
            places[opening - 1] + 1 if opening else 0,
        )

    def alone(self, text: str) -> V | None:
        """Return the value that a text is, without the marks around it; None if it is something else."""
        found = self._alone.fullmatch(_plain(text)[0])
        return None if found is None else self._parse(found, False)

    def _parts(self, plain: str, is_cut: bool) -> _Parts[V] | None:
        """Return the parts of a text; None if a line begins with a value, or with a label, and goes on as
        something else."""
        parts, is_named, items = _Parts[V](), False, _numbered(plain)
        for found in _LINE.finditer(plain):
            line = found[0]
            if _SKIPPED.fullmatch(line.strip()):
                continue
            if line.lstrip().startswith("{"):
                return self._with_object(parts, plain, found.start())
            is_last = is_cut and not plain[found.end() :].strip()
            stand = self._stand(line, found.start(), is_named=is_named, is_cut=is_last)
            if stand is not None:
                parts.stands.append(stand)
            elif found.start() in items:
                parts.prose.append((found.start(), line[items[found.start()] :]))
            elif is_named or self._begins.match(line):
                return None
            elif self._label_alone.fullmatch(line.rstrip()):
                is_named = True
                continue
            elif self._unread.match(line):
                return None
            else:
                parts.prose.append((found.start(), line))
            is_named = False
        return None if is_named else parts

    def _stand(self, line: str, start: int, *, is_named: bool, is_cut: bool) -> _Stand[V] | None:
        """Return the value that stands in a line; None if none does.

        Args:
            start: the place of the line.
            is_named: the line before is a label.
            is_cut: the text was cut in this line.
        """
        found = self._line.fullmatch(line)
        tail = None if found is None else self._tail.fullmatch(found["rest"])
        if found is None or tail is None:
            return None
        is_labelled, behind = is_named or found["label"] is not None, tail.groupdict().get("reason") or ""
        is_item = any(mark in found["close"] for mark in ".。") or (
            ")" in found["close"] and "(" not in found["open"]
        )
        has_more = bool(found["rest"].strip())
        if (is_cut and (has_more or is_item)) or (has_more and is_item):
            return None
        value = self._parse(found, is_cut)
        if value is None:
            return None
        place, end = start + found.start("said"), start + found.end("said")
        return _Stand(value, place, end, is_labelled, behind, is_item and not is_labelled)

    def _with_object(self, parts: _Parts[V], plain: str, start: int) -> _Parts[V] | None:
        """Add the object of JSON that begins at `start` and ends the text; None if it is something else, or
        has keys that are not known."""
        body = plain[start:].rstrip().rstrip("`")
        try:
            pairs = json.loads(body, object_pairs_hook=tuple, parse_int=str, parse_float=str)
        except (ValueError, RecursionError):
            return None
        keys = [key for key, _ in pairs if self._key.fullmatch(key)]
        is_reasoned = all(_REASON_NAMES.fullmatch(key) for key, _ in pairs if key not in keys)
        if len(keys) != 1 or not is_reasoned or not all(isinstance(said, str) for _, said in pairs):
            return None
        found = re.search(re.escape(f'"{keys[0]}') + self._item, body)
        stand = None if found is None else self._stand(dict(pairs)[keys[0]], 0, is_named=True, is_cut=False)
        if found is None or stand is None:
            return None
        place, end = start + found.start("said"), start + found.end("said")
        parts.stands.append(_Stand(stand.value, place, end, True, stand.behind))
        names = [key for key, _ in pairs]
        for number, (key, said) in enumerate(pairs):
            if key not in keys:
                inner = self._parts(_plain(said)[0], False)
                if inner is None or inner.stands:
                    return None
                parts.prose.append((place - 1 if number < names.index(keys[0]) else end, said))
        return parts

    def _one(self, parts: _Parts[V], is_cut: bool) -> _Stand[V] | None:
        """Return where the one value of a text stands; None if there is not one."""
        first = min((place for place, _ in parts.prose), default=math.inf)
        sound = [each for each in parts.stands if each.is_labelled or each.place < first]
        if not sound or len({each.value for each in parts.stands}) > 1:
            return None
        found = sound[0]
        before = [text for place, text in parts.prose if place < found.place]
        behind = [each.behind for each in parts.stands] + [t for p, t in parts.prose if p > found.place]
        if before and (
            is_cut
            or _INTRODUCES.search(before[-1])
            or any(self._has_other(text, found.value) for text in before)
        ):
            return None
        after = "\n".join(filter(None, behind))
        if after and (found.is_item or not _is_known(after, self._known(found.value), is_cut)):
            return None
        return found


def verdict_reader(verdicts: Sequence[str]) -> Reader[str]:
    """Return a reader of verdicts."""

    def has_other(text: str, verdict: str) -> bool:
        own = _named(_OF_VERDICTS.get(verdict, {verdict}))
        names = {name for each in verdicts if each != verdict for name in _OF_VERDICTS.get(each, {each})}
        other = _named(names | {"other", "latter", "former"})
        others = _named(set(verdicts) - {verdict})
        near = r"[^\n.]{0,60}?"
        patterns = (
            rf"\b(?:{_VERDICT_NAMES}){_MARKS}(?:[:=>]|\bis\b){near}{other}",
            rf"\b(?:choose|chose|pick|prefer|select|vote|go|favou?r)\b{near}{other}",
            rf"{_MARKED}{other}|^{_AROUND}{other}{_AROUND}$",
            rf"[.!?]{_AROUND}{others}|[;:,–—|]{_AROUND}{others}{_AROUND}(?:[.!?;,|]|$)",
            rf"{_CONCLUDES}{near}(?:\b(?:is|say|take)\s{{1,9}}{other}|{other}{near}{_FOR}|{own}{near}{_AGAINST})",
        )
        return bool(re.search("|".join(patterns), text, re.IGNORECASE | re.MULTILINE))

    def known(verdict: str) -> frozenset[str]:
        own = _OF_VERDICTS.get(verdict, frozenset({verdict.casefold()}))
        return frozenset(_WORDS.split()) | own | ({"responses", "are"} if "tie" in own else set())

    def parse(found: re.Match[str], is_cut: bool) -> str | None:
        return None if found["rest"].strip() and not found["said"].isdigit() else found["said"]

    return Reader("|".join(map(re.escape, verdicts)), _VERDICT_NAMES, _FAVOURABLE, parse, has_other, known)


def score_reader(low: float, high: float, *, are_whole: bool = False) -> Reader[float]:
    """Return a reader of scores from `low` to `high`. What follows a `/` must be the highest score, or the
    number of scores if this is 10 or 100, as in 7/10 of [0, 9].

    Args:
        are_whole: the judge is asked for whole numbers. So a text that was cut behind 7 does not mean 7.5.
    """
    most = r"""[*_"'`()\[\] \t]*(?:/|\b(?i:out[ \t]+of)\b)[*_"'`(\[ \t]*(?P<most>\d+(?:\.\d+)?)"""
    unit = r"[ \t]*(?:(?i:points?)\b|分|点" + (r"|%|％)" if high == 100 else ")")
    ends = (high, high + 1) if low == 0 and high in (9, 99) else (high,)

    words = frozenset((_WORDS + _OF_SCORES).split())

    def has_other(text: str, score: float) -> bool:
        numbers = (float(found[found.lastindex or 0]) for found in _NUMBERS.finditer(text))
        return bool(_PARTS.search(text)) or any(low <= n <= high or low <= -n <= high for n in numbers)

    def parse(found: re.Match[str], is_cut: bool) -> float | None:
        score, end = float(found["said"]), found["most"]
        is_open = is_cut and (end is not None or _may_go_on(found["said"], low, high, are_whole))
        is_sound = low <= score <= high and not is_open and (end is None or float(end) in ends)
        return score if is_sound else None

    return Reader(
        r"[+-]?\d+(?:\.\d+)?",
        _SCORE_NAMES,
        _QUALITY,
        parse,
        has_other,
        lambda score: words,
        rf"(?:{most})?(?:{unit})?",
    )


_CONCLUDES = r"\b(?:overall|therefore|thus|hence|so|consequently|ultimately|conclusion|summary)\b"
_FOR = r"\b(?:better|best|wins?|winner|superior|stronger|preferred|preferable)\b"
_AGAINST = r"\b(?:worse|worst|loses?|loser|inferior|weaker)\b"
_MARKED = r"(?:boxed\{|\[\[?|\*\*|`)"
_AROUND = r"[^\w\n]{0,9}"
_NUMBER = r"(?<![\w.])([+-]?\d+(?:\.\d+)?)(?![\w]|\.\d)"
_NUMBERS = re.compile(
    rf"[:=.!?]\W{{0,6}}{_NUMBER}|{_MARKED}{_NUMBER}|{_NUMBER}(?!\s+[^\W\d_])"
    rf"|\b(?:scor|rate|rating|grad|giv|assign|award|deserv|worth|mark)\w{{0,9}}\b[^\n.]{{0,60}}?{_NUMBER}",
    re.IGNORECASE,
)
"""A number in prose that may be a score: it does not count things, or is given."""
_PARTS = re.compile(r"\d\W{0,3}(?:/|%|out\s+of\b|points?\b|stars?\b)", re.IGNORECASE)
"""A number of parts, in prose."""


def _label(names: str, end: str) -> str:
    """Return a regular expression of a label.

    Args:
        names, end: regular expressions of what it calls the value, and of what comes then, such as a colon.
    """
    begin = r"(?:(?:so|thus|therefore|hence),?[ \t]+)?(?:here[ \t]+is[ \t]+)?(?:(?:the|my)[ \t]+)?"
    return (
        rf"(?:[ \t]*<(?i:{names})>|(?:\#{{1,6}}[ \t]+)?{_OPEN}(?i:{begin}(?:{names}){_MARKS}{end})){_MARKS}"
    )


def _named(names: Iterable[str]) -> str:
    """Return a regular expression of any of some words."""
    return rf"(?<!\w)(?:{'|'.join(sorted(map(re.escape, names)))})(?!\w)"


def _plain(text: str) -> tuple[str, list[int]]:
    """Return a text without invisible characters, with digits and fullwidth characters as ASCII, and with
    each end of a line as a line feed. Also return the place of each of its characters in `text`."""
    kept = [(place, plain) for place, c in enumerate(text) if (plain := _ascii(c))]
    return "".join(c for _, c in kept), [place for place, _ in kept]


def _ascii(c: str) -> str:
    if c in "\r\v\f\x1c\x1d\x1e\x85\u2028\u2029":
        return "\n"
    if c.isascii():
        return c
    if c.isdecimal():
        return str(unicodedata.decimal(c))
    if unicodedata.category(c) == "Cf":
        return ""
    return chr(ord(c) - 0xFEE0) if "！" <= c <= "～" else "-" if c == "\u2212" else c


def _numbered(plain: str) -> dict[int, int]:
    """Return the places of the lines that are a numbered list (1, 2 and so on), each with the length of its
    number."""
    items = [(found.start(), item) for found in _LINE.finditer(plain) if (item := _ITEM.match(found[0]))]
    is_list = len(items) > 1 and [item[1] for _, item in items] == [str(n + 1) for n in range(len(items))]
    return {place: item.end() for place, item in items} if is_list else {}


def _is_known(text: str, known: frozenset[str], is_cut: bool) -> bool:
    """Return True if all words of a text are known. The last word of a cut text may be a part of one."""
    words = [word.casefold().replace("’", "'") for word in _WORD.findall(text)]
    if _ODD.search(text):
        return False
    if is_cut and words and len(words[-1]) > 2 and any(each.startswith(words[-1]) for each in known):
        words.pop()
    return all(word in known for word in words)


def _may_go_on(number: str, low: float, high: float, are_whole: bool) -> bool:
    """Return True if a number in [low, high] may be the beginning of another one in [low, high]."""
    value, furthest = float(number), low if number.startswith("-") else high
    if are_whole:
        return value != 0 and abs(10 * value) <= abs(furthest)
    return value != furthest
