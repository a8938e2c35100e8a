"""Rules about the form of a response, not its content: `format`, `length`, `regex`.

RE2 matches a pattern in time that is linear in the length of the text. It has no look-around and no
back-references. For patterns that need these, the oracle `regex` has `engine: python`: Python's `re` runs in
a worker, which is killed when it takes too long.
"""

import importlib.util
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, Literal

from oat.errors import ConfigError
from oat.oracles.callables import CallableOracle
from oat.oracles.rules.texts import completion_texts, prompt_messages
from oat.plugins.isolated_workers import Workers
from oat.types import Message, Opening

_GAP = "..."
_TAG = re.compile(r"(<(?:(?!\.\.\.)[^<>])+>)")


class _Shaped(CallableOracle):
    """A rule about the form of a response.

    Some templates begin the response in the prompt, as with `<think>`, and the model goes on from there. So a
    response has the form in two cases:

    1. The response has it together with what its prompt has written of it: all of that, or the part from a
       tag on that the prompt opens and does not close.
    2. The response has it alone, and does not contain such a tag once more.
    """

    def __init__(self, name: str, version: str):
        super().__init__(self.grade, name, reads_group=False)
        self.version = version
        self._opening: Callable[[Sequence[Message]], Opening] = lambda messages: Opening()

    def tell_opening(self, opening: Callable[[Sequence[Message]], Opening]) -> None:
        self._opening = opening

    def grade(self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float | None]:
        """Return one score for each completion. The signature is that of TRL's reward functions."""
        known: dict[str, Opening] = {}
        texts, owners = list[str](), list[int]()
        for place, (prompt, text) in enumerate(zip(prompts, completion_texts(completions), strict=True)):
            name = str(prompt)
            if name not in known:
                known[name] = self._opening(prompt_messages(prompt))
            forms = _with_opening(known[name], text)
            texts += forms
            owners += [place] * len(forms)
        scores = [0.0] * len(completions)
        for place, does in zip(owners, self.matches(texts), strict=True):
            scores[place] = max(scores[place], float(does))
        return [*scores]

    def matches(self, texts: Sequence[str]) -> list[bool]:
        """Return for each text whether it has the form."""
        raise NotImplementedError


class RegexRule(_Shaped):
    """The oracle `regex`: 1.0 for a response that matches a pattern, otherwise 0.0. What the prompt has
    written of the response, such as `<think>`, belongs to the response.

    Args:
        pattern: a regular expression; a dot matches any character, line ends included.
        match: "search" finds the pattern anywhere. "whole" requires that all of the response matches, apart
            from blanks at its ends.
        engine: "re2", or "python" for patterns that RE2 does not take.
        timeout_s: seconds for one response, with "python" only. A response that takes longer does not match.
        workers: number of processes that match, with "python" only.

    Raises:
        ConfigError: the pattern is no regular expression, an option is wrong, or google-re2 is needed and not
            installed.
    """

    def __init__(
        self,
        pattern: str,
        match: Literal["search", "whole"] = "search",
        engine: Literal["re2", "python"] = "re2",
        timeout_s: float = 1.0,
        workers: int = 1,
    ):
        super().__init__("regex", "2")
        if (
            not isinstance(pattern, str)
            or match not in ("search", "whole")
            or engine not in ("re2", "python")
        ):
            raise ConfigError(
                "the oracle regex takes a text as pattern, match search or whole, engine re2 or python; "
                f"not {pattern!r}, {match!r}, {engine!r}"
            )
        self._match = match
        if engine == "re2":
            self._matches: Callable[[Sequence[str]], list[bool]] = _linear(pattern, match)
            self.close: Callable[[], None] = lambda: None
            return
        pool = Workers(
            f"{__name__}:matcher", [pattern, match], count=workers, timeout_s=timeout_s, is_confined=True
        )
        self._matches = lambda texts: [
            outcome.value is True for outcome in pool.map([[text] for text in texts])
        ]
        self.close = pool.close

    def matches(self, texts: Sequence[str]) -> list[bool]:
        return self._matches([text.strip() for text in texts] if self._match == "whole" else texts)


