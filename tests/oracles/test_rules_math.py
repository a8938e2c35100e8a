"""The rule of MATH: how it finds the answer, which answers are equal, and how it handles hostile answers."""

import importlib.util
import random
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import math_answers
import pytest
from cpu_time import seconds
from hypothesis import given, settings
from hypothesis import strategies as st

from oat.errors import ConfigError
from oat.oracles.make import build_oracle
from oat.oracles.rules.math import MathRule, answer_of, compare, last_boxed, normalise, reference_answer
from oat.types import Key, Message, Question

pytestmark = [pytest.mark.inventory(87)]
SETTINGS = settings(derandomize=True, deadline=None, max_examples=200)
needs_math_verify = pytest.mark.skipif(
    importlib.util.find_spec("math_verify") is None, reason="math-verify is not installed"
)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{5}", "5"),
        (r"\boxed{1} then \boxed{2}.", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (
            r"\boxed{\frac{\sqrt{a_{1}^{2}}}{\left\{ b \right\}}}",
            r"\frac{\sqrt{a_{1}^{2}}}{\left\{ b \right\}}",
        ),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\text{a} \} b}", r"\text{a} \} b"),
        (r"\fbox{7}", "7"),
        (r"\boxed {8}", "8"),
        (r"$\boxed 9$", "9"),
        (r"\boxed{1} and \boxed 3.5$", "3.5"),
        (r"\boxed{\boxed{5}}", "5"),
        (r"\boxed{3} and \boxed{4", "3"),
        (r"\boxed{\boxed{6}", "6"),
        (r"} } \boxed{4} {", "4"),
        (r"\boxed{}", ""),
        (r"\\boxed{5}", None),
        (r"\boxedx{5}", None),
        ("no box", None),
        ("", None),
        (r"\boxed{", None),
    ],
)
def test_the_last_box_that_is_closed(text: str, answer: str | None) -> None:
    assert last_boxed(text) == answer


def test_without_a_box_the_last_number_counts() -> None:
    assert (answer_of("3 + 4 = 7"), answer_of("it is $1,234.50."), answer_of("none")) == (
        "7",
        "1234.50",
        None,
    )
    assert reference_answer(r"We get $\boxed{x^2}$.") == "x^2"
    assert (reference_answer(" 5 "), reference_answer(" ")) == ("5", None)


