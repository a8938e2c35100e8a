r"""The rule of MATH (Hendrycks et al., arXiv:2103.03874): a response is right when its last boxed answer is the reference's.

The answer of a response is what stands in its last closed \boxed{...} (or \fbox), braces balanced; without one, its last number. Two answers are
equal, unless one is a set and the other an ordered list, or a base (`2516_8`) is not the same on both sides,

1. as texts, after `normalise`,
2. as numbers, exactly (whole and decimal numbers, and fractions of two),
3. as mathematics, by math-verify.

Only the third reads mathematics by a parser, of LaTeX, whose simplifications may take for ever and whose relatives evaluate what they read. So it
runs in workers that are confined and killed when they take too long (`workers.py`); answers of more than 300 characters never come there.

An answer that cannot be compared in time is not right (0.0), and not failed: otherwise to write what hangs the parser would be better than to be
wrong.

Departures from the grader that goes with the data set:
1. Percent signs, degrees and units behind an answer are not read, on either side: 50\% equals 50.
2. Without a box the last number counts.
3. Numbers are compared exactly: 0.3333 is not 1/3, though math-verify, which rounds to six digits, takes 0.333333 for it.

Not handled: mixed numbers (1\frac{1}{2} is read as a product, as LaTeX is), answers in words.
"""

import importlib.util
import re
from collections.abc import Callable, Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Any

from oat.errors import ConfigError
from oat.oracles.callables import CallableOracle
from oat.oracles.rules.gsm8k import last_number
from oat.workers import Workers

_TOKEN = re.compile(r"\\(?:boxed|fbox)\s*\{|\\(?:[a-zA-Z]+|.)|[{}]", re.DOTALL)
_BARE = re.compile(r"\\boxed\s+([^\s${}\\]+)")
_MAX_CHARACTERS, _MAX_SYMBOLIC, _MAX_DIGITS = 10_000, 300, 100
_NUMBER = r"[0-9]*\.?[0-9]+|[0-9]+\."
_IS_NUMBER = re.compile(rf"([-+]?)(?:({_NUMBER})|\\frac\{{([-+]?)({_NUMBER})\}}\{{([-+]?)({_NUMBER})\}})")
_THOUSANDS = re.compile(r"[-+]?[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?")
_WRITTEN = re.compile(
    r"\\(?:left|right|displaystyle|textstyle|limits|mathopen|mathclose)(?![a-zA-Z])|\\[,;:! ]|\\q?quad(?![a-zA-Z])|\\?\$|~|\\[()\[\]]"
)
_UNIT = re.compile(r"(?<=[0-9}])\s*\\(?:text|mbox|textrm|mathrm)\s*\{[^{}]*\}(?:\^\{?[0-9]\}?)?$")
_WRAPPED = re.compile(r"\\(?:text|mbox|textbf|textrm|textit|mathrm|mathbf|mathit|boxed|fbox)\{([^{}]*)\}")
_SUFFIX = re.compile(r"(?:\^\{?\\circ\}?|\\degree|\u00b0|\\?%)+$")
_RELATION = re.compile(r"=|\\in(?![a-zA-Z])")
_NAMED = re.compile(r"[a-zA-Z](?:_\{?[0-9a-zA-Z]\}?)?(?:=|\\in(?![a-zA-Z]))")
_BASED = re.compile(r"([-+]?[0-9][0-9a-zA-Z]*)_\{?([0-9]+)\}?")
_REPLACED: list[tuple[re.Pattern[str], Any]] = [
    (re.compile(r"\\[dtc]frac(?![a-zA-Z])"), r"\\frac"),
    (re.compile(r"\\(?:lbrack|rbrack)(?![a-zA-Z])"), lambda found: "[" if found[0] == r"\lbrack" else "]"),
    (re.compile(r"\\(le|ge|ne)q?(?![a-zA-Z])"), r"\\\1q"),
    (re.compile(r"\\sqrt\s*([0-9a-zA-Z])"), r"\\sqrt{\1}"),
    (re.compile(r"\\frac\s*([0-9a-zA-Z])\s*([0-9a-zA-Z])"), r"\\frac{\1}{\2}"),
    (re.compile(r"\\frac\s*([0-9a-zA-Z])\s*\{"), r"\\frac{\1}{"),
    (re.compile(r"(\\frac\s*\{[^{}]*\})\s*([0-9a-zA-Z])"), r"\1{\2}"),
    (re.compile("\u2212"), "-"),
]


