"""Checks of the values that an oracle returns, for the ledger, `check_oracle`, preferences and mixtures. If a
user's oracle raises an exception, or its answer cannot be used, an `OracleError` names the oracle.

Lists in place of tuples, and numbers of numpy, are converted. A score is usable if it is a finite number. The
value of a comparison is usable if it is a probability. An unusable value with the mark "ok" is an error. An
unusable value with another mark is replaced by 0.5.
"""

import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from numbers import Integral, Real
from typing import Any, get_args

import numpy as np

from oat.errors import OracleError, shortened, shown
from oat.oracles.steps import UNITS, is_sum, lengths, plain_steps, sum_of
from oat.plugins.calls import guarded
from oat.types import Answer, Key, Kind, Mark, Price, Question, Steps, StepUnit
from oat.types.questions import Budget

MARKS = tuple(mark for mark in get_args(Mark) if mark != "unpaid")
"""The marks that an oracle may give. "unpaid" is missing, because an unpaid question is never asked."""
_MOST_TEXTS = 8
"""A message shows at most this number of a question's candidates."""
_NEUTRAL = 0.5
"""The number that replaces an oracle's unusable value, such as NaN with the mark "abstain"."""
_MOST = 2**53
"""Upper bound of the queries and of the tokens of one answer. Below it, sums stay exact in SQLite."""


def calling(name: str, method: Callable[..., Any], *arguments: Any) -> Any:
    """Call a method of an oracle. An exception of a user's code becomes an `OracleError` that names the
    oracle."""
    with guarded(
        f"oracle {name}",
        lambda what: OracleError(f"oracle {name} {what}; repair it, and run the same command again"),
    ):
        return method(*arguments)


def tickets_of(returned: Any, count: int, name: str, known: Collection[str] = ()) -> list[str]:
    """Check the tickets that `submit` returned, and return them as a list.

    Args:
        count: number of questions.
        known: tickets of other open questions.

    Raises:
        OracleError: the result is not a list or tuple with a string for each question, two tickets are equal,
            or a ticket is in `known`.
    """
    is_list = isinstance(returned, list | tuple) and all(isinstance(ticket, str) for ticket in returned)
    if not is_list or len(returned) != count or len({*returned} - {*known}) != count:
        raise OracleError(
            f"oracle {name}: submit returned {shown(returned)} for {count} questions; return a list with "
            "one string a question, each different from "
            "all others that are open"
        )
    return list(returned)


def pairs_of(returned: Any, name: str) -> list[tuple[str, Any]]:
    """Check that `collect` returned pairs of a ticket and an answer, and return them. The answers are not
    checked.

    Raises:
        OracleError: `collect` did not return a list of such pairs.
    """
    is_list = isinstance(returned, list | tuple)
    if not is_list or not all(
        isinstance(pair, tuple | list) and len(pair) == 2 and isinstance(pair[0], str) for pair in returned
    ):
        wrong = (
            returned
            if not is_list
            else next(
                p
                for p in returned
                if not (isinstance(p, tuple | list) and len(p) == 2 and isinstance(p[0], str))
            )
        )
        raise OracleError(
            f"oracle {name}: collect returned {shown(wrong)}; return a list of (ticket, Answer) pairs, "
            "empty where nothing is there"
        )
    return [(ticket, answer) for ticket, answer in returned]


def checked(answer: Any, question: Question, name: str, most: Budget, unit: StepUnit | None = None) -> Answer:
    """Check all fields of an answer to a question, and return it with plain numbers.

    Args:
        most: the most that the answer may cost.
        unit: the oracle's `gives_steps`.

    Raises:
        OracleError: the answer breaks the contract.
    """
    plain = plain_answer(
        answer, question.kind, question.size, name, in_words(question), unit=unit, about=question
    )
    if plain.key != question.key:
        key = shortened(str(plain.key)) if isinstance(plain.key, Key | str) else shown(plain.key)
        raise OracleError(
            f"oracle {name}: the answer to {in_words(question)} has the key {key}; copy the question's, "
            f"{question.key}"
        )
    took = Price(plain.queries, plain.tokens, plain.cost)
    if not most.allows(took):
        raise OracleError(
            f"oracle {name} took {took} for {in_words(question)}, which may take at most {most}: what its "
            "method `price` says, or else a query "
            "for each value; name there the most that a question can take, or no budget would hold"
        )
    return plain


