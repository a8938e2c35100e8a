r"""The notation of answers in LaTeX: a normal form of an answer, and the parts of matrices and lists.

No function here computes the value of an answer. Only the first `MAX_CHARACTERS` of an answer are read,
because the time of some patterns may grow with the square of the length.
"""

import re
from typing import Any, NamedTuple

MAX_CHARACTERS = 10_000
"""Largest number of characters of an answer that are read."""
_MAX_ELEMENTS = 32
_MAX_ENCLOSING = 4
_MAX_NAME = 60

_TEXT = r"\\(?:text|mbox|textbf|textrm|textit|textnormal|mathrm|mathbf|mathit|boldsymbol)"
_LENGTH = r"[-+]?(?:[0-9.]+\s?[a-z]{2}|[0-9.]*\s?\\(?:[a-z]*skip(?:amount)?|jot)(?![a-zA-Z]))"
_ARGUMENT = re.compile(
    r"\\(?:(?P<unseen>[hv]?phantom|[hv]space ?\*?|mspace|noalign|cline)"
    r"|(?P<matrix>[pbBvV]?(?:small)?matrix|array)) ?\{|\\(?:[a-zA-Z]+|.)|[{}]"
)
_LAYOUT = re.compile(
    rf"(?P<row>\\\\\s?\*?(?:\s?\[\s?{_LENGTH}\s?\])?|\\(?:cr|newline|tabularnewline)(?![a-zA-Z]))"
    rf"|(?P<blank>\\[,;:>\s]|\\(?:q?quad|thinspace)(?![a-zA-Z])|~|\\(?:m?kern|[hm]skip)\s?{_LENGTH})"
    r"|\\(?:left|right|middle|[bB]igg?[lrm]?|displaystyle|textstyle|limits|mathopen|mathclose|hline"
    r"|(?:math)?strut)(?![a-zA-Z])|\\!|\\?\$|\\[()\[\]]"
)
_BRACKETS = {"lbrack": "[", "rbrack": "]", "lparen": "(", "rparen": ")", "lbrace": r"\{", "rbrace": r"\}"}
_STACKED = {"over": "frac", "choose": "binom"}
_BASES = (
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
)
_REPLACED: list[tuple[re.Pattern[str], Any]] = [
    (re.compile("\u2212"), "-"),
    (re.compile(r"\\[dtc]frac(?![a-zA-Z])"), r"\\frac"),
    (re.compile(rf"\\({'|'.join(_BRACKETS)})(?![a-zA-Z])"), lambda found: _BRACKETS[found[1]]),
    (re.compile(r"\\(le|ge|ne)(?:q|qq|qslant)?(?![a-zA-Z])"), r"\\\1q"),
    (re.compile(r"\\not ?="), r"\\neq"),
    (re.compile(r"\\bigcup(?![a-zA-Z])"), r"\\cup"),
    (re.compile(r"\\varnothing(?![a-zA-Z])|\\\{ ?\\\}"), r"\\emptyset"),
    (re.compile(r"(?<=[0-9])\{,\}(?=[0-9])"), ""),
    (re.compile(r"\{([,:])\}"), r"\1"),
    (
        re.compile(r"\{([^{}]*)\\(over|choose)(?![a-zA-Z])([^{}]*)\}"),
        lambda found: rf"\{_STACKED[found[2]]}{{{found[1]}}}{{{found[3]}}}",
    ),
    (re.compile(r"\\sqrt ?(\[[0-9a-z]\])? ?([0-9a-zA-Z])"), r"\\sqrt\1{\2}"),
    (re.compile(r"\\frac ?([0-9a-zA-Z]) ?([0-9a-zA-Z])"), r"\\frac{\1}{\2}"),
    (re.compile(r"\\frac ?([0-9a-zA-Z]) ?\{"), r"\\frac{\1}{"),
    (re.compile(r"(\\frac ?\{[^{}]*\}) ?([0-9a-zA-Z])"), r"\1{\2}"),
    (re.compile(r"(?<![0-9./])([0-9]+) ([0-9]+)/([0-9]+)"), r"\1\\frac{\2}{\3}"),
    (
        re.compile(rf"_ ?\{{ ?{_TEXT} ?\{{ ?({'|'.join(_BASES)}) ?\}} ?\}}"),
        lambda found: f"_{{{_BASES.index(found[1]) + 2}}}",
    ),
    (
        re.compile(rf"(?:, ?)?(?:{_TEXT} ?\{{ ?(?:, ?(?:and|or)?|and|or) ?\}}|(?<= )(?:and|or)(?= )) ?,?"),
        ", ",
    ),
]
_UNIT_WORDS = (
    "cm|mm|km|ft|inch|inches|feet|foot|meters?|metres?|miles?|yards?|yd|units?|degrees?|percent|cents?"
    "|dollars?|hours?|hrs?|minutes?|mins?|seconds?|secs?|days?|weeks?|months?|years?|pounds?|lbs?|ounces?|oz"
    "|gallons?|liters?|litres?|grams?|kg|mg|mph|radians?|points?|people|students?|ways"
)
_UNIT = re.compile(
    rf" ?(?:{_TEXT} ?\{{(?! ?[ie] ?\}})[^{{}}]*\}}"
    rf"|(?<=[0-9)}} ])(?:(?:square|cubic|sq)\.? )?(?:{_UNIT_WORDS})|(?<= )in)\.?(?: ?\^ ?\{{?[0-9]\}}?)?$"
)
_QUANTITY = re.compile(r"[0-9]|\\pi(?![a-zA-Z])")
_WRAPPED = re.compile(rf"(?:{_TEXT}|\\boxed|\\fbox) ?\{{([^{{}}]*)\}}")
_ENCLOSING = re.compile(rf"(?:{_TEXT} ?)?\{{")
_SUFFIX = re.compile(r"(?:\^\{?(?:\\circ|o)\}?|\\degree|\u00b0|\\?%){1,3}$")
_RELATION = re.compile(r"=|\\in(?![a-zA-Z])")
_NAMED = re.compile(r"(?:[a-zA-Z](?:_\{?[0-9a-zA-Z]\}?)?|\((?:\\?[a-z]+,)+\\?[a-z]+\))(?:=|\\in(?![a-zA-Z]))")
_THOUSANDS = re.compile(r"[-+]?[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?")
_BLANKS = re.compile(r"(\\[a-zA-Z]+) (?=[a-zA-Z])| ")
_BODY = r"((?:(?!\\begin|\\end).)*)"
_ENVIRONMENT = re.compile(
    r"(?:(\(|\[|\\\{|\\?\||\\[lr]?[vV]ert(?![a-zA-Z])) ?)?"
    r"\\begin ?\{(([pbBvV]?)(?:small)?matrix\*?|array)\} ?(?:\[[a-z]\])?"
    + _BODY
    + r"\\end ?\{\2\}(?: ?(\)|\]|\\\}|\\?\||\\[lr]?[vV]ert(?![a-zA-Z])))?"
)
_GREEK = (
    r"\\(?:var)?(?:alpha|beta|gamma|delta|epsilon|zeta|eta|theta|iota|kappa|lambda|mu|nu|xi|pi|rho|sigma"
    r"|tau|upsilon|phi|chi|psi|omega"
    r"|Gamma|Delta|Theta|Lambda|Xi|Pi|Sigma|Upsilon|Phi|Psi|Omega|ell)(?![a-zA-Z])"
)
_LETTER = rf"(?:[a-zA-Z]|{_GREEK})"
_BELOW = (
    rf"_(?:[0-9]|{_LETTER}|\\(?:perp|parallel)(?![a-zA-Z])"
    rf"|\{{(?:[0-9a-zA-Z,]+|{_GREEK}|\\(?:perp|parallel))\}})"
)
_SIGN = r"(?:-1|T|\*|'|\\(?:top|intercal|dagger|ast|prime)(?![a-zA-Z]))"
_NAME = rf"{_LETTER}'?'?(?:{_BELOW})?(?:\^(?:{_SIGN}|\{{{_SIGN}\}}))?(?:{_BELOW})?"
_IS_NAME = re.compile(_NAME)
_DECORATED = re.compile(
    r"\\(?:mathbf|mathrm|mathit|boldsymbol|bm|pmb|mathbb|mathcal|mathsf"
    r"|vec|hat|bar|tilde|widehat|widetilde|over(?:rightarrow|line)|underline)"
    rf"(?: ?{_LETTER}|\{{{_NAME}\}})"
    r"|\\(?:vec|over(?:rightarrow|line))\{[a-zA-Z]{2}\}"
    rf"|\{{\\(?:bf|rm|it) ?{_LETTER}\}}"
)
_TRANSPOSED = re.compile(r"\\(?:mathsf|mathtt)(?: ?T|\{T\})")
_RELATED = re.compile(
    r"[=<>]|\\(?:neq?|leq?|geq?|[lg]t|approx|equiv|cong|sim(?:eq)?|propto|(?:not)?in|iff|implies"
    r"|Rightarrow)(?![a-zA-Z])"
)
_MATRIX = re.compile(r"\\begin\{(.)matrix\}" + _BODY + r"\\end\{\1matrix\}")
_BEHIND, _BEHIND_MATRIX = re.compile(r"(?:[. ]|\\\\)*"), re.compile(r"(?:[.,; ]|\\\\)*")
_FENCES = {"": "p", "p": "p", "b": "p", "(": "p", "[": "p", r"\{": "B", "|": "v", r"\|": "V"}
_TOKEN = re.compile(r"\\[{}]|[][(){},]")


