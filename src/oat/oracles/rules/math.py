r"""The rule of MATH (Hendrycks et al., arXiv:2103.03874): a response is right if its last boxed answer is
that of the reference.

The answer of a response is the content of its last closed \boxed{...} (or \fbox) with balanced braces, or
else its last number. Two answers are compared in this order:

1. After `normalise` (`latex.py`), two equal texts are equal answers.
2. Two numbers are compared exactly: whole, decimal and repeating decimal numbers, fractions, mixed numbers.
3. If `symbolic` is True, math-verify compares any other two answers as mathematics.

Some kinds of answers have rules of their own:

* A number with a base (`2516_8`) equals only the same digits in the same base.
* Matrices are equal if their kinds, their shapes and all their cells are equal. Round and square brackets are
  the same kind; the lines of a determinant are another kind.
* Text before a matrix is removed if both answers begin with this text and `=`, or if it is a plain name
  (`A^{-1} =`). With any other text before its matrix (`2x =`), an answer does not equal the matrix alone.
* Lists, sets and tuples are compared as texts first, and then element by element. Sets, and lists without
  brackets, are compared in any order. A set never equals an ordered list.

Math-verify parses LaTeX. Its simplifications may never end, and similar parsers evaluate the text as code. So
it runs in confined workers, which are killed when they take too long (`plugins/isolated_workers.py`). It
never gets a text of more than 300 characters. An answer that cannot be compared in time is wrong (0.0), and
not "failed": otherwise a text that hangs the parser would be worth more than a wrong answer.

Departures from the grader that comes with the data set:
1. Percent signs, degrees and units after an answer are ignored, in the response and in the reference: 50\%
   equals 50.
2. If a response has no box, its last number counts.
3. Two numbers are compared exactly: neither 0.3333 nor 0.333333 is 1/3. A number and another expression are
   compared by math-verify, which rounds to six digits: 1.414214 equals \sqrt{2}.
4. 1\frac{1}{2} is a mixed number, as in the data set, and not a product, as in LaTeX.
5. Words that are marked as text (\text) are compared without regard to capitals.
6. Units are words from our own list, or words that are marked as text. The units of math-verify are turned
   off, because single letters are among them (3t would equal 3).
"""

import importlib.util
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction
from itertools import chain
from typing import Any

from oat.errors import ConfigError
from oat.oracles.callables import CallableOracle
from oat.oracles.rules.gsm8k import last_number
from oat.oracles.rules.latex import MAX_CHARACTERS, Listed, is_relation, listed, matrix, normalise, unnamed
from oat.oracles.rules.references import reference_text
from oat.oracles.rules.texts import completion_texts
from oat.plugins.isolated_workers import Workers, check_limits

_TOKEN = re.compile(r"\\(?:boxed|fbox)\s*\{|\\(?:[a-zA-Z]+|.)|[{}]", re.DOTALL)
_BARE = re.compile(r"\\boxed\s+([^\s${}\\]+)")
_MAX_SYMBOLIC, _MAX_DIGITS = 300, 100
_WHOLE = r"[0-9]*\.?[0-9]+|[0-9]+\."
_NUMBER = re.compile(rf"([-+]?)(?:({_WHOLE})|\\frac\{{([-+]?(?:{_WHOLE}))\}}\{{([-+]?(?:{_WHOLE}))\}})")
_MIXED = re.compile(r"([-+]?)([0-9]+)\\frac\{([0-9]+)\}\{([0-9]+)\}")
_REPEATING = re.compile(r"([-+]?)([0-9]*)\.([0-9]*)\\overline\{([0-9]+)\}")
_BASED = re.compile(r"\(?([-+]?[0-9][0-9a-zA-Z]*)\)?_\{?([0-9]+)\}?")
_WORDED = re.compile(r"\\(?:text|mbox)")

Prove = Callable[[str, str], bool | None]
"""A function that says whether two normalised answers are equal; None: undecided."""