COLUMN = r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"
NOT_NAMES = [
    *(
        "-x=",
        "2x=",
        "=",
        "3=",
        "x+y=",
        "AB=",
        r"\mathbf{AB}=",
        "A^2=",
        "A^{-2}=",
        "-A^{-1}=",
        "A^{-1}b=",
        "A_1A_2=",
        r"\vec{a}\vec{b}=",
        r"2\mathbf{v}=",
    ),
    *(
        r"A \neq B = ",
        r"A \neq ",
        r"A \not= ",
        r"A \le B = ",
        r"A \approx ",
        "v=-x=",
        "A,B=",
        "f(x)=",
        r"\text{not } A=",
        r"\frac{v}{2}=",
        r"\left|v\right|=",
    ),
    *(r"\begin{pmatrix}3\\2\end{pmatrix}=", r"\left[\begin{array}{c}3\\2\end{array}\right]="),
]
EQUAL_AS_TEXTS = [
    (r"\dfrac{1}{2}", r"\frac{1}{2}"),
    (r"\tfrac12", r"\frac{1}{2}"),
    (r"\frac1{72}", r"\frac{1}{72}"),
    (r"\frac{1}2", r"\frac{1}{2}"),
    ("1/2", r"\frac{1}{2}"),
    ("-3/4", r"-\frac{3}{4}"),
    (r"\left( 1, 2 \right)", "(1,2)"),
    (r"\left[2,5\right)", "[2,5)"),
    ("1,234", "1234"),
    ("1,234,567.5", "1234567.5"),
    (r"10{,}000", "10000"),
    ("$5$", "5"),
    (r"\$5", "5"),
    ("5.", "5"),
    (r"50\%", "50"),
    (r"90^\circ", "90"),
    (r"90^{\circ}", "90"),
    (r"5\text{ cm}", "5"),
    (r"5\text{ cm}^2", "5"),
    (r"\frac{1}{2}\text{ inches}", r"\frac12"),
    (r"\text{Evelyn}", "Evelyn"),
    (r"\mathbf{(A)}", "(A)"),
    ("x = 5", "5"),
    ("x=1,y=2", "x = 1, y = 2"),
    (r"x\in[1,2]", "[1,2]"),
    (r"\sqrt3", r"\sqrt{3}"),
    (r"x \le 5", r"x \leq 5"),
    (r"2\,000", "2000"),
    (r"\!5", "5"),
    ("\u22125", "-5"),
    (r"\lbrack 1, 2\rbrack", "[1,2]"),
    (r"12\\", "12"),
    (r"12 \\.", "12"),
    (r"\frac12 \newline", r"\frac{1}{2}"),
    (r"\text{Evelyn} \\", "Evelyn"),
    (r"\phantom{-}12\hspace{2mm}", "12"),
    (r"\left|\matrix{\phantom{-}1&2\cr3&4}\right|,", r"\begin{vmatrix}1&2\\3&4\end{vmatrix}"),
    (
        r"\begin{Bmatrix}1\\[\smallskipamount]2\end{Bmatrix}\\",
        r"\left\{\begin{array}{@{}c@{}}1\\2\end{array}\right\}",
    ),
    (r"\begin{bmatrix} -1/3 \\[4pt] x \end{bmatrix}", r"\begin{pmatrix}-\frac{1}{3}\\x\end{pmatrix}"),
]
EQUAL_AS_NUMBERS = [
    ("0.5", r"\frac{1}{2}"),
    (".5", "0.50"),
    ("72", "72.0"),
    ("+7", "7"),
    (r"\frac{-1}{2}", r"-\frac{1}{2}"),
    (r"\frac{2}{4}", r"\frac{1}{2}"),
    (r"\frac{1.5}{3}", "0.5"),
    ("1,000", "1000.00"),
    ("-0", "0"),
    ("2516_8", "2516_{8}"),
    (r"\{1,2\}", r"\{2,1\}"),
    (r"1\frac{4}{5}", "1.8"),
    (r"0.\overline{36}", r"\frac{4}{11}"),
    (r"-0.1\overline{6}", r"-\frac16"),
    (r"\begin{pmatrix}0.5\\2\end{pmatrix}", r"\begin{pmatrix}1/2\\2.0\end{pmatrix}"),
    (r"2x=\begin{pmatrix}0.5\\2\end{pmatrix}", r"2x=\begin{pmatrix}1/2\\2.0\end{pmatrix}"),
]
EQUAL_AS_MATHEMATICS = [
    ("x+1", "1+x"),
    (r"\frac{\sqrt{3}}{3}", r"\frac{1}{\sqrt{3}}"),
    (r"(x+1,2)", r"(1+x,2)"),
    ("2x(x+1)", "2x^2+2x"),
    (r"\sqrt{8}", r"2\sqrt{2}"),
    (r"10^{3}", "1000"),
    ("3-2i", "-2i+3"),
    (r"\frac{3\pi}{2}", r"1.5\pi"),
]
UNEQUAL = [
    ("5", "6"),
    ("0.3333", r"\frac{1}{3}"),
    ("(1,2)", "(2,1)"),
    ("[1,2)", "[1,2]"),
    ("x", "y"),
    ("x+1", "x-1"),
    (r"\frac{1}{2}", r"\frac{2}{1}"),
    ("1,2", "12"),
    ("", "5"),
    (r"\frac{1}{0}", "0"),
    ("12", "1"),
    ("1e400", "10"),
    ("A", "B"),
    ("x=2,y=1", "x=1,y=2"),
    ("a=2,b=1", "a=1,b=2"),
    ("2516_9", "2516_8"),
    ("2516", "2516_8"),
    ("2516_8", "2516"),
    ("1358", "2516_8"),
    (r"(3,4)", r"\{3,4\}"),
    (r"\left\{ 3, 4 \right\}", "(3,4)"),
    *((before + COLUMN, COLUMN) for before in NOT_NAMES),
    (r"-x=\begin{bmatrix}1\\2\end{bmatrix}", COLUMN),
    (r"-x=\left[\begin{array}{c}1\\2\end{array}\right]", COLUMN),
    (r"2x=\left(\begin{smallmatrix}1\\2\end{smallmatrix}\right)", COLUMN),
    (r"-x=\begin{vmatrix}1\\2\end{vmatrix}", r"\begin{vmatrix}1\\2\end{vmatrix}"),
    (r"2x=\begin{Bmatrix}1\\2\end{Bmatrix}", r"\begin{Bmatrix}1\\2\end{Bmatrix}"),
    (COLUMN, "2x=" + COLUMN),
    (COLUMN + r"=\begin{pmatrix}3\\2\end{pmatrix}", COLUMN),
    (r"\pmatrix{1\cr3}", COLUMN),
    (r"\begin{pmatrix} -1 \\ 2 \end{pmatrix}", r"\begin{pmatrix} \phantom{-}1 \\ 2 \end{pmatrix}"),
    (COLUMN + r"\\" + COLUMN, COLUMN),
]
HOSTILE = [
    r"\begin{pmatrix}" * 20,
    r"\begin{pmatrix} 9^{9^{9^{9}}} \\ x+1 \end{pmatrix}",
    "9^{9^{9^{9}}}," * 20,
    "{" * 5_000 + "}" * 5_000,
    "%" * 9_000 + "x",
    r"{\over" * 1_500,
    "9^{9^{9^{9^{9}}}}",
    "(" * 140 + ")" * 140,
    "{" * 250,
    r"\frac{" * 45,
    r"\sum_{n=1}^{10^{12}} \frac{1}{n!^{n!}}",
    r"\int_0^{10^{9}} e^{e^{x}} \sin(x^x) dx",
    "(x+1)^{99999999}",
    "99999999!!!!",
    "__import__('os').system('touch hacked')",
    r"\text{__import__('os').system('touch hacked')}",
    "open('hacked','w')",
    "\x00\ud800",
    "9" * 20_000,
    r"\boxed{" * 2_000,
    "\\" * 299,
    "\\" * 9_000 + "x",
    r"\pmatrix{" * 1_100,
    r"\pmatrix{" * 900 + "}" * 900,
    r"\phantom{" * 900 + "}" * 900,
    r"\begin{array}{" + "{" * 4_000 + "}" * 4_000 + r"\end{array}",
    r"\\[" + "1" * 9_000,
    r"\\[\skip" * 1_000,
    r"\vec{" * 10 + r"v" + "}" * 10 + "=" + r"\begin{pmatrix}1\end{pmatrix}",
]