class Listed(NamedTuple):
    r"""An answer with several elements.

    Attributes:
        fence: the two brackets, such as "()" or "[)", if the order of the elements counts. "" for a set in
            braces, and for a list without brackets.
        is_set: True if the elements are in the braces of a set.
        elements: the texts of the elements.
    """

    fence: str
    is_set: bool
    elements: list[str]


def normalise(answer: str) -> str:
    r"""Return the normal form of an answer:

    * These are removed: $, \left and \right, units, thousands separators, the `x =` of a single equation, and
      full stops and row ends at the end.
    * Blanks are removed, except between a command and a letter.
    * \dfrac becomes \frac; \frac12 and 1/2 become \frac{1}{2}.
    * A matrix becomes an environment such as `\begin{pmatrix}a&b\\c&d\end{pmatrix}`. Its letter, here p,
      is the kind that the function `matrix` returns.
    """
    text = _LAYOUT.sub(_layout, _arguments(" ".join(answer[:MAX_CHARACTERS].split())))
    text = _ENVIRONMENT.sub(_canonical, _without_end(" ".join(text.split())))
    for pattern, new in _REPLACED:
        text = pattern.sub(new, text)
    text = _without_unit(_opened(text.strip()))
    text = _WRAPPED.sub(r"\1", text).strip()
    text = ", ".join(
        part.replace(",", "") if _THOUSANDS.fullmatch(part) else part for part in text.split(", ")
    )
    text = _SUFFIX.sub("", _BLANKS.sub(lambda found: f"{found[1]} " if found[1] else "", text)).rstrip(".")
    named = _NAMED.match(text)
    if named and len(named[0]) < len(text) and not _RELATION.search(text, named.end()):
        text = text[named.end() :]
    if _THOUSANDS.fullmatch(text):
        text = text.replace(",", "")
    if fraction := re.fullmatch(r"([-+]?)([0-9]+)/([0-9]+)", text):
        text = rf"{fraction[1]}\frac{{{fraction[2]}}}{{{fraction[3]}}}"
    return text


