"""The rule of countdown, the task of TinyZero: write an expression that equals a target, with + - * / and
each given number exactly once.

The answer is the text of the last <answer>...</answer> of a response. Its grammar is

    sum     = product (("+" | "-") product)*
    product = factor (("*" | "/") factor)*
    factor  = ("+" | "-")* (number | "(" sum ")")

The value is computed in exact fractions, without Python's own parser. An answer with a power or a floor
division is malformed.

Departures from TinyZero:
1. The tag may be on any line.
2. The given numbers are compared with the numbers of the expression by value: 1.5 is one number, and not 1
   and 5.
3. An expression is malformed if it has more than 256 characters, more than 32 open brackets, or a number of
   more than 16 characters.
"""

import json
import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

from oat.errors import OracleError
from oat.oracles.callables import CallableOracle
from oat.oracles.rules.texts import completion_texts, prompt_messages
from oat.types import Message, Opening

_OPEN, _CLOSE = "<answer>", "</answer>"
_FORMAT_SCORE = 0.1
_TOLERANCE = Fraction(1, 100_000)
_MAX_CHARACTERS = 256
_MAX_DEPTH = 32
_MAX_NUMBER_CHARACTERS = 16
_MAX_JSON_CHARACTERS, _MAX_TEXT_CHARACTERS = 10_000, 100
_SIGNS = "+-*/()"
_ALLOWED = re.compile(r"[-+*/()0-9. \t]*")
_WRITTEN = re.compile(r"[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)")
_TOKEN = re.compile(r"[-+*/()]|[0-9]+\.?[0-9]*|\.[0-9]*")

_Number = int | Fraction
_Tokens = list[int | Fraction | str]


class CountdownRule(CallableOracle):
    """The oracle `countdown`. If a response alone has no answer, what its prompt has written of it, such as
    `<answer>`, belongs to it."""

    def __init__(self) -> None:
        super().__init__(self.grade, "countdown", reads_group=False)
        self.version = "1"
        self._opening: Callable[[Sequence[Message]], Opening] = lambda messages: Opening()

    def tell_opening(self, opening: Callable[[Sequence[Message]], Opening]) -> None:
        self._opening = opening

    def grade(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        reference: Sequence[Any] | None = None,
        target: Sequence[Any] | None = None,
        nums: Sequence[Any] | None = None,
        **columns: Any,
    ) -> list[float | None]:
        """Return the rewards of `countdown`."""
        texts = completion_texts(completions)
        begun = [
            text if tagged_answer(text) is not None else self._opening(prompt_messages(prompt)).text + text
            for prompt, text in zip(prompts, texts, strict=True)
        ]
        return countdown(prompts, begun, reference, target, nums)


def countdown(
    prompts: Sequence[Any],
    completions: Sequence[Any],
    reference: Sequence[Any] | None = None,
    target: Sequence[Any] | None = None,
    nums: Sequence[Any] | None = None,
    **columns: Any,
) -> list[float | None]:
    """Return 1.0 for an answer that uses each number once and is within 1e-5 of the target, 0.1 for any other
    answer, and 0.0 for a completion without an answer. A record without a task has no reward (None).

    Args:
        completions: texts; for conversations, lists that hold one assistant message.
        reference: the task as JSON, {"target": 24, "numbers": [4, 6, 1]}. It is read if the columns `target`
            and `nums` of a record have no task.
        target, nums: the task as two columns, a number and a list of numbers. Text ("24", "[4, 6, 1]") is
            accepted too, because all columns of a CSV file are text.

    Raises:
        OracleError: the data have no reference, and lack one of the two columns.
    """
    if reference is None and (target is None or nums is None):
        raise OracleError(
            'countdown needs the columns `target` and `nums`, or a reference like {"target": 24, '
            '"numbers": [4, 6, 1]}; add them to the data'
        )
    texts = completion_texts(completions)
    answers, targets, numbers = (
        column if column is not None else [None] * len(texts) for column in (reference, target, nums)
    )
    tasks = [
        _task(*given) or _task_of_json(answer)
        for answer, *given in zip(answers, targets, numbers, strict=True)
    ]
    return [None if task is None else grade(text, *task) for text, task in zip(texts, tasks, strict=True)]