@pytest.fixture(scope="module")
def oracle() -> Iterator[MathRule]:
    made = MathRule(timeout_s=1.5)
    yield made
    if made._workers is not None:
        made._workers.close()


@pytest.mark.parametrize("options", [{"timeout_s": -1}, {"timeout_s": "5"}, {"workers": 0}])
def test_limits_that_make_no_sense(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"`{next(iter(options))}` of an oracle that runs in workers"):
        MathRule(**options)


def score(oracle: MathRule, text: str, reference: str | None) -> float | None:
    return oracle.grade(["p"], [text], [reference])[0]


@pytest.mark.parametrize(("found", "right"), EQUAL_AS_TEXTS)
def test_equal_as_texts(found: str, right: str) -> None:
    assert normalise(found) == normalise(right)
    assert compare(found, right) is True


@pytest.mark.parametrize(("found", "right"), EQUAL_AS_NUMBERS)
def test_equal_as_numbers(found: str, right: str) -> None:
    assert normalise(found) != normalise(right)
    assert compare(found, right) is compare(right, found) is True


@needs_math_verify
@pytest.mark.parametrize(("found", "right"), EQUAL_AS_MATHEMATICS)
def test_equal_as_mathematics(oracle: MathRule, found: str, right: str) -> None:
    assert compare(found, right) is None
    assert (
        score(oracle, rf"It is \boxed{{{found}}}.", right)
        == score(oracle, rf"It is \boxed{{{right}}}.", found)
        == 1.0
    )
    assert MathRule(symbolic=False).grade(["p"], [rf"\boxed{{{found}}}"], [right]) == [0.0]