def plain_answer(
    answer: Any,
    kind: Kind,
    size: int,
    name: str,
    where: str,
    *,
    unit: StepUnit | None = None,
    about: Question | None = None,
) -> Answer:
    """Check an answer, except for its key and its price, and return it with plain numbers. The value of a
    candidate with step rewards becomes the exact sum of them.

    Args:
        size: number of values that the answer must have.
        where: the question in words, for messages.
        unit: the oracle's `gives_steps`.
        about: the question, whose candidates limit the ends of steps; None: their length is not checked.

    Raises:
        OracleError: the answer breaks the contract.
    """
    read = _AnswerReader(answer, name, where)
    values, marks = read.values(kind, size)
    if len(answer.steps):
        longest = [None] * size if about is None else lengths(about, answer.step_unit)
        steps = read.steps(kind, marks, unit, longest)
        values = read.summed(values, steps)
    else:
        steps = ()
    return replace(
        answer,
        values=values,
        marks=marks,
        scores=read.scores(kind, marks),
        steps=steps if any(steps) else (),
        step_unit=answer.step_unit if any(steps) else "characters",
        sources=read.sources(2 if kind == "compare" else size),
        **read.took(),
    )


class _AnswerReader:
    """The reader of an answer's fields, which converts them to plain values.

    Raises (each method, and the constructor):
        OracleError: a field breaks the contract.
    """

    def __init__(self, answer: Any, name: str, where: str):
        self._answer = answer
        self._name = name
        self._where = where
        if not isinstance(answer, Answer):
            raise self._fault(f"to {where} came {shown(answer)}; return an oat.types.Answer")
        for field in ("values", "marks", "scores", "steps"):
            given = getattr(answer, field)
            is_list = isinstance(given, tuple | list) or (isinstance(given, np.ndarray) and given.ndim == 1)
            if not is_list:
                raise self._fault(f"`{field}` of the answer to {where} is {shown(given)}; give a tuple")

    def values(self, kind: Kind, size: int) -> tuple[tuple[float, ...], tuple[Any, ...]]:
        """Return the values and their marks. A value that is not finite, or is no probability in a
        comparison, becomes 0.5. If its mark is "ok", it breaks the contract."""
        answer, where = self._answer, self._where
        sizes = len(answer.values), len(answer.marks)
        self._require(
            sizes == (size, size),
            f"the answer to {where} has {sizes[0]} values and {sizes[1]} marks; give {size} of each, in "
            "order",
        )
        unknown = [mark for mark in answer.marks if not (isinstance(mark, str) and mark in MARKS)]
        self._require(
            not unknown,
            f"the answer to {where} has the marks {', '.join(map(shown, unknown[:3]))}; an oracle may give "
            f"{', '.join(MARKS)}",
        )
        values = [_number(value, kind) for value in answer.values]
        meaning = "a probability from 0 to 1" if kind == "compare" else "a finite number"
        for value, given, mark in zip(values, answer.values, answer.marks, strict=True):
            if mark == "ok" and value is None:
                raise self._fault(
                    f"the answer to {where} is {shown(given)}; give {meaning}, or mark it abstain"
                )
        neutral = tuple(_NEUTRAL if value is None else value for value in values)
        return neutral, tuple(str(mark) for mark in answer.marks)

    def scores(self, kind: Kind, marks: Collection[str]) -> tuple[float | None, ...]:
        """Return the two scores from which the answer to a comparison was made; () if the answer has none. A
        score may be None if the mark of the answer is "abstain" or "failed"."""
        scores = tuple(_number(score, "score") for score in self._answer.scores)
        lacks = any(score is None for score in scores) and {*marks} & {"ok", "tie"}
        is_pair = kind == "compare" and len(scores) == 2 and not lacks
        self._require(
            not scores or is_pair,
            f"the answer to {self._where} has the scores {shown(self._answer.scores)}; give the pair's two, "
            "finite, or none",
        )
        return scores

    def steps(
        self, kind: Kind, marks: Sequence[str], unit: StepUnit | None, longest: Sequence[int | None]
    ) -> tuple[Steps, ...]:
        """Return the step rewards of each candidate; () for a candidate that has none, or no value.

        Args:
            unit: the oracle's `gives_steps`.
            longest: for each candidate, the highest end that a step may have; None: any.
        """
        answer, where = self._answer, self._where
        self._require(kind == "score", f"the answer to {where} has steps; a comparison has none")
        self._require(
            answer.step_unit in UNITS, self._instead("step_unit", " or ".join(f'"{each}"' for each in UNITS))
        )
        self._require(
            answer.step_unit == unit,
            f"the answer to {where} has steps in {answer.step_unit}, and the oracle's `gives_steps` is "
            f'{unit!r}; set it to "{answer.step_unit}"',
        )
        self._require(
            len(answer.steps) == len(marks),
            f"the answer to {where} has the steps of {len(answer.steps)} candidates; give {len(marks)} "
            "entries, in order, and an empty one for a candidate with one number",
        )
        found = []
        for place, (given, mark, most) in enumerate(zip(answer.steps, marks, longest, strict=True)):
            try:
                found.append(plain_steps(given, most, answer.step_unit) if mark == "ok" else ())
            except ValueError as error:
                self._require(False, f"the entry of `steps` for candidate {place} of {where} {error}")
        return tuple(found)

    def summed(self, values: Sequence[float], steps: Sequence[Steps]) -> tuple[float, ...]:
        """Return the values, where the value of a candidate with steps is the sum of their rewards. A value
        that differs from this sum by more than rounding breaks the contract."""
        found = []
        for place, (value, own) in enumerate(zip(values, steps, strict=True)):
            total = sum_of(own) if own else value
            self._require(
                not own or is_sum(value, own),
                f"the answer to {self._where} gives candidate {place} the value {value} and steps whose "
                f"rewards add up to {total}; give their sum",
            )
            found.append(total)
        return tuple(found)

    def sources(self, size: int) -> dict[str, tuple[float | None, ...]]:
        """Return the scores of each source, by name.

        Args:
            size: number of the question's candidates.
        """
        given = self._answer.sources
        if not (isinstance(given, dict) and all(isinstance(name, str) for name in given)):
            raise self._fault(self._instead("sources", "a dict of scores by the name of the source"))
        found = {}
        for name, scores in given.items():
            is_list = isinstance(scores, tuple | list) or (
                isinstance(scores, np.ndarray) and scores.ndim == 1
            )
            own = tuple(_number(score, "score") for score in scores) if is_list else ()
            is_sound = len(own) == size and all(
                number is not None or score is None for number, score in zip(own, scores, strict=True)
            )
            self._require(
                is_sound,
                f"`sources` of the answer to {self._where} has {shown(scores)} for {shown(name)}; give a "
                f"finite number or None for each of the {size} candidates",
            )
            found[name] = own
        return found

    def took(self) -> dict[str, Any]:
        """Return the queries, tokens, cost and seconds of the answer, by field."""
        for field in ("queries", "tokens"):
            count = getattr(self._answer, field)
            is_count = isinstance(count, Integral) and 0 <= int(count) < _MOST
            if not is_count:
                raise self._fault(self._instead(field, "a whole number from 0"))
        for field in ("cost", "seconds"):
            amount = _number(getattr(self._answer, field), "score")
            if amount is None or amount < 0:
                raise self._fault(self._instead(field, "a number from 0"))
        if not isinstance(self._answer.by, str):
            raise self._fault(self._instead("by", "the name of who answered"))
        counts = {field: int(getattr(self._answer, field)) for field in ("queries", "tokens")}
        return {**counts, **{field: float(getattr(self._answer, field)) for field in ("cost", "seconds")}}

    def _instead(self, field: str, meant: str) -> str:
        return (
            f"`{field}` of the answer to {self._where} is {shown(getattr(self._answer, field))}; give {meant}"
        )

    def _require(self, holds: bool, what: str) -> None:
        """Raise if `holds` is False. A text `what` that takes long to make is better made after the check
        (`_fault`), since every answer is checked."""
        if not holds:
            raise self._fault(what)

    def _fault(self, what: str) -> OracleError:
        return OracleError(f"oracle {self._name}: {what}")


def _number(value: Any, kind: Kind) -> float | None:
    """Return a value as a float; None if it is not a finite number or, for "compare", not a probability."""
    low, high = (0.0, 1.0) if kind == "compare" else (-sys.float_info.max, sys.float_info.max)
    is_number = isinstance(value, int | float | Real)
    return float(value) if is_number and low <= value <= high else None


def in_words(question: Question) -> str:
    """Return a short description of a question, for messages."""
    texts = ", ".join(repr(shortened(text, 40)) for text in question.candidates[:_MOST_TEXTS])
    texts += ", ..." if len(question.candidates) > _MOST_TEXTS else ""
    record = "" if question.row is None else f"record {question.row}, "
    return f"question {question.key} ({record}{question.kind} {texts})"


def nothing(question: Question, mark: Mark, by: str, seconds: float = 0.0) -> Answer:
    """Return an answer without usable values: each value is 0.5 and has this mark."""
    return Answer(
        question.key, (0.5,) * question.size, (mark,) * question.size, queries=0, by=by, seconds=seconds
    )