def grade(response: str, target: _Number, numbers: Sequence[_Number]) -> float:
    """Return the score of one response: 1.0, 0.1 or 0.0, as `countdown` describes.

    Args:
        target: the number to be reached.
        numbers: the numbers to be used, in ascending order.
    """
    expression = tagged_answer(response)
    if expression is None:
        return 0.0
    try:
        tokens = _tokens(expression)
        if sorted(token for token in tokens if not isinstance(token, str)) != list(numbers):
            return _FORMAT_SCORE
        value = _value(tokens)
    except (ValueError, ZeroDivisionError):
        return _FORMAT_SCORE
    return 1.0 if abs(value - target) < _TOLERANCE else _FORMAT_SCORE


def evaluate(expression: str) -> Fraction:
    """Return the exact value of an expression.

    Raises:
        ValueError: the expression does not follow the grammar, or exceeds a limit.
        ZeroDivisionError: the expression divides by zero.
    """
    return _value(_tokens(expression))


def tagged_answer(response: str) -> str | None:
    """Return the text in the last <answer>...</answer> of a response, without blanks around it; None if
    there is no such tag."""
    start = response.rfind(_OPEN, 0, max(response.rfind(_CLOSE), 0))
    return None if start < 0 else response[start + len(_OPEN) : response.find(_CLOSE, start)].strip()


def _tokens(expression: str) -> _Tokens:
    if len(expression) > _MAX_CHARACTERS:
        raise ValueError("too long")
    if not _ALLOWED.fullmatch(expression):
        raise ValueError("a character that no expression has")
    return [token if token in _SIGNS else _number(token) for token in _TOKEN.findall(expression)]


def _number(digits: str) -> _Number:
    if len(digits) > _MAX_NUMBER_CHARACTERS:
        raise ValueError("a number that is too long")
    if "." in digits:
        return Fraction(digits)  # raises ValueError for "."
    if digits[0] == "0" and digits.strip("0"):
        raise ValueError("a leading zero")
    return int(digits)


def _value(tokens: _Tokens) -> Fraction:
    rest: _Tokens = ["", *reversed(tokens)]
    value = _sum(rest, 0)
    if rest != [""]:
        raise ValueError("something behind the expression")
    return Fraction(value)


def _sum(rest: _Tokens, depth: int) -> _Number:
    value = _product(rest, depth)
    while rest[-1] in ("+", "-"):
        value = value + _product(rest, depth) if rest.pop() == "+" else value - _product(rest, depth)
    return value


def _product(rest: _Tokens, depth: int) -> _Number:
    value = _factor(rest, depth)
    while rest[-1] in ("*", "/"):
        value = value * _factor(rest, depth) if rest.pop() == "*" else Fraction(value, _factor(rest, depth))
    return value


def _factor(rest: _Tokens, depth: int) -> _Number:
    negative = False
    while rest[-1] in ("+", "-"):
        negative ^= rest.pop() == "-"
    token = rest.pop()
    if token == "(" and depth < _MAX_DEPTH:
        token = _sum(rest, depth + 1)
        if rest.pop() != ")":
            raise ValueError("a bracket that is not closed")
    if isinstance(token, str):
        raise ValueError("no number where one is expected, or too many brackets")
    return -token if negative else token


def _task_of_json(reference: Any) -> tuple[_Number, list[_Number]] | None:
    task = _of_json(reference)
    return _task(task.get("target"), task.get("numbers")) if isinstance(task, dict) else None


def _of_json(text: Any) -> Any:
    """Return the value of a JSON text; None if the argument is no text, or if the text is no JSON, is
    too long, or is nested too deeply."""
    if not isinstance(text, str) or len(text) > _MAX_JSON_CHARACTERS:
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _task(target: Any, numbers: Any) -> tuple[_Number, list[_Number]] | None:
    """Return the target and the numbers in ascending order; None if the arguments, which come from the data,
    are no task."""
    numbers = _of_json(numbers) if isinstance(numbers, str) else numbers
    if not isinstance(numbers, list | tuple) or not numbers:
        return None
    goal, *given = (_exact(value) for value in (target, *numbers))
    usable = [value for value in given if value is not None]
    return None if goal is None or len(usable) < len(given) else (goal, sorted(usable))


def _exact(value: Any) -> _Number | None:
    if isinstance(value, str):
        return (
            Fraction(value.strip())
            if len(value) <= _MAX_TEXT_CHARACTERS and _WRITTEN.fullmatch(value.strip())
            else None
        )
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return value if isinstance(value, int) else Fraction(str(value))
    except ValueError:  # infinity or NaN
        return None