@needs_math_verify
@pytest.mark.parametrize(("found", "right"), UNEQUAL)
def test_unequal(oracle: MathRule, found: str, right: str) -> None:
    assert score(oracle, rf"It is \boxed{{{found}}}.", right) == 0.0


def spelled(answer: str) -> list[str]:
    """Return spellings of an answer: compact, with blanks, with \\left and \\right, and, for a matrix, in
    other environments."""
    compact = re.sub(r"(?<![a-zA-Z])\s+|\s+(?![a-zA-Z])", "", answer)
    wide = re.sub(r"(\\\\|[&,+=<>]|(?<=[0-9a-z)}])-)", r" \1 ", answer)
    sized = re.sub(r"(?<!\\left)(\\\{|[(\[])([^][(){}]*)(\\\}|[)\]])", r"\\left\1 \2 \\right\3", answer)
    ways = [compact, wide, sized, f"${answer}$", rf"\displaystyle {answer}"]
    for end in (r"bmatrix}", r"matrix}\right)", r"array}\right]", r"smallmatrix}\right)"):
        begin = end.removesuffix(r"\right)").removesuffix(r"\right]") + ("{c c}" if "array" in end else "")
        left = r"\left(" if end.endswith(")") else r"\left[" if end.endswith("]") else ""
        ways.append(
            answer.replace(r"\begin{pmatrix}", rf"{left}\begin{{{begin}").replace(
                r"\end{pmatrix}", rf"\end{{{end}"
            )
        )
    return [*ways, *(way.replace(r"\\", r"\\[4pt]") for way in ways)]


@needs_math_verify
def test_an_answer_however_it_is_written(oracle: MathRule) -> None:
    """All listed and generated spellings of an answer equal its first spelling."""
    pairs = [
        (way, right) for ways, _ in math_answers.ALL for right in ways[:1] for way in {*ways, *spelled(right)}
    ]
    assert len(pairs) > 800
    assert unequal_at_leisure(oracle, pairs) == []


def test_matrices_of_numbers_need_no_parser() -> None:
    for ways, _ in math_answers.MATRICES[:3]:
        assert [way for way in [*ways, *spelled(ways[0])] if compare(way, ways[0]) is not True] == []


@needs_math_verify
def test_no_wrong_answer_is_taken_for_a_right_one(oracle: MathRule) -> None:
    pairs = [
        (wrong, right) for ways, others in math_answers.ALL for right in ways[:1] for wrong in others[:2]
    ]
    assert unequal(oracle, pairs) == pairs


@needs_math_verify
@pytest.mark.slow
def test_every_way_against_every_other(oracle: MathRule) -> None:
    for ways, others in math_answers.ALL:
        assert unequal_at_leisure(oracle, [(one, other) for one in ways for other in ways]) == []
        wrong = [pair for one in ways for other in others for pair in ((one, other), (other, one))]
        assert unequal(oracle, wrong) == wrong