class FormatRule(_Shaped):
    """The oracle `format`: 1.0 for a response with the form of a template or of a pattern, otherwise 0.0. All
    of the response must have the form, apart from blanks at its ends. What the prompt has written of the
    response, such as `<think>`, belongs to the response.

    Args:
        template: a text such as "<think>...</think> <answer>...</answer>". Each gap `...` matches any text
            that is not blank. Every tag, such as `<think>`, must occur exactly once in the response, in the
            order of the template. Blanks between and around tags do not count. The template's other words
            must occur unchanged, exactly once, between the same tags.
        pattern: a regular expression of RE2.

    Raises:
        ConfigError: neither a template nor a pattern is given, or both are; a template has no gap, or only
            gaps, or two gaps with only blanks between them; RE2 does not take the pattern, or google-re2 is
            not installed.
    """

    def __init__(self, template: str | None = None, pattern: str | None = None):
        form = pattern if template is None else template
        super().__init__("format", "3")
        if not isinstance(form, str) or not (template is None or pattern is None):
            raise ConfigError(
                'the oracle format takes a `template`, such as "<think>...</think><answer>...</answer>", '
                "or a `pattern`; give one"
            )
        if template is not None:
            literals = list(map(str.strip, template.split(_GAP)))
            if len(literals) < 2 or not all(literals[1:-1]) or not any(literals):
                raise ConfigError(
                    f"the template {template!r} of the oracle format needs tags with `...` between them, "
                    "such as <answer>...</answer>"
                )
            fills = _form(template)
            self._matches: Callable[[Sequence[str]], list[bool]] = lambda texts: list(map(fills, texts))
        else:
            self._matches = _linear(str(pattern), "whole")

    def matches(self, texts: Sequence[str]) -> list[bool]:
        return self._matches([text.strip() for text in texts])


class LengthRule(CallableOracle):
    """The oracle `length`: a reward for a length near a target, or a punishment for a response that is too
    long.

    Args:
        target: the length with reward 1. A response of length n gets 1 - |n - target| / target, at least 0.
        most, buffer: the soft over-long punishment of DAPO (arXiv:2503.14476, Eq. 13). The reward is 0 up to
            the length most - buffer, falls linearly to -1 at `most`, and is -1 beyond.
        unit: "tokens" (with the end of turn), "characters", or "words" (separated by blanks).

    Raises:
        ConfigError: neither `target` nor `most` is given, or both are; `most` is given without `buffer`, or
            `buffer` without `most`; a number is not a whole number from 1; `buffer` is greater than `most`;
            the unit is unknown.
    """

    def __init__(
        self,
        target: int | None = None,
        most: int | None = None,
        buffer: int | None = None,
        unit: Literal["tokens", "characters", "words"] = "tokens",
    ):
        super().__init__(
            self.grade_tokens if unit == "tokens" else self.grade_text, "length", reads_group=False
        )
        self.version = "1"
        given = [number for number in (target, most, buffer) if number is not None]
        if (
            unit not in ("tokens", "characters", "words")
            or (target is None) == (most is None)
            or (buffer is None) != (most is None)
        ):
            raise ConfigError(
                "the oracle length takes a `target`, or `most` with `buffer`, and a `unit`: tokens, "
                "characters or words"
            )
        if not all(isinstance(number, int) and number >= 1 for number in given) or (buffer or 0) > (
            most or math.inf
        ):
            raise ConfigError(
                f"the lengths {given} of the oracle length must be whole numbers from 1, and buffer at "
                "most `most`; correct them"
            )
        self._target = target
        self._most = most
        self._buffer = buffer
        self._unit = unit

    def grade_tokens(
        self, prompts: Sequence[Any], completions: Sequence[Any], completion_ids: Sequence[Sequence[int]]
    ) -> list[float | None]:
        """Return one score for each completion, from its number of tokens."""
        return [self._score(len(ids)) for ids in completion_ids]

    def grade_text(self, prompts: Sequence[Any], completions: Sequence[Any]) -> list[float | None]:
        """Return one score for each completion, from its number of characters or words."""
        return [
            self._score(len(text.split() if self._unit == "words" else text))
            for text in completion_texts(completions)
        ]

    def _score(self, size: int) -> float:
        if self._target is not None:
            return max(0.0, 1 - abs(size - self._target) / self._target)
        assert self._most is not None, "one of the two is given"
        assert self._buffer is not None, "given with `most`"
        return -min(1.0, max(0.0, (size - self._most + self._buffer) / self._buffer))


def _with_opening(opening: Opening, text: str) -> list[str]:
    """Return the texts of which one must have the form, if the response `text` is to have it."""
    starts = dict.fromkeys([0, *(opening.text.rfind(tag) for tag in opening.tags)] if opening.text else [])
    alone = [] if any(tag in text for tag in opening.tags) else [text]
    return [*alone, *(opening.text[start:] + text for start in starts)]


