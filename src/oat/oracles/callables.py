"""Plain functions as oracles: TRL's reward signature, and a similar signature for comparisons.

Departures from TRL:
1. NaN is an error. None means "no reward".
2. `completion_ids` are passed only to a function that has a parameter of this name, never in **kwargs.
   Answers of this function are not used again for another response with the same text.
3. `log_extra`, `log_metric` and `environments` are not passed. `trainer_state` is passed only to a function
   that has a parameter of this name, and has two fields (`whole_groups.TrainerState`).
4. The configured reference is passed as `reference`, and also under the name of its column.
5. A function with the attribute `gives_steps` may return rewards of steps in place of a number.
6. A function sees all responses of a group in one call, but in no call two groups with the same prompt, nor
   groups of several rounds. A function with the attribute `reads_group = False` gets no equal response twice.

The arguments with which a user's function is called: texts or messages, and the columns of the data.

Reward functions of LightRFT and OpenRLHF, unmodified: `reward_func(queries, prompts)` and
`reward_func(queries, prompts, labels)`.

A function is called in this way if its first two parameters have these names. It gets texts only. A query is
the prompt followed by the response: `query[len(prompt):]` is the response.

Departures from both:
1. A prompt is the text of the data, not the output of the chat template, so it has no tokens of a template.
   If there are several messages, it is their contents, with a line break after each message.
2. A label is the record's column `labels`, or else `label`, or else the reference.
3. If the function returns a dictionary, its `rewards` are the values. Its `scores` and `extra_logs` are
   ignored.
"""

import functools
import inspect
import math
import numbers
import re
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set, Sized
from concurrent.futures import FIRST_COMPLETED, Future, wait
from itertools import islice
from threading import Thread
from typing import Any

from oat.errors import ConfigError, OracleError, did_you_mean, shortened, shown
from oat.oracles.base import Oracle
from oat.oracles.contract import in_words
from oat.oracles.steps import UNITS, plain_steps, sum_of
from oat.oracles.whole_groups import STATE, TrainerState, attribute, calls_of, declared, round_of
from oat.plugins.calls import awaited, guarded
from oat.types import Answer, Kind, Mark, Question, Steps, StepUnit
from oat.types.part import RunFacts

_OF_SHAPES = re.compile(r"raised (TypeError|AttributeError): .*\b(str|string|list|dict)\b", re.DOTALL)


def is_plain(question: Question) -> bool:
    """Return True if the function gets prompt and responses as strings; False if as lists of messages."""
    return not question.is_chat and len(question.messages) == 1 and question.messages[0].role == "user"


def completion_of(question: Question, text: str) -> str | list[dict[str, str]]:
    """Return a response as the function gets it."""
    return text if is_plain(question) else [{"role": "assistant", "content": text}]


def columns_of(asked: Sequence[Question]) -> dict[str, list[Any]]:
    """Return the columns of the data, and the references, with one value for each entry of a call."""
    names = dict.fromkeys(name for question in asked for name in question.columns)
    columns = {name: [question.columns.get(name) for question in asked] for name in names}
    if any(question.reference is not None for question in asked):
        columns["reference"] = [question.reference for question in asked]
    return columns


def is_of_shapes(failure: str) -> bool:
    """Return True if a failure, such as "raised TypeError: string indices must be integers", may be that of a
    function that takes strings for lists of messages, or the other way round."""
    return _OF_SHAPES.match(failure) is not None


def in_shapes(names: Sequence[str], asked: Sequence[Question]) -> str:
    """Say whether arguments of a call were strings or lists of messages, and why.

    Args:
        names: the names of these arguments.
        asked: the question of each entry of the call.
    """
    plain = "strings, as prompts are texts in the data"
    listed = 'lists of messages ({"role": ..., "content": ...}), as prompts are messages in the data'
    kinds = {is_plain(question) for question in asked}
    found = [words for words, kind in ((plain, True), (listed, False)) if kind in kinds]
    return f"its {', '.join(names[:-1])} and {names[-1]} were {', and '.join(found)}"


