"""Hostile texts, and a grader whose audit events are recorded."""

import os
import sys
from fractions import Fraction

from oat.oracles.rules.countdown import countdown, evaluate
from oat.oracles.rules.gsm8k import gsm8k, gsm8k_marked

TASK = '{"target": 24, "numbers": [4, 6, 1]}'


HOSTILE = {
    "a power": "95**78**62",
    "a power in brackets": "(9**9)**9**9",
    "100k open brackets": "(" * 100_000,
    "100k brackets": "(" * 100_000 + "1" + ")" * 100_000,
    "100k digits": "9" * 100_000,
    "a product of 100k numbers": "9*" * 100_000 + "9",
    "100k signs": "-" * 100_000 + "1",
    "100k blanks": "1" + " " * 100_000 + "+1",
    "100k decimals": "1." * 100_000,
    "100k commas": "1," * 100_000,
    "100k exponents": "1e9" * 100_000,
    "an exponent of 100k digits": "1e" + "9" * 100_000,
    "100k opening tags": "<answer>" * 100_000,
    "100k closing tags": "</answer>" * 100_000,
    "100k marks": "#### " * 100_000,
    "brackets up to the limits": "(" * 127 + "1" + ")" * 127,
    "fractions up to the limits": "+".join(f"1/{n}" for n in range(11, 62)),
    "code": "__import__('os').system('true')",
    "a file": "open('secret').read()",
    "a format": "{0.__class__}%s%n$(true)`true`",
    "controls": "\0\x1b[2J\u202e\ud800",
}


def value_of(expression: str) -> Fraction | None:
    try:
        return evaluate(expression)
    except (ValueError, ZeroDivisionError):
        return None


def grade_all(text: str) -> list[float | None]:
    """Return the grades of a text by every rule, with the marks of an answer and without."""
    return [
        *countdown(["p"] * 2, [f"<answer>{text}</answer>", text], reference=[TASK] * 2),
        *gsm8k(["p"], [text], ["72"]),
        *gsm8k_marked(["p"] * 2, [f"#### {text}", text], ["72"] * 2),
    ]


def graded_quietly() -> int:
    """Return 0 if grading raises no audit event."""
    events: list[str] = []
    sys.addaudithook(lambda event, arguments: events.append(event))
    eval("1")
    open(os.devnull).close()
    if not {"compile", "exec", "open"} <= set(events):
        print("the hook sees nothing")
        return 1
    for text in HOSTILE.values():
        grade_all(text)
    events.clear()
    for text in HOSTILE.values():
        grade_all(text)
        value_of(text)
    seen = list(events)
    print("events:", seen)
    return 2 if seen else 0