class MathRule(CallableOracle):
    """The oracle `math`: 1.0 for a right answer, else 0.0; no reward (None) without a reference.

    The reference is a final answer (`\\frac{1}{2}`), or a whole solution with its answer boxed.

    Args:
        timeout_s: seconds that one comparison by math-verify may take.
        workers: processes that compare.
        symbolic: False compares texts and numbers only, and needs no math-verify.

    Raises:
        ConfigError: math-verify is not installed.
    """

    def __init__(self, timeout_s: float = 5.0, workers: int = 1, symbolic: bool = True):
        super().__init__(self.grade, "math")
        self.version = "2"
        self._options: dict[str, Any] = {"timeout_s": timeout_s, "count": workers}
        self._workers: Workers | None = None
        self._is_symbolic = symbolic
        if symbolic and importlib.util.find_spec("math_verify") is None:
            raise ConfigError(
                "math needs the package math-verify, which is not installed; pip install 'oat-align[math]', or set `symbolic: false` to compare "
                "texts and numbers only"
            )

    def grade(self, prompts: Sequence[Any], completions: Sequence[Any], reference: Sequence[Any], **columns: Any) -> list[float | None]:
        """One score a completion, in TRL's signature.

        Args:
            completions: texts; for conversations, lists that hold one assistant message.
        """
        texts = [completion if isinstance(completion, str) else completion[-1]["content"] for completion in completions]
        rights = [None if answer is None else reference_answer(str(answer)) for answer in reference]
        scores, open_pairs = list[float | None](), dict[tuple[str, str], list[int]]()
        for place, (text, right) in enumerate(zip(texts, rights, strict=True)):
            found = answer_of(text)
            verdict = None if not right else False if found is None else compare(found, right)
            scores.append(None if not right else float(bool(verdict)))
            if verdict is None and right and found is not None and self._is_symbolic:
                open_pairs.setdefault((right, found), []).append(place)
        for equal, places in zip(self._symbolic(list(open_pairs)), open_pairs.values(), strict=True):
            for place in places:
                scores[place] = float(equal)
        return scores

    def close(self) -> None:
        """End the workers; whoever asks again has new ones."""
        if self._workers is not None:
            self._workers.close()
            self._workers = None

    def _symbolic(self, pairs: Sequence[tuple[str, str]]) -> list[bool]:
        if not pairs:
            return []
        if self._workers is None:
            self._workers = Workers(f"{__name__}:verifier", is_confined=True, **self._options)
        return [outcome.value is True for outcome in self._workers.map([[*map(normalise, pair)] for pair in pairs])]


def answer_of(response: str) -> str | None:
    """The answer of a response: its last boxed one, or else its last number; None where it has neither."""
    found = last_boxed(response)
    if found is not None:
        return found
    number = last_number(response)
    return None if number is None else f"{number:f}"


def reference_answer(reference: str) -> str | None:
    """The answer of a reference: boxed, or the whole of it; None where it is empty."""
    found = last_boxed(reference)
    return (reference if found is None else found).strip() or None