_Value = float | Steps | None
"""What a function gives for an entry: a number, the rewards of the response's steps, or no answer."""
_SET_STEPS = ', or set its attribute `gives_steps` to "characters" or "tokens" to give rewards of steps'


class CallableOracle(Oracle):
    """An oracle of scores that calls `reward(prompts, completions, **columns) -> list[float | None]`.

    The function may be plain or async. A plain function is called for all questions that are collected
    together, and an async function for all questions that are submitted together: once, if the function does
    not read the group, and otherwise as `whole_groups.calls_of` says. All arguments are lists with one entry
    per candidate of these questions, in order:

    * `prompts`, `completions`: if the prompt is text in the data, both are strings. Otherwise a prompt is a
      list of {"role", "content"}, and a completion is a list of one assistant message.
    * columns: the value in the prompt's record, or None if the record has no such field. A function with
      **kwargs gets all columns; any other function gets those that its parameters name.
    * `completion_ids`: the token ids of the response, the end of turn included.

    Only `trainer_state` is no list (`whole_groups.TrainerState`).

    If the function returns None for a completion, the mark is "abstain".

    If the function has the attribute `gives_steps`, "characters" or "tokens", it may return a list of pairs
    (end, reward) for a completion: the rewards of its steps (`Answer.steps`). Answers with steps in tokens
    are not used again for another response with the same text.

    Args:
        name: for messages and `Answer.by`.
        reads_group: True if the reward of a response may depend on the other responses of its group. None: as
            the function's attribute `reads_group` says; True if it has none.

    Raises:
        ConfigError: the function's `gives_steps` is neither of the two, or its `reads_group` is no truth
            value.
    """

    answers: Kind = "score"
    given: tuple[str, ...] = ("prompts", "completions", "completion_ids", STATE)
    """The names of the arguments other than columns."""

    def __init__(self, function: Callable[..., Any], name: str, *, reads_group: bool | None = None):
        self.function = function
        self.name = name
        self.gives_steps = _step_unit(function, name)
        self.declares_group = declared(function, name) if reads_group is None else reads_group
        self.reads_group = self.declares_group is not False
        self._max_steps: int | None = None
        self._reads_ids = "completion_ids" in (_parameters(function) or ())
        self._reads_state = STATE in (_parameters(function) or ())
        self._set_cacheable()
        self._known: dict[str, None] = {}
        self._is_async = inspect.iscoroutinefunction(_run_by(function))
        self._pending: dict[str, tuple[Question, float]] = {}
        self._calls: list[tuple[list[str], Future[list[Answer]]]] = []
        self._ready: dict[str, Answer] = {}

    def submit(self, questions: Sequence[Question]) -> list[str]:
        now, tickets = time.monotonic(), [str(question.key) for question in questions]
        self._pending.update(
            {ticket: (question, now) for ticket, question in zip(tickets, questions, strict=True)}
        )
        if self._is_async:
            for call in self._calls_of(tickets):
                self._begin(call)
        return tickets

    def collect(self, tickets: Sequence[str], seconds: float) -> list[tuple[str, Answer]]:
        """Return answers to questions of `tickets`, each with its ticket.

        A plain function is called here for all open questions of `tickets`, and `seconds` does not limit the
        call. An async function was called by `submit`, in its own thread. If that call failed, the function
        is called again here. If no answer is ready, wait at most `seconds` until a call ends.

        Raises:
            OracleError: the function raises, needs a column that the data lack, or does not return one finite
                number or None for each completion (or pair). The questions stay open.
        """
        due = [ticket for ticket in dict.fromkeys(tickets) if ticket in self._pending]
        if not due:
            return []
        if self._is_async:
            self._wait_for(due, seconds)
        else:
            for call in self._calls_of(self._asked_with(due)):
                self._ready.update(zip(call, self._answers(call), strict=True))
        there = [ticket for ticket in due if ticket in self._ready]
        for ticket in there:
            del self._pending[ticket]
        return [(ticket, self._ready.pop(ticket)) for ticket in there]

    def tell(self, run: RunFacts) -> None:
        self._max_steps = run.max_steps
        if not run.whole_groups:
            self.read_no_group()

    def read_no_group(self) -> None:
        """Score each response as if the function declared `reads_group = False`."""
        self.reads_group = False
        self._set_cacheable()

    def _set_cacheable(self) -> None:
        has_state = self._reads_state and self.reads_group
        self.cacheable = not (self._reads_ids or self.gives_steps == "tokens" or has_state)

    def _asked_with(self, due: Sequence[str]) -> list[str]:
        """Return those of `due` that are not answered yet. If the function reads the group, return all
        unanswered questions of their rounds."""
        if not self.reads_group:
            return [ticket for ticket in due if ticket not in self._ready]
        pending = dict(self._pending)  # another thread may submit meanwhile
        rounds = {round_of(pending[ticket][0]) for ticket in due}
        return [
            ticket
            for ticket, (question, _) in pending.items()
            if ticket not in self._ready and round_of(question) in rounds
        ]

    def _calls_of(self, tickets: Sequence[str]) -> list[list[str]]:
        """Return the tickets of each call."""
        if not self.reads_group:
            return [list(tickets)] if tickets else []
        asked = [self._pending[ticket][0] for ticket in tickets]
        return [[tickets[place] for place in call] for call in calls_of(asked, self._prompt)]

    def _begin(self, tickets: list[str]) -> None:
        future: Future[list[Answer]] = Future()
        self._calls.append((tickets, future))
        Thread(target=_fulfil, args=(future, self._answers, tickets), daemon=True).start()

    def check_columns(self, columns: Collection[str], has_reference: bool) -> None:
        """Check that the data have the columns that the function needs.

        Raises:
            ConfigError: the function has a parameter without a default that is neither a column of the data
                nor one of the other arguments of a call, such as `prompts`.
        """
        found = dict.fromkeys([*columns, *(["reference"] if has_reference else [])])
        without = () if self.reads_group else (STATE,)
        check_needed(self.needed, {*found, *(name for name in self._beside(found) if name not in without)})
        self._known |= found

    def _beside(self, columns: Collection[str]) -> Collection[str]:
        """Return the names of the arguments that a call passes and that are not columns of the data. In a
        subclass they may depend on `columns`, the names of the data's columns."""
        return self.given

    def _wait_for(self, due: Sequence[str], seconds: float) -> None:
        """Call the function again for each ticket in `due` whose call failed. If `_ready` has no answer to
        any ticket in `due`, wait at most `seconds` until the first of their calls ends. Put the answers of
        ended calls into `_ready`."""
        begun = {ticket for tickets, _ in self._calls for ticket in tickets} | self._ready.keys()
        for again in self._calls_of([ticket for ticket in due if ticket not in begun]):
            self._begin(again)
        mine = [call for call in self._calls if set(call[0]) & set(due)]
        if not self._ready.keys() & set(due):
            wait([future for _, future in mine], timeout=seconds, return_when=FIRST_COMPLETED)
        for call in [call for call in mine if call[1].done()]:
            self._calls.remove(call)
            self._ready.update(zip(call[0], call[1].result(), strict=True))

    def _answers(self, tickets: Sequence[str]) -> list[Answer]:
        asked = [self._pending[ticket] for ticket in tickets]
        values, answers = iter(self._values([question for question, _ in asked])), []
        for question, since in asked:
            own = list(islice(values, self._items(question)))
            marks: tuple[Mark, ...] = tuple("abstain" if value is None else "ok" for value in own)
            steps = tuple(value if isinstance(value, tuple) else () for value in own)
            numbers_ = tuple(sum_of(value) if isinstance(value, tuple) else value or 0.0 for value in own)
            answers.append(
                Answer(
                    question.key,
                    numbers_,
                    marks,
                    queries=len(own),
                    by=self.name,
                    seconds=time.monotonic() - since,
                    steps=steps if any(steps) else (),
                    step_unit=self.gives_steps or "characters",
                )
            )
        return answers

    def _items(self, question: Question) -> int:
        return len(question.candidates)

    def _prompt(self, question: Question) -> str | list[dict[str, Any]]:
        """Return the prompt of a question as the function gets it."""
        if is_plain(question):
            return question.messages[0].content
        return [message.plain for message in question.messages]

    def _values(self, questions: Sequence[Question]) -> list[_Value]:
        asked = [question for question in questions for _ in question.candidates]
        texts = [text for question in questions for text in question.candidates]
        completions = [completion_of(question, text) for question, text in zip(asked, texts, strict=True)]
        ids = (
            {}
            if not self._reads_ids
            else {"completion_ids": [ids.tolist() for question in questions for ids in question.ids]}
        )
        return self._call(asked, {"completions": completions, **ids})

    def _call(self, asked: Sequence[Question], candidates: dict[str, list[Any]]) -> list[_Value]:
        """Call the function, and return one value for each entry. An entry is a completion or a pair.

        Args:
            asked: the question of each entry.
            candidates: arguments of the function by name, such as `completions`; each is a list with one item
                per entry.
        """
        nothing = {name: [None] * len(asked) for name in self._known}
        has_state = self._reads_state and self.reads_group
        state = {STATE: TrainerState(asked[0].key.step, self._max_steps)} if has_state else {}
        offered: dict[str, Any] = {
            **state,
            **nothing,
            **columns_of(asked),
            "prompts": [self._prompt(question) for question in asked],
            **candidates,
        }
        arguments = self._accepted(offered)
        texts = ["prompts", *(name for name in candidates if name != "completion_ids")]
        told = functools.partial(self._refused, texts=texts, asked=asked)
        with guarded(self.name, told, _file_of(self.function)):
            returned = self.function(**arguments)
            if inspect.isawaitable(returned):
                returned = awaited(returned)
            returned = self._unwrapped(returned)
            is_list = isinstance(returned, Iterable) and not isinstance(
                returned, str | bytes | bytearray | Mapping | Set
            )
            values = list(islice(returned, len(asked) + 1)) if is_list else []
            if len(values) != len(asked):
                count = (
                    len(returned)
                    if isinstance(returned, Sized)
                    else f"more than {len(asked)}"
                    if len(values) > len(asked)
                    else len(values)
                )
                has_order = not isinstance(returned, Mapping | Set)
                got = (
                    f"{count} values"
                    if values
                    else shown(returned) + ("" if has_order else ", whose values have no order,")
                )
                raise OracleError(
                    f"{self.name} returned {got} for {len(asked)} entries, {_about(asked)}; return a list "
                    "with one number or None for each, in order"
                )
            return [self._value(value, place, asked) for place, value in enumerate(values)]

    def _refused(self, what: str, texts: Sequence[str], asked: Sequence[Question]) -> OracleError:
        """Return the error of a function that failed.

        Args:
            what: how it failed.
            texts: the names of its arguments that are strings or lists of messages.
        """
        shapes = f"; {in_shapes(texts, asked)}" if is_of_shapes(what) else ""
        return OracleError(f"{self.name} {what}{shapes}; repair the function, or catch what it may meet")

    def _unwrapped(self, returned: Any) -> Any:
        """Return the list of values that the returned object contains."""
        return returned

    def _accepted(self, offered: dict[str, Any]) -> dict[str, Any]:
        found = _parameters(self.function)
        if found is None:
            return offered
        parameters = found.values()
        missing = [name for name in self.needed if name not in offered]
        if missing:
            raise OracleError(
                f"{self.name} needs `{missing[0]}`, which is neither a column of the data nor a "
                "configured reference; "
                f"it may have {shortened(', '.join(sorted(offered)), 1000)}"
            )
        if any(p.kind is p.VAR_KEYWORD for p in parameters):
            return offered
        return {
            p.name: offered[p.name]
            for p in parameters
            if p.name in offered and p.kind is not p.VAR_POSITIONAL
        }

    @property
    def needed(self) -> list[str]:
        """The names of the function's parameters that have no default."""
        parameters = (_parameters(self.function) or {}).values()
        return [
            p.name
            for p in parameters
            if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        ]

    def _value(self, value: Any, place: int, asked: Sequence[Question]) -> _Value:
        is_list = isinstance(value, list | tuple) or getattr(value, "ndim", 0) == 2
        if self.gives_steps is None or not is_list:
            return self._number(value, lambda: f"value {place}, {self._entry(place, asked)}")
        try:
            return plain_steps(value.tolist() if hasattr(value, "tolist") else value)
        except ValueError as error:
            raise OracleError(
                f"{self.name}: value {place}, a list of the steps of {self._entry(place, asked)}, {error}"
            ) from error

    def _entry(self, place: int, asked: Sequence[Question]) -> str:
        """Return the entry of a call with this index in words."""
        question = asked[place]
        before = sum(each is question for each in asked[:place])
        return f"{'' if self.answers == 'compare' else f'candidate {before} of '}{in_words(question)}"

    def _number(self, value: Any, where: Callable[[], str]) -> float | None:
        """Return a value as a float.

        Args:
            where: returns the entry in words, for a message.
        """
        if value is None:
            return None
        plain = value.item() if getattr(value, "ndim", None) == 0 and hasattr(value, "item") else value
        try:
            number = float(plain) if isinstance(plain, numbers.Real) else math.nan
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            is_list = isinstance(value, list | tuple)
            raise OracleError(
                f"{self.name} returned {shown(value)} as {where()}; return a finite number, or None for no "
                "answer" + (_SET_STEPS if is_list and self.answers == "score" else "")
            )
        return number


