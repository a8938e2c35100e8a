"""Text that a model may write to the rule oracles: random, very long, or meant to be executed. Every time is
CPU time of the thread, as `cpu_time` makes it comparable between machines."""

import random
import re
import time
import warnings
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from cpu_time import seconds
from fixtures import forked
from hostile_text import HOSTILE, grade_all, graded_quietly, value_of

from oat.oracles.rules.countdown import countdown
from oat.oracles.rules.gsm8k import gsm8k

pytestmark = pytest.mark.fault("R24")

ALPHABET = "0123456789+-*/(). "


def value_in_python(expression: str) -> Fraction | None:
    """Return Python's value of an expression, with fractions instead of its numbers; None if Python raises,
    or if the value is no number."""
    if "**" in expression or "//" in expression:
        return None
    fractions = re.sub(r"[0-9.]+", r"Fraction('\g<0>')", expression.strip(" \t"))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            compile(expression.strip(" \t"), "expression", "eval")  # leading zeros, two points
            value = eval(fractions, {"Fraction": Fraction})
    except (SyntaxError, TypeError, ValueError, ZeroDivisionError):
        return None
    return value if isinstance(value, Fraction) else None


def from_grammar(rng: random.Random, depth: int = 5) -> str:
    """Return a random expression of the grammar, with blanks, signs, decimals and needless brackets."""
    blank = rng.choice(["", "", "", " ", "\t"])
    if depth == 0 or rng.random() < 0.3:
        digits = rng.randrange(100)
        return blank + rng.choice(
            [
                str(digits),
                str(rng.randrange(1000)),
                f"{digits}.{rng.randrange(100)}",
                f".{digits}",
                f"{digits}.",
                "0",
            ]
        )
    left, right = from_grammar(rng, depth - 1), from_grammar(rng, depth - 1)
    return rng.choice(
        [
            f"{left}{blank}+{right}",
            f"{left}-{blank}{right}",
            f"{left}{blank}*{right}",
            f"{left}/{right}",
            f"({left}){blank}",
            f"-{left}",
            f"+{right}",
        ]
    )


def check_random_strings(count: int, action: Callable[[str], Any]) -> str:
    """Check the time of random strings, and return the measured times as text. The target is 10 s for a
    million strings and 10 ms for one; three times the target is allowed."""
    rng = random.Random(0)
    texts = ["".join(rng.choices(ALPHABET, k=rng.randrange(41))) for _ in range(count)]
    taken: list[float] = []

    def all_of_them() -> None:
        for text in texts:
            begin = time.thread_time()
            action(text)
            taken.append(time.thread_time() - begin)

    together = seconds(all_of_them)
    slowest = [texts[place] for place in sorted(range(count), key=taken.__getitem__)[-5:]]
    # measured again: the machine itself may have made one of so many slow
    most = max(min(seconds(lambda text=text: action(text)) for _ in range(3)) for text in slowest)  # type: ignore[misc]
    assert together < 3 * 10 * max(count / 1_000_000, 0.05)
    assert most < 3 * 0.010
    return f"{count:,} random strings in {together:.1f} s, the slowest in {most * 1000:.1f} ms"


def graded(text: str) -> list[float | None]:
    return countdown(("p",), (f"<answer>{text}</answer>",), target=(24,), nums=((4, 6, 1),))


def check_agreement_with_python(count: int) -> str:
    rng = random.Random(1)
    defined = done = 0
    while done < count:
        expression = from_grammar(rng)
        if len(expression) > 256:
            continue
        done += 1
        value = value_of(expression)
        assert value == value_in_python(expression), expression
        defined += value is not None
    assert defined > 0.5 * count
    return f"{count:,} of {count:,} expressions have the value that Python gives them"


@pytest.mark.inventory(86)
@pytest.mark.parametrize("action", [graded, value_of])
def test_random_strings_are_fast(action):
    check_random_strings(20_000, action)


@pytest.mark.large
@pytest.mark.inventory(86)
@pytest.mark.parametrize("action", [graded, value_of])
def test_a_million_random_strings_are_fast(action, figure):
    what = "graded" if action is graded else "read as numbers"
    figure(f"{check_random_strings(1_000_000, action)} ({what})")


@pytest.mark.inventory(86)
def test_expressions_have_the_value_that_python_gives_them(figure):
    figure(check_agreement_with_python(3_000))


@pytest.mark.large
@pytest.mark.inventory(86)
def test_100_000_expressions_have_the_value_that_python_gives_them(figure):
    figure(check_agreement_with_python(100_000))


@pytest.mark.inventory(86)
def test_what_python_refuses_is_refused():
    rng = random.Random(2)
    accepted = 0
    for _ in range(10_000):
        expression = "".join(rng.choices("0012345+-*/(). ", k=rng.randrange(1, 9)))
        value = value_of(expression)
        assert value == value_in_python(expression), expression
        accepted += value is not None
    assert accepted > 300


@pytest.mark.inventory(85, 86)
@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_hostile_text_is_rejected_at_once(text, figure):
    assert grade_all(text) == [0.1, 0.0, 0.0, 0.0, 0.0]
    best = min(seconds(lambda: grade_all(text)) for _ in range(3))
    figure(f"at most {best * 1000:.1f} ms for a hostile text of up to a million characters under every rule")
    assert best < 0.3


@pytest.mark.inventory(86)
@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_countdown_reads_hostile_text_within_10_ms(text):
    assert min(seconds(lambda: graded(text)) for _ in range(3)) < 3 * 0.010


@pytest.mark.inventory(85, 86)
def test_hostile_text_as_a_reference_is_no_reference():
    for text in HOSTILE.values():
        assert countdown(["p"], ["<answer>4*6*1</answer>"], reference=[text]) == [None]
        assert gsm8k(["p"], ["72"], [text]) in ([None], [0.0])


@pytest.mark.inventory(85, 86)
def test_grading_runs_nothing_and_opens_nothing(tmp_path: Path):
    """Grading hostile text raises none of Python's audit events. It runs in a forked child, since an audit
    hook cannot be removed."""

    log = tmp_path / "log"
    assert forked(graded_quietly, log) == 0, log.read_text(encoding="utf-8")