def matrix(text: str) -> tuple[str, list[list[str]]] | None:
    """Return the kind of a normalised matrix, and its rows; None if the text is not exactly one matrix. The
    kinds are p (round or square brackets, or no brackets), B (braces), v and V (lines)."""
    found = _MATRIX.fullmatch(text)
    return (found[1], [row.split("&") for row in found[2].split(r"\\")]) if found else None


def unnamed(text: str) -> str:
    r"""Return a normalised answer without the plain name at its beginning and the `=` after this name. Plain
    names are `A`, `\vec{v}`, `A_1`, `A^{-1}` and `A^T`, but not `2x`, `A^2` or `AB`. If an answer does not
    begin with a plain name and `=`, return it unchanged."""
    name, equals, rest = text.partition("=")
    if not equals or len(name) > _MAX_NAME:
        return text
    name = _TRANSPOSED.sub("T", name)
    for _ in range(_MAX_ENCLOSING):
        name = _DECORATED.sub("v", name)
    return rest if _IS_NAME.fullmatch(name) else text


def is_relation(text: str) -> bool:
    r"""Return True if a normalised answer states a relation, such as `x<2` or `x\in A`."""
    return _RELATED.search(text) is not None


def listed(text: str) -> Listed | None:
    """Return the elements of a normalised list, set, tuple or interval, if there are at least two and at most
    `_MAX_ELEMENTS`. Return None for any other text."""
    places = [0]
    depth = 0
    closed_at = len(text)
    first = _TOKEN.match(text)
    is_fenced = first is not None and first[0] in (r"\{", "(", "[")
    outer: list[int] = []
    inner: list[int] = []
    for token in _TOKEN.finditer(text):
        if token[0] == ",":
            (outer if depth == 0 else inner if depth == 1 else []).append(token.start())
        elif token[0] in (r"\{", "(", "[", "{"):
            depth += 1
        else:
            depth -= 1
            closed_at = min(closed_at, token.end()) if depth == 0 else closed_at
    if depth:
        return None
    if is_fenced and first is not None and closed_at == len(text):
        end = len(text) - (2 if text.endswith(r"\}") else 1)
        places, commas = [first.end()], inner
        is_set, fence = first[0] == r"\{", "" if first[0] == r"\{" else first[0] + text[-1]
    else:
        end = len(text)
        commas = outer
        is_set = False
        fence = ""
    if not 0 < len(commas) < _MAX_ELEMENTS:
        return None
    places += [place + 1 for place in commas]
    return Listed(
        fence, is_set, [text[start:stop] for start, stop in zip(places, [*commas, end], strict=True)]
    )