class CallableComparison(CallableOracle):
    """An oracle of comparisons that calls `compare(prompts, first, second, **columns) -> list[float | None]`.

    All arguments are lists with one entry per pair. For each pair the function returns the probability that
    the first response wins; True counts as 1 and False as 0. None means no answer ("abstain"). All else is as
    in `CallableOracle`.
    """

    answers: Kind = "compare"
    given: tuple[str, ...] = ("prompts", "first", "second")

    def __init__(self, function: Callable[..., Any], name: str):
        super().__init__(function, name, reads_group=False)
        if self.gives_steps is not None:
            raise ConfigError(
                f"{name} compares two responses, and its `gives_steps` is {self.gives_steps!r}; a comparison "
                "has no steps: remove the attribute, or score each response"
            )

    def _items(self, question: Question) -> int:
        return 1

    def _values(self, questions: Sequence[Question]) -> list[_Value]:
        pairs = {
            name: [completion_of(question, question.candidates[place]) for question in questions]
            for place, name in enumerate(("first", "second"))
        }
        return self._call(questions, pairs)

    def _number(self, value: Any, where: Callable[[], str]) -> float | None:
        number = super()._number(value, where)
        if number is not None and not 0.0 <= number <= 1.0:
            raise OracleError(
                f"{self.name} returned {shown(value)} as {where()}; return the probability that the first "
                "wins, from 0 to 1"
            )
        return number


