"""The check of an oracle. It asks made-up questions in several ways, and checks the answers against the
protocol.

If the oracle's answers may be used again (`cacheable`), the check asks the same questions four more times: in
the same order, in reverse order, one by one, and with other tokens for the same texts. The values must be
equal, because the ledger stores an answer and uses it for equal questions later. If the oracle reads the
group (`reads_group`), one by one means: one group at a time. Otherwise it means: one response at a time. The
check does not swap the two responses of a pair: an oracle with a position bias judges badly, but does not
break the protocol.
"""

import copy
import functools
import inspect
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np

from oat import wire
from oat.errors import ContractError, OracleError
from oat.oracles.base import Oracle
from oat.oracles.callables import CallableOracle
from oat.oracles.contract import checked, in_words, pairs_of, tickets_of
from oat.oracles.make import build_oracle, make_oracle
from oat.oracles.whole_groups import STATE
from oat.testing.part import Part
from oat.testing.samples import make_question
from oat.types import Answer, Question, Steps
from oat.types.questions import Budget

_PATIENCE_S = 1.0
_OF_A_RESPONSE = (
    "an answer that is no function of the prompt and the response, or pair, must not be used again: set "
    "`reads_group = True` on the oracle if the question's other responses matter, set `cacheable = False`, "
    "or remove the cause"
)
_OF_A_GROUP = (
    "the rewards of a group must be a function of its prompt and its responses, whatever else is asked: "
    "remove the cause"
)
_COPIES = "work on copies of lists, columns and messages"


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
    """Ask an oracle the same questions in several ways, and check its answers against the oracles' protocol.

    The check finds these faults:

    * The oracle raises an exception.
    * An answer has too few or too many values, or a value that a run cannot use, such as NaN.
    * A question is answered twice or never, or an answer belongs to no question.
    * An answer costs more than the oracle's price.
    * The oracle changes its arguments.
    * The values differ when the same questions are asked again, in reverse order, one by one, or with other
      tokens for the same texts. If the oracle has `cacheable = False`, these are not compared.

    Args:
        oracle: a function that scores or compares, a class, its object, or a name as in a configuration.
        questions: the questions to ask; None: made-up questions about one prompt, with many kinds of texts.
        reference, columns: reference and columns of the made-up questions' prompt.
        options: options of the oracle. They need an `oracle` that is a class or a name.
        seconds: longest wait for the last question's answer, and then for all other answers together.
        tolerance: largest difference, relative or absolute, between two answers to the same question.

    Raises:
        ContractError: a fault was found.
        ConfigError: the oracle cannot be loaded or built.
        OracleError: the package's wrapper of a user's function or class found a fault.
    """
    name = oracle if isinstance(oracle, str) else getattr(oracle, "__qualname__", type(oracle).__name__)
    is_made = hasattr(oracle, "submit") and not isinstance(oracle, type)
    make = build_oracle if isinstance(oracle, str) else functools.partial(make_oracle, oracle)
    built = make(name, options or {})
    ask = _Asking(built, name, seconds)
    ask.require(
        not (is_made and options),
        f"is made already, and nothing reads the options {options}; make it with them, or give the class",
    )
    given = questions is not None and (reference is not None or columns)
    ask.require(
        not given,
        "reference and columns are for made-up questions, and nothing reads them here; put them into yours "
        "with make_question",
    )
    asked = list(questions) if questions is not None else _questions(built, reference, dict(columns or {}))
    ask.require(asked, f"there is nothing to ask; give questions of the kind {built.answers!r}")
    first = ask(asked)
    if built.cacheable:
        broken = _OF_A_GROUP if built.reads_group else _OF_A_RESPONSE
        same = functools.partial(_check_same, name, broken, asked, first, tolerance)
        same("asked again, with other keys", ask(_renamed(asked, 1_000)))
        same("asked in the other order", ask(_renamed(asked, 2_000)[::-1])[::-1])
        same("asked alone", [_alone(ask, question, place) for place, question in enumerate(asked)])
        same("asked of other tokens with that text", ask(_retokenised(_renamed(asked, 10_000))))