def matcher(pattern: str, match: str) -> Callable[[str], bool]:
    """Make the function by which workers match a text. It returns True if the text matches the pattern by
    Python's `re`.

    Args:
        match: "whole": the pattern must match the complete text. Otherwise a match within the text is enough.

    Raises:
        ConfigError: the pattern is no regular expression.
    """
    try:
        found = re.compile(pattern, re.DOTALL)
    except (re.error, RecursionError, OverflowError) as error:
        raise ConfigError(f"the pattern {pattern!r} is no regular expression: {error}; correct it") from error
    test = found.fullmatch if match == "whole" else found.search
    return lambda text: test(text) is not None


def _linear(pattern: str, match: str) -> Callable[[Sequence[str]], list[bool]]:
    """Return a function. It gets texts, and returns a list: for each text, True if the pattern matches the
    text. RE2 does the matching.

    Raises:
        ConfigError: RE2 does not take the pattern, or google-re2 is not installed.
    """
    if importlib.util.find_spec("re2") is None:
        raise ConfigError(
            "patterns need the package google-re2, which is not installed; pip install "
            "'oat-align[regex]', or the oracle regex with `engine: python`"
        )
    import re2

    options = re2.Options()
    options.dot_nl, options.log_errors = True, False
    try:
        found = re2.compile(pattern, options)
    except re2.error as error:
        said = error.args[0].decode() if error.args and isinstance(error.args[0], bytes) else error
        raise ConfigError(
            f"RE2 does not take the pattern {pattern!r}: {said}; correct it, or match it by the oracle "
            "regex with `engine: python`"
        ) from error
    test = found.fullmatch if match == "whole" else found.search
    return lambda texts: [test(text) is not None for text in texts]


def _form(template: str) -> Callable[[str], bool]:
    """Return a function that returns True if a text has the form of a template.

    A template is, for example, "<think>...</think> The answer is ...". Its tags split the template and the
    text into stretches. Each stretch of the text must have the words of the template's stretch, and for each
    `...` a text that is not blank. The same words may occur in several stretches.
    """
    pieces = _TAG.split(template)
    part, fits = _parter(pieces[1::2]), [_stretch(piece) for piece in pieces[::2]]

    def fills(text: str) -> bool:
        found = part(text)
        return found is not None and all(fit(own) for fit, own in zip(fits, found, strict=True))

    return fills


def _stretch(template: str) -> Callable[[str], bool]:
    """Return a function that returns True if a text has the form of one stretch of a template: its words, and
    for each gap a text that is not blank. A stretch is the part between two tags, before the first tag, or
    after the last tag."""
    literals = template.split(_GAP)
    if len(literals) == 1:
        return lambda text: text.split() == template.split()
    wanted = list(map(str.strip, literals))
    part = _parter([words for words in wanted if words])
    is_gap = [
        *([False] if wanted[0] else []),
        *[True] * (len(literals) - 1),
        *([False] if wanted[-1] else []),
    ]

    def fits(text: str) -> bool:
        found = part(text)
        return found is not None and [bool(own.strip()) for own in found] == is_gap

    return fits


def _parter(literals: Sequence[str]) -> Callable[[str], list[str] | None]:
    """Return a function that splits a text at these literals and returns the pieces before, between and after
    them. It returns None if the literals that occur in the text are not exactly these, in this order.

    White space within a literal matches any white space. If a literal begins with a letter, no letter may
    come directly before it in the text. If a literal ends with a letter, no letter may come directly after
    it.
    """
    if not literals:
        return lambda text: [text]
    wanted = [" ".join(literal.split()) for literal in literals]
    patterns = [
        r"\s+".join(map(re.escape, words.split())) for words in sorted(set(wanted), key=len, reverse=True)
    ]
    pattern = re.compile(
        "|".join(
            rf"(?:(?<![a-zA-Z])|(?![a-zA-Z])){words}(?:(?<![a-zA-Z])|(?![a-zA-Z]))" for words in patterns
        )
    )

    def part(text: str) -> list[str] | None:
        found = list(pattern.finditer(text))
        if [" ".join(each[0].split()) for each in found] != wanted:
            return None
        begins, ends = [0, *(each.end() for each in found)], [*(each.start() for each in found), len(text)]
        return [text[begin:end] for begin, end in zip(begins, ends, strict=True)]

    return part