def check_needed(needed: Collection[str], offered: Collection[str]) -> None:
    """Check that `offered` has every parameter that a function needs.

    Raises:
        ConfigError: a needed parameter is missing.
    """
    missing = [name for name in needed if name not in offered]
    if missing and missing[0] == STATE:
        raise ConfigError(
            f"it needs `{STATE}`, and its rewards may be used again in a later step; give the parameter a "
            "default, or let the run show the function whole groups (no `reads_group = False`, no "
            "oracle.whole_groups: false, not in the oracle isolated)"
        )
    if missing:
        advice = (
            "set prompts.reference_key to the column that holds it; " if missing[0] == "reference" else ""
        )
        raise ConfigError(
            f"its parameter `{missing[0]}` is neither a column of the data nor a configured reference; "
            f"{advice}{did_you_mean(missing[0], offered)}"
        )


def _fulfil(
    future: "Future[list[Answer]]", answers: Callable[[Sequence[str]], list[Answer]], tickets: Sequence[str]
) -> None:
    try:
        future.set_result(answers(tickets))
    except BaseException as error:
        future.set_exception(error)


def _run_by(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the routine or class that a call runs: the function in a partial, or the `__call__` of an
    object."""
    while isinstance(function, functools.partial):
        function = function.func
    return function if inspect.isroutine(function) or inspect.isclass(function) else type(function).__call__


def _step_unit(function: Callable[..., Any], name: str) -> StepUnit | None:
    """Return the attribute `gives_steps` of a function; None if it has none."""
    found: StepUnit | None = attribute(function, "gives_steps")
    if found is not None and found not in UNITS:
        raise ConfigError(
            f'`gives_steps` of {name} is {shown(found)}; give "characters" or "tokens", or leave it out'
        )
    return found


def _file_of(function: Callable[..., Any]) -> str | None:
    """Return the file of a function's code; None if it has none."""
    code = getattr(inspect.unwrap(_run_by(function)), "__code__", None)
    return None if code is None else str(code.co_filename)


def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter] | None:
    try:
        return inspect.signature(function).parameters
    except ValueError:  # some built-in functions have no signature
        return None