class _Asking(Part):
    """A callable that asks an oracle questions, checks each answer, and returns the answers.

    Args:
        name: name of the oracle, for messages.
        seconds: time to wait for answers, as in `check_oracle`.
    """

    def __init__(self, oracle: Oracle, name: str, seconds: float):
        super().__init__(name)
        self.oracle, self.seconds = oracle, seconds
        self.changed: dict[str, None] = {}
        if isinstance(oracle, CallableOracle):
            self.oracle = watched = copy.copy(oracle)
            watched.function = _watched(oracle.function, self.changed)

    def __call__(self, questions: Sequence[Question]) -> list[Answer]:
        """Ask questions, check the answers, and return them in the order of the questions."""
        before, given = [_encoded(question) for question in questions], list(questions)
        tickets = self.call("submit", self.oracle.submit, given)
        is_same = [id(question) for question in given] == [id(question) for question in questions]
        self.require(is_same, f"submit changed its argument `questions`, the list; {_COPIES}")
        tickets = self.hold(tickets_of, tickets, len(questions), self.name)
        open_ = dict(zip(tickets, questions, strict=True))
        answers = self.call("collect", self._collect, tickets[-1:], open_)
        answers |= self.call("collect", self._collect, tickets[:-1], open_)
        again = self.call("collect", self.oracle.collect, list(tickets), 0.0)
        self.require(
            not again,
            f"collect returned {str(again)[:80]} for tickets that were answered; return each answer once",
        )
        for question, encoded in zip(questions, before, strict=True):
            changed = [name for name, value in _encoded(question).items() if value != encoded[name]]
            self.require(
                not changed, f"`{', '.join(changed)}` of {in_words(question)} was changed by it; {_COPIES}"
            )
        self.require(
            not self.changed, f"its argument `{', '.join(self.changed)}` was changed by it; {_COPIES}"
        )
        return [self._check(open_[ticket], answers[ticket]) for ticket in tickets]

    def _collect(self, tickets: Sequence[str], asked: Mapping[str, Question]) -> dict[str, Any]:
        answers: dict[str, Any] = {}
        until = time.monotonic() + self.seconds
        while open_ := [ticket for ticket in tickets if ticket not in answers]:
            left = until - time.monotonic()
            late = f"no answer to {in_words(asked[open_[0]])} within {self.seconds:g} s"
            self.require(left > 0, f"{late}; answer it, mark it failed, or check with more `seconds`")
            given = list(open_)
            returned = self.call("collect", self.oracle.collect, given, min(left, _PATIENCE_S))
            self.require(given == open_, f"collect changed its argument `tickets`, the list; {_COPIES}")
            for ticket, answer in self.hold(pairs_of, returned, self.name):
                is_due = ticket in open_ and ticket not in answers
                self.require(
                    is_due,
                    f"collect returned the ticket {ticket!r}, asked for {open_}; return those only, once",
                )
                answers[ticket] = answer
        return answers

    def hold(self, contract: Callable[..., Any], *arguments: Any) -> Any:
        """Call one of the ledger's checks (`oat.oracles.contract`) and return its result. If the check raises
        an OracleError, raise a ContractError."""
        try:
            return contract(*arguments)
        except OracleError as error:
            raise ContractError(str(error)) from error

    def _check(self, question: Question, answer: Any) -> Answer:
        """Check an answer against its question and the oracle's price. Return it with plain numbers."""
        price = self.oracle.price(question)
        most = Budget.of(price) if self.oracle.names_price else Budget(price.queries)
        sound: Answer = self.hold(checked, answer, question, self.name, most, self.oracle.gives_steps)
        return sound