def unequal_at_leisure(oracle: MathRule, pairs: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return the pairs that are not equal. A busy machine may need longer for a pair than `oracle` allows."""
    found = unequal(oracle, pairs)
    if found:
        patient = MathRule(timeout_s=300.0)
        found = unequal(patient, found)
        assert patient._workers is not None
        patient._workers.close()
    return found


def unequal(oracle: MathRule, pairs: list[tuple[str, str]]) -> list[tuple[str, str]]:
    scores = oracle.grade(
        ["p"] * len(pairs),
        [rf"It is \boxed{{{found}}}." for found, _ in pairs],
        [rf"\boxed{{{right}}}" for _, right in pairs],
    )
    return [pair for pair, score in zip(pairs, scores, strict=True) if score != 1.0]


@pytest.mark.sample(
    slow=("*int_0^*", "'(x+1)^{99999999}'", "'9^{9^{9^{9^{9}}}}'", "'99999999!!!!'"), seconds=18.4
)
@needs_math_verify
@pytest.mark.parametrize("found", HOSTILE, ids=lambda text: ascii(text)[:20])
def test_hostile_answers_are_wrong_in_bounded_time(
    oracle: MathRule, found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hostile answer is graded as wrong within a minute. No part of it is executed, and the next answer is
    graded normally."""
    monkeypatch.chdir(tmp_path)
    begin = time.monotonic()
    assert score(oracle, rf"\boxed{{{found}}}", "x+1") == 0.0
    assert time.monotonic() - begin < 60
    assert not list(tmp_path.iterdir())
    assert score(oracle, r"\boxed{1+x}", "x+1") == 1.0


@needs_math_verify
@pytest.mark.slow
@pytest.mark.parametrize("found", HOSTILE, ids=lambda text: ascii(text)[:20])
def test_hostile_answers_without_an_end_are_wrong(oracle: MathRule, found: str) -> None:
    assert score(oracle, rf"\boxed{{{found}", r"\frac{1}{7}") == 0.0


@SETTINGS
@given(
    st.lists(
        st.sampled_from([r"\boxed{", r"\fbox {", r"\frac{", "{", "}", "}", r"\{", r"\}", r"\\", "5", " "]),
        max_size=14,
    )
)
def test_the_scanner_agrees_with_a_slow_one(tokens: list[str]) -> None:
    assert last_boxed("".join(tokens)) == slow_box(tokens)


def slow_box(tokens: list[str]) -> str | None:
    """Return the content of the last box. Each box is tried, from the last to the first, and its closing
    brace is found by counting."""
    depths = [
        1 if token in ("{", r"\frac{") or "box" in token else -1 if token == "}" else 0 for token in tokens
    ]
    for start in reversed([place for place, token in enumerate(tokens) if "box" in token]):
        for end in range(start + 1, len(tokens)):
            if sum(depths[start : end + 1]) == 0:
                return "".join(tokens[start + 1 : end])
    return None


def test_a_long_response_is_read_once() -> None:
    """The time to read a response grows linearly: sixteen times the text takes about sixteen times as long,
    not 256 times."""

    def read() -> None:
        assert last_boxed(r"\boxed{" * 200_000) is None
        assert last_boxed("{" * 1_000_000 + r"\boxed{5}") == "5"
        assert last_boxed(r"\boxed " * 200_000) is None

    assert seconds(read) < 20


def test_as_an_oracle_without_math_verify(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        ConfigError, match=r"math needs the package math-verify.*pip install 'oat-align\[math\]'"
    ):
        build_oracle("math", {})
    oracle = build_oracle("math", {"symbolic": False})
    question = Question(
        Key("train", 0, 0, 0),
        "score",
        (Message("user", "1/2+1/2?"),),
        (r"\boxed{\frac{2}{2}}", "one", "1"),
        (0, 1, 2),
        "1",
    )
    ((_, answer),) = oracle.collect(oracle.submit([question]), 1.0)
    assert answer.values == (1.0, 0.0, 1.0)
    nothing = Question(Key("train", 0, 0, 1), "score", (Message("user", "?"),), ("1",), (0,), "")
    ((_, answer),) = oracle.collect(oracle.submit([nothing]), 1.0)
    assert answer.marks == ("abstain",)


@needs_math_verify
def test_many_at_once_stay_in_order(oracle: MathRule) -> None:
    pairs = [("x+1", "1+x", 1.0), ("5", "5", 1.0), ("x", "y", 0.0), ("2+y", "y+2", 1.0), ("7", "8", 0.0)] * 4
    random.Random(0).shuffle(pairs)
    texts, rights, scores = zip(*((rf"\boxed{{{a}}}", b, c) for a, b, c in pairs), strict=True)
    assert oracle.grade(["p"] * len(pairs), texts, rights) == list(scores)