def _about(asked: Sequence[Question]) -> str:
    """Return the questions of the entries of a call in words."""
    found = list({str(question.key): question for question in asked}.values())
    first = in_words(found[0]) if found else "no question"
    return f"of {first}" if len(found) == 1 else f"of {len(found)} questions, the first of which is {first}"


class QueryReward(CallableOracle):
    """An oracle of scores that calls `reward_func(queries, prompts, ...)`.

    The function may return a tensor, an array or a list, with one number for each query. A number may also be
    a tensor of one element. All else is as in `CallableOracle`.
    """

    given = ("queries", "prompts", "labels", STATE)

    def _beside(self, columns: Collection[str]) -> Collection[str]:
        """Return the names of the arguments other than columns: `queries`, `prompts`, and `labels` if the
        data have a label or a reference."""
        return [
            name for name in self.given if name != "labels" or {"label", "labels", "reference"} & {*columns}
        ]

    def _values(self, questions: Sequence[Question]) -> list[float | Steps | None]:
        asked = [(question, text) for question in questions for text in question.candidates]
        prompts = [self._prompt(question) for question, _ in asked]
        offered = {
            "prompts": prompts,
            "queries": [prompt + text for prompt, (_, text) in zip(prompts, asked, strict=True)],
        }
        return self._call(
            [question for question, _ in asked],
            {**offered, "labels": [_label(question) for question, _ in asked]},
        )

    def _prompt(self, question: Question) -> str:
        contents = [message.content for message in question.messages]
        return contents[0] if len(contents) == 1 else "".join(f"{content}\n" for content in contents)

    def _unwrapped(self, returned: Any) -> Any:
        return returned["rewards"] if isinstance(returned, Mapping) and "rewards" in returned else returned

    def _number(self, value: Any, where: Callable[[], str]) -> float | None:
        return super()._number(
            value[0] if getattr(value, "ndim", 0) == 1 and len(value) == 1 else value, where
        )


def _label(question: Question) -> Any:
    found = (question.columns.get("labels"), question.columns.get("label"), question.reference)
    return next((label for label in found if label is not None), None)