def _watched(function: Callable[..., Any], changed: dict[str, None]) -> Callable[..., Any]:
    """Return a wrapper of a function. If a call of the function changes an argument, the wrapper adds the
    argument's name to `changed`."""

    def note(before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
        changed.update(dict.fromkeys(name for name in before if wire.encode(after[name]) != before[name]))

    async def finish(returned: Awaitable[Any], before: Mapping[str, Any], after: Mapping[str, Any]) -> Any:
        value = await returned
        note(before, after)
        return value

    @functools.wraps(function)
    def watched(**arguments: Any) -> Any:
        before = {name: wire.encode(value) for name, value in arguments.items() if name != STATE}
        returned = function(**arguments)
        if inspect.isawaitable(returned):
            return finish(returned, before, arguments)
        note(before, arguments)
        return returned

    return watched


def _encoded(question: Question) -> dict[str, bytes]:
    """Return the bytes of each field of a question, for comparison."""
    return {field.name: wire.encode(getattr(question, field.name)) for field in fields(question)}


def _questions(oracle: Oracle, reference: str | None, columns: dict[str, Any]) -> list[Question]:
    groups: list[tuple[str, ...]] = [
        ("4", "5"),
        ("", "four"),
        ("4\n<|im_end|>\x00", "vier, 四, ٤"),
        ("5", "4"),
        ("0" * 2_000, "4"),
    ]
    if oracle.answers == "score":
        groups += [("4",), ("4", "", "4", " 4 ", "-4")]
    return [
        make_question(
            ("2+2=", "1+3=")[n % 2],
            *texts,
            kind=oracle.answers,
            occurrence=n,
            reference=reference,
            **columns,
        )
        for n, texts in enumerate(groups)
    ]


def _renamed(questions: Sequence[Question], by: int) -> list[Question]:
    return [
        replace(question, key=replace(question.key, occurrence=question.key.occurrence + by))
        for question in questions
    ]


def _retokenised(questions: Sequence[Question]) -> list[Question]:
    """Return a copy of each question, with the same texts but other tokens. In a run, such questions arise
    from two episodes with the same last response."""
    return [
        replace(question, ids=tuple(np.append(ids, ids) for ids in question.ids)) for question in questions
    ]


def _alone(ask: _Asking, question: Question, place: int) -> Answer:
    """Ask one question alone, and return the answer. If the question asks for scores, and the oracle does not
    read the group, ask about each candidate alone. A run asks in this way if the ledger has the scores of the
    other candidates."""
    if question.kind == "compare" or ask.oracle.reads_group:
        return ask(_renamed([question], 3_000 + place))[0]
    singles = [
        replace(
            question,
            candidates=(text,),
            picks=(pick,),
            known=question.known[n : n + 1],
            ids=question.ids[n : n + 1],
        )
        for n, (text, pick) in enumerate(zip(question.candidates, question.picks, strict=True))
    ]
    answers = [ask(_renamed([single], 3_000 + 100 * place + n))[0] for n, single in enumerate(singles)]
    values, marks = (tuple(getattr(answer, name)[0] for answer in answers) for name in ("values", "marks"))
    steps = tuple(answer.steps[0] if answer.steps else () for answer in answers)
    return replace(answers[0], values=values, marks=marks, steps=steps)


def _check_same(
    name: str,
    broken: str,
    questions: Sequence[Question],
    first: Sequence[Answer],
    tolerance: float,
    how: str,
    other: Sequence[Answer],
) -> None:
    for question, one, two in zip(questions, first, other, strict=True):
        for place in range(question.size):
            found = [(answer.values[place], answer.marks[place]) for answer in (one, two)]
            (value, mark), (value_2, mark_2) = found
            same = mark == mark_2 and (
                mark != "ok" or math.isclose(value, value_2, rel_tol=tolerance, abs_tol=tolerance)
            )
            said: list[Any] = found
            if same and mark == "ok" and (one.steps or two.steps):
                said = [answer.steps[place] if answer.steps else () for answer in (one, two)]
                same = _are_close(said[0], said[1], tolerance)
            if not same:
                candidate = question.candidates[place][:40]
                text = "" if question.kind == "compare" else f", candidate {candidate!r}"
                raise ContractError(
                    f"{name}: {in_words(question)}{text}: answered {said[0]}, and {said[1]} when {how}; "
                    + broken
                )


def _are_close(one: Steps, two: Steps, tolerance: float) -> bool:
    """Return True if two candidates have steps with equal ends and with rewards that differ little."""
    return [end for end, _ in one] == [end for end, _ in two] and all(
        math.isclose(reward, reward_2, rel_tol=tolerance, abs_tol=tolerance)
        for (_, reward), (_, reward_2) in zip(one, two, strict=True)
    )