class MathRule(CallableOracle):
    r"""The oracle `math`: 1.0 for a right answer, otherwise 0.0. None if the prompt's
    record has no reference answer.

    A reference answer is a final answer (`\frac{1}{2}`), or a complete solution with its answer boxed.

    Args:
        timeout_s: seconds that one comparison by math-verify may take.
        workers: number of processes that compare.
        symbolic: True: also compare by math-verify. False: compare texts and numbers only, which does not
            need math-verify.

    Raises:
        ConfigError: math-verify is needed and not installed, or a number is not above 0.
    """

    def __init__(self, timeout_s: float = 5.0, workers: int = 1, symbolic: bool = True):
        super().__init__(self.grade, "math", reads_group=False)
        check_limits(workers=workers, timeout_s=timeout_s)
        self.version = "4"
        self._options: dict[str, Any] = {"timeout_s": timeout_s, "count": workers}
        self._workers: Workers | None = None
        self._is_symbolic = symbolic
        if symbolic and importlib.util.find_spec("math_verify") is None:
            raise ConfigError(
                "math needs the package math-verify, which is not installed; pip install "
                "'oat-align[math]', or set `symbolic: false` to compare "
                "texts and numbers only"
            )

    def grade(
        self, prompts: Sequence[Any], completions: Sequence[Any], reference: Sequence[Any], **columns: Any
    ) -> list[float | None]:
        """Return one score for each completion; None if its reference answer is missing or blank. The
        signature is that of TRL's reward functions.

        Args:
            completions: texts; for conversations, lists that hold one assistant message.
        """
        texts = completion_texts(completions)
        written = map(reference_text, reference)
        rights = [None if answer is None else reference_answer(answer) for answer in written]
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
        """End the workers. A later question starts new ones."""
        if self._workers is not None:
            self._workers.close()
            self._workers = None

    def _symbolic(self, pairs: Sequence[tuple[str, str]]) -> list[bool]:
        if not pairs:
            return []
        if self._workers is None:
            self._workers = Workers(f"{__name__}:verifier", is_confined=True, **self._options)
        return [
            outcome.value is True
            for outcome in self._workers.map([[*map(normalise, pair)] for pair in pairs])
        ]


def answer_of(response: str) -> str | None:
    """Return the answer of a response: the last boxed answer, or else the last number. Return None if the
    response has neither."""
    found = last_boxed(response)
    if found is not None:
        return found
    number = last_number(response)
    return None if number is None else f"{number:f}"


def reference_answer(reference: str) -> str | None:
    """Return the answer of a reference: the last boxed answer, or the complete reference if no answer is
    boxed. Return None if the answer is empty."""
    found = last_boxed(reference)
    return (reference if found is None else found).strip() or None