def _layout(found: re.Match[str]) -> str:
    return r" \\ " if found["row"] else " " if found["blank"] else ""


def _arguments(text: str) -> str:
    r"""Return the text without commands that only leave space, such as \phantom{-} and \hspace{2mm}. Matrices
    of plain TeX, such as \pmatrix{1 \cr 2}, become environments."""
    parts = list[str]()
    opened = list[tuple[str, str, int]]()
    place = 0
    for token in _ARGUMENT.finditer(text):
        parts.append(text[place : token.start()])
        place = token.end()
        if token[0].endswith("{") and token[0] != r"\{":
            opened.append((token["unseen"] or "", token["matrix"] or "", len(parts)))
        unseen, kind, first = opened.pop() if token[0] == "}" and opened else ("", "", 0)
        if unseen:
            del parts[first:]
        elif kind:
            kind = "matrix" if kind == "array" else kind
            parts[first] = rf"\begin{{{kind}}}"
        parts.append(" " if unseen else rf"\end{{{kind}}}" if kind else token[0])
    return "".join(parts) + text[place:]


def _without_end(text: str) -> str:
    """Remove blanks, full stops and LaTeX's line breaks from the end of a text. If the text has an
    environment of LaTeX, also remove commas and semicolons from its end."""
    behind = _BEHIND_MATRIX if r"\end" in text else _BEHIND
    found = behind.match(text[::-1])
    return text[: len(text) - found.end()] if found else text


def _canonical(found: re.Match[str]) -> str:
    opening, kind, letter, body, closing = found.groups(default="")
    before, after = opening, closing
    fence = letter
    if not letter and opening and closing:
        before = ""
        after = ""
        fence = re.sub(r"\\[lr]?([vV])ert", lambda line: "|" if line[1] == "v" else r"\|", opening)
    if kind == "array":
        body = _without_columns(body.lstrip())
    rows = body.split(r"\\")
    if len(rows) > 1 and not rows[-1].strip():
        rows.pop()
    cells = r"\\".join("&".join(normalise(cell) for cell in row.split("&")) for row in rows)
    sort = _FENCES.get(fence, fence)
    return rf"{before}\begin{{{sort}matrix}}{cells}\end{{{sort}matrix}}{after}"


def _without_columns(body: str) -> str:
    """Return the body of an array without its column specification, which may have nested braces."""
    depth = 0
    for token in _TOKEN.finditer(body) if body.startswith("{") else ():
        depth += {"{": 1, "}": -1}.get(token[0], 0)
        if not depth:
            return body[token.end() :]
    return body


def _opened(text: str) -> str:
    r"""Return the text without the braces that enclose all of it. A command before them, as in \mathbf{...},
    is removed too."""
    for _ in range(_MAX_ENCLOSING):
        opening = _ENCLOSING.match(text)
        if opening is None or not text.endswith("}"):
            return text
        depth = 1
        for token in _TOKEN.finditer(text, opening.end(), len(text) - 1):
            depth += {"{": 1, "}": -1}.get(token[0], 0)
            if not depth:
                return text
        text = text[opening.end() : -1].strip()
    return text


def _without_unit(text: str) -> str:
    unit = _UNIT.search(text)
    return text[: unit.start()] if unit and _QUANTITY.search(text, 0, unit.start()) else text
