"""What an oracle has to keep."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from numbers import Real
from typing import Any, get_args

from oat import wire
from oat.errors import ContractError
from oat.oracles.base import Oracle, is_cacheable, names_price, price_of
from oat.oracles.registry import build_oracle, make_oracle
from oat.testing.part import Part
from oat.testing.samples import make_question
from oat.types import Answer, Mark, Price, Question

_PATIENCE_S = 1.0


def check_oracle(
    oracle: Any,
    questions: Sequence[Question] | None = None,
    *,
    reference: str | None = None,
    columns: Mapping[str, Any] | None = None,
    options: Mapping[str, Any] | None = None,
    seconds: float = 30.0,
    tolerance: float = 1e-3,
) -> None:
    """Ask an oracle, or a reward or comparing function, the same things in several ways, and hold what it answers against the protocol.

    Found are: a value too few or too many, or none that a run can use (NaN, infinite, no probability); an answer to something else, twice, or never;
    a price that is passed; changes in the questions; and, unless the oracle says `cacheable = False`, values that differ when the same is asked
    again, in another order, or alone. Not looked at is whether p(first wins) and p(second wins) of one pair add up to 1.

    Args:
        oracle: a function or a class, an oracle made of one, or a name as configurations have it. What it raises is a finding, too.
        questions: to ask; by default some of made-up texts (empty, long, in other scripts, equal ones) about one prompt.
        reference, columns: of the prompt of those.
        options: of a class or a name.
        seconds: to wait for all answers to one submission.
        tolerance: largest difference, relative or absolute, between two answers to the same question.

    Raises:
        ContractError: what was found, where, and what to do.
        ConfigError, OracleError: the oracle cannot be built, or what our own wrapper of functions found.
    """
    name = oracle if isinstance(oracle, str) else getattr(oracle, "__qualname__", type(oracle).__name__)
    is_made = hasattr(oracle, "submit") and not isinstance(oracle, type)
    built = build_oracle(oracle, options or {}) if isinstance(oracle, str) else make_oracle(oracle, name, options or {})
    ask = _Asking(built, name, seconds)
    ask.require(not (is_made and options), f"is made already, and nothing reads the options {options}; make it with them, or give the class")
    given = questions is not None and (reference is not None or columns)
    ask.require(not given, "reference and columns are for made-up questions, and nothing reads them here; put them into yours with make_question")
    asked = list(questions) if questions is not None else _questions(built, reference, dict(columns or {}))
    ask.require(asked, f"there is nothing to ask; give questions of the kind {built.answers!r}")
    first = ask(asked)
    if is_cacheable(built):
        _check_same(name, "asked again, with other keys", asked, first, ask(_renamed(asked, 1_000)), tolerance)
        _check_same(name, "asked in the other order", asked, first, ask(_renamed(asked, 2_000)[::-1])[::-1], tolerance)
        _check_same(name, "asked alone", asked, first, [_alone(ask, question, place) for place, question in enumerate(asked)], tolerance)


class _Asking(Part):
    """Asks questions, and checks each answer by itself.

    Args:
        name: of the oracle, in messages.
        seconds: until all are answered.
    """

    def __init__(self, oracle: Oracle, name: str, seconds: float):
        super().__init__(name)
        self.oracle, self.seconds = oracle, seconds

    def __call__(self, questions: Sequence[Question]) -> list[Answer]:
        """The answers, in the order of the questions."""
        before = [wire.encode(question) for question in questions]
        tickets = self.call("submit", self.oracle.submit, list(questions))
        self.require(
            isinstance(tickets, list) and len(tickets) == len({*tickets}) == len(questions) and all(isinstance(t, str) for t in tickets),
            f"submit returned {str(tickets)[:80]} for {len(questions)} questions; return a list with one string a question, each different",
        )
        open_ = dict(zip(tickets, questions, strict=True))
        answers = self.call("collect", self._collect, tickets[-1:], open_)
        answers |= self.call("collect", self._collect, tickets[:-1], open_)
        again = self.call("collect", self.oracle.collect, tickets, 0.0)
        self.require(not again, f"collect returned {str(again)[:80]} for tickets that were answered; return each answer once")
        for question, encoded in zip(questions, before, strict=True):
            unchanged = wire.encode(question) == encoded
            self.require(unchanged, f"{_shown(question)} was changed by it; work on copies of columns and messages")
        for ticket, question in open_.items():
            self.call("an answer", self._check, question, answers[ticket])
        return [answers[ticket] for ticket in tickets]

    def _collect(self, tickets: Sequence[str], asked: Mapping[str, Question]) -> dict[str, Answer]:
        answers: dict[str, Answer] = {}
        until = time.monotonic() + self.seconds
        while open_ := [ticket for ticket in tickets if ticket not in answers]:
            left = until - time.monotonic()
            late = f"no answer to {_shown(asked[open_[0]])} within {self.seconds:g} s"
            self.require(left > 0, f"{late}; answer it, mark it failed, or check with more `seconds`")
            for found in self.call("collect", self.oracle.collect, open_, min(left, _PATIENCE_S)):
                is_pair = isinstance(found, tuple) and len(found) == 2 and isinstance(found[1], Answer)
                self.require(is_pair, f"collect returned {str(found)[:80]}; return (ticket, Answer) pairs")
                ticket, answer = found
                is_due = ticket in open_ and ticket not in answers
                self.require(is_due, f"collect returned the ticket {ticket!r}, asked for {open_}; return those only, once")
                answers[ticket] = answer
        return answers

    def _check(self, question: Question, answer: Answer) -> None:
        """One answer against its question."""
        where = f"the answer to {_shown(question)}"
        self.require(answer.key == question.key, f"{where} has the key {answer.key}; copy the question's, {question.key}")
        sizes = len(answer.values), len(answer.marks)
        self.require(sizes == (question.size,) * 2, f"{where} has {sizes[0]} values and {sizes[1]} marks; give {question.size} of each, in order")
        unknown = {*answer.marks} - {*get_args(Mark)}
        self.require(not unknown, f"{where} has the marks {unknown}; they are {', '.join(get_args(Mark))}")
        low, high, meaning = (0.0, 1.0, "a probability from 0 to 1") if question.kind == "compare" else (-math.inf, math.inf, "a finite number")
        for value, mark in zip(answer.values, answer.marks, strict=True):
            is_fine = isinstance(value, Real) and math.isfinite(value) and low <= value <= high
            self.require(mark != "ok" or is_fine, f"{where} is {value!r}; give {meaning}, or mark it abstain")
        most, took = price_of(self.oracle, question), Price(answer.queries, answer.tokens, answer.cost)
        is_within = took.queries <= most.queries and (not names_price(self.oracle) or (took.tokens <= most.tokens and took.cost <= most.cost))
        self.require(is_within, f"{where} took {took}, and `price` said at most {most}; name the most that a question can take")


def _questions(oracle: Oracle, reference: str | None, columns: dict[str, Any]) -> list[Question]:
    groups: list[tuple[str, ...]] = [("4", "5"), ("", "four"), ("4\n<|im_end|>\x00", "vier, 四, ٤"), ("5", "4"), ("0" * 2_000, "4")]
    if oracle.answers == "score":
        groups += [("4",), ("4", "", "4", " 4 ", "-4")]
    return [make_question("2+2=", *texts, kind=oracle.answers, occurrence=n, reference=reference, **columns) for n, texts in enumerate(groups)]


def _renamed(questions: Sequence[Question], by: int) -> list[Question]:
    return [replace(question, key=replace(question.key, occurrence=question.key.occurrence + by)) for question in questions]


def _alone(ask: _Asking, question: Question, place: int) -> Answer:
    """The answer to a question that is asked by itself; of scores, candidate by candidate, as when the others are known already."""
    if question.kind == "compare":
        return ask(_renamed([question], 3_000 + place))[0]
    singles = [
        replace(question, candidates=(text,), picks=(pick,), known=question.known[n : n + 1], ids=question.ids[n : n + 1])
        for n, (text, pick) in enumerate(zip(question.candidates, question.picks, strict=True))
    ]
    answers = [ask(_renamed([single], 3_000 + 100 * place + n))[0] for n, single in enumerate(singles)]
    values, marks = (tuple(getattr(answer, name)[0] for answer in answers) for name in ("values", "marks"))
    return replace(answers[0], values=values, marks=marks)


def _check_same(name: str, how: str, questions: Sequence[Question], first: Sequence[Answer], other: Sequence[Answer], tolerance: float) -> None:
    for question, one, two in zip(questions, first, other, strict=True):
        for place in range(question.size):
            found = [(answer.values[place], answer.marks[place]) for answer in (one, two)]
            (value, mark), (value_2, mark_2) = found
            same = mark == mark_2 and (mark != "ok" or math.isclose(value, value_2, rel_tol=tolerance, abs_tol=tolerance))
            if not same:
                text = "" if question.kind == "compare" else f", candidate {question.candidates[place][:40]!r}"
                raise ContractError(
                    f"{name}: {_shown(question)}{text}: answered {found[0]}, and {found[1]} when {how}; an answer that is no function of the prompt "
                    "and the response, or pair, must not be used again: set `cacheable = False` on the oracle, or remove the cause"
                )


def _shown(question: Question) -> str:
    """A question in a few words."""
    texts = ", ".join(repr(text if len(text) <= 40 else text[:40] + "...") for text in question.candidates)
    return f"question {question.key} ({question.kind} {texts})"