def last_boxed(text: str) -> str | None:
    r"""What stands in the \boxed{...} that begins last among those that are closed, or behind a last \boxed without braces; None: there is none.

    One pass over the text. Escaped braces are no braces.
    """
    opened: list[int | None] = []
    best: tuple[int, str | None] = (-1, None)
    place = -1
    for token in _TOKEN.finditer(text):
        if token[0] == "}":
            start = opened.pop() if opened else None
            if start is not None and start > best[0]:
                best = (start, text[start : token.start()])
        elif token[0] == "{":
            opened.append(None)
        elif token[0].endswith("{") and token[0] != r"\{":
            opened.append(token.end())
        elif token[0] == r"\boxed":
            place = token.start()
    bare = _BARE.match(text, place) if place > best[0] else None
    return bare[1] if bare else best[1]


def normalise(answer: str) -> str:
    r"""An answer in one of the ways in which it may be written: without blanks, $, \left and \right, units, `x =` of a single equation, thousands
    separators, a full stop; \dfrac as \frac, \frac12 and 1/2 as \frac{1}{2}."""
    text = answer.strip()[:_MAX_CHARACTERS]
    text = _WRITTEN.sub("", text).strip().rstrip(".").strip()
    for pattern, new in _REPLACED:
        text = pattern.sub(new, text)
    text = _UNIT.sub("", text)
    text = _WRAPPED.sub(r"\1", text)
    text = "".join(text.split())
    text = _SUFFIX.sub("", text).rstrip(".")
    named = _NAMED.match(text)
    if named and len(named[0]) < len(text) and not _RELATION.search(text, named.end()):
        text = text[named.end() :]
    if _THOUSANDS.fullmatch(text):
        text = text.replace(",", "")
    text = text.replace("{,}", "")
    if fraction := re.fullmatch(r"([-+]?)([0-9]+)/([0-9]+)", text):
        text = rf"{fraction[1]}\frac{{{fraction[2]}}}{{{fraction[3]}}}"
    return text


def compare(found: str, right: str) -> bool | None:
    """Whether two answers are equal as texts or as numbers; None where neither can say."""
    if max(len(found), len(right)) > _MAX_CHARACTERS:
        return found == right
    one, other = normalise(found), normalise(right)
    if one == other:
        return bool(one)
    if (based := [_BASED.fullmatch(text) for text in (one, other)]) != [None, None]:
        return all(based) and len({each.groups() for each in based if each}) == 1
    if {_opened(one), _opened(other)} in ({r"\{", "("}, {r"\{", "["}):
        return False
    value, wanted = _number(one), _number(other)
    if value is not None and wanted is not None:
        return value == wanted
    return None if 0 < len(one) <= _MAX_SYMBOLIC and 0 < len(other) <= _MAX_SYMBOLIC else False


def verifier() -> Callable[[str, str], bool]:
    """For a worker: whether math-verify takes a reference and an answer for the same."""
    import logging

    from math_verify import LatexExtractionConfig, parse, verify

    logging.disable()  # it warns that its own timeouts are off: ours end the process
    how: Any = {"extraction_config": [LatexExtractionConfig()], "parsing_timeout": None}

    def are_equal(right: str, found: str) -> bool:
        return bool(verify(parse(f"${right}$", **how), parse(f"${found}$", **how), timeout_seconds=None))

    are_equal("x+1", "1+x")  # what it loads when it first works is loaded before it may no longer write
    return are_equal


def _opened(text: str) -> str | None:
    """What opens a list of several: a set or an ordered one; None for anything else."""
    return next((opening for opening in (r"\{", "(", "[") if "," in text and text.startswith(opening) and text[-1] in ")]}"), None)


def _number(text: str) -> Fraction | None:
    found = _IS_NUMBER.fullmatch(text) if len(text) <= _MAX_DIGITS else None
    if found is None:
        return None
    sign, whole, above_sign, above, below_sign, below = found.groups()
    if whole is not None:
        value = Fraction(Decimal(whole))
    else:
        if not Decimal(below):
            return None
        value = Fraction(Decimal(above)) / Fraction(Decimal(below))
        value = -value if (above_sign == "-") != (below_sign == "-") else value
    return -value if sign == "-" else value