def last_boxed(text: str) -> str | None:
    r"""Return the content of the closed \boxed{...} or \fbox{...} that begins last. If a \boxed without
    braces comes later, return the word after it. Return None if there is neither.

    This takes one pass over the text. Escaped braces do not count.
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


def compare(found: str, right: str) -> bool | None:
    """Compare two answers as texts and as numbers; compare lists and matrices element by element. Return True
    if the answers are equal, False if they are unequal, and None if math-verify has to decide."""
    if max(len(found), len(right)) > MAX_CHARACTERS:
        return found == right
    one, other = normalise(found), normalise(right)
    if (
        min(len(one), len(other)) > 2
        and (one + other).isalpha()
        and (_WORDED.search(found) or _WORDED.search(right))
    ):
        return one.casefold() == other.casefold()
    return agree(one, other, lambda one, other: None if max(len(one), len(other)) <= _MAX_SYMBOLIC else False)


def agree(one: str, other: str, prove: Prove) -> bool | None:
    """Compare two normalised answers. Return True if they are equal, False if they are unequal, None if this
    is undecided. `prove` is called for parts that texts and numbers do not decide."""
    if one == other or not one or not other:
        return bool(one) and one == other
    based = [_BASED.fullmatch(one), _BASED.fullmatch(other)]
    if based != [None, None]:
        return all(based) and len({each.groups() for each in based if each}) == 1
    value, wanted = _number(one), _number(other)
    if value is not None and wanted is not None:
        return value == wanted
    if "matrix}" in one + other:
        return _matrices_agree(one, other, prove)
    if max(one.count(":"), other.count(":")) > 1:
        return _all_agree(one.split(":"), other.split(":"), prove)
    verdict = _lists_agree(listed(one), listed(other), prove)
    return prove(one, other) if verdict is None else verdict


def verifier() -> Callable[[str, str], bool]:
    """Make the function that workers call. It gets a normalised reference and a normalised answer, and
    returns True if `agree` and math-verify find them equal."""
    import logging

    from math_verify import LatexExtractionConfig, parse, verify

    logging.disable()  # math-verify warns that its timeouts are off; the pool's timeout replaces them
    usual: Any = LatexExtractionConfig()
    # with units, t would be a unit in 3t
    read = replace(usual, normalization_config=replace(usual.normalization_config, units=False))
    how: Any = {"extraction_config": [read], "parsing_timeout": None}

    def are_equal(right: str, found: str) -> bool:
        return bool(verify(parse(f"${right}$", **how), parse(f"${found}$", **how), timeout_seconds=None))

    are_equal("x+1", "1+x")  # loads modules now, while the worker may still write files
    return lambda right, found: bool(agree(right, found, are_equal))


def _all_agree(ones: Sequence[str], others: Sequence[str], prove: Prove) -> bool | None:
    """Compare two lists of expressions, place by place. Return False if the lengths differ, or if the
    expressions at a place are unequal. Otherwise return None if a place is undecided, else True."""
    if len(ones) != len(others):
        return False
    verdicts = {agree(one, other, prove) for one, other in zip(ones, others, strict=True)}
    return False if False in verdicts else None if None in verdicts else True


def _matrices_agree(one: str, other: str, prove: Prove) -> bool | None:
    """Compare two answers of which at least one has a matrix. Return True if they are equal, False if they
    are unequal, None if this is undecided.

    1. If the answers have the same text before their last `=`, and each has exactly one matrix after it, this
       text and the `=` are removed.
    2. If an answer has a plain name before its first `=` (`unnamed`), the name and the `=` are removed.
    3. If each answer is now exactly one matrix, the matrices are compared cell by cell. They are unequal if
       their kinds or shapes differ.
    4. Otherwise the answers are unequal if only one of them has a matrix, or if only one of them states a
       relation. In all other cases `prove` decides.
    """
    (before, _, one_side), (also, _, other_side) = one.rpartition("="), other.rpartition("=")
    if before and before == also and matrix(one_side) and matrix(other_side):
        one, other = one_side, other_side
    one, other = unnamed(one), unnamed(other)
    left, right = matrix(one), matrix(other)
    if left is None or right is None:
        return (
            prove(one, other)
            if "matrix}" in one and "matrix}" in other and is_relation(one) == is_relation(other)
            else False
        )
    if (left[0], [*map(len, left[1])]) != (right[0], [*map(len, right[1])]):
        return False
    return _all_agree([*chain(*left[1])], [*chain(*right[1])], prove)


def _lists_agree(one: Listed | None, other: Listed | None, prove: Prove) -> bool | None:
    """Compare two lists. Return True if the elements are equal: in order if both lists are ordered and have
    the same brackets, in any order if neither list is ordered. Return False if one is a set and the other is
    ordered. Return None in all other cases, which are undecided."""
    if one is None or other is None:
        return None
    if one.fence != other.fence:
        return False if one.is_set or other.is_set else None
    if one.fence or len(one.elements) != len(other.elements):
        return _all_agree(one.elements, other.elements, prove) or None
    left = list(other.elements)
    for element in one.elements:
        place = next(
            (place for place, candidate in enumerate(left) if agree(element, candidate, prove)), None
        )
        if place is None:
            return None
        del left[place]
    return True


def _number(text: str) -> Fraction | None:
    if len(text) > _MAX_DIGITS:
        return None
    if found := _NUMBER.fullmatch(text):
        sign, whole, above, below = found.groups()
        if whole is None and not Decimal(below):
            return None
        value = (
            Fraction(Decimal(above)) / Fraction(Decimal(below)) if whole is None else Fraction(Decimal(whole))
        )
    elif found := _MIXED.fullmatch(text):
        sign, whole, above, below = found.groups()
        if int(above) >= int(below):
            return None
        value = int(whole) + Fraction(int(above), int(below))
    elif found := _REPEATING.fullmatch(text):
        sign, whole, before, again = found.groups()
        value = Fraction(int(again), 10 ** len(before) * (10 ** len(again) - 1)) + Fraction(
            Decimal(f"{whole or 0}.{before or 0}")
        )
    else:
        return None
    return -value if sign == "-" else value
