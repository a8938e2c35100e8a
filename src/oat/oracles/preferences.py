"""Preferences made from scores.

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

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from oat.errors import ConfigError, OracleError
from oat.oracles.base import Oracle, Wrapper
from oat.oracles.callables import CallableOracle
from oat.oracles.contract import pairs_of, plain_answer
from oat.oracles.whole_groups import STATE
from oat.types import Answer, Kind, Mark, Price, Question, Steps, StepUnit


class Preferences(Wrapper):
    """An oracle that makes comparisons from the scores of another oracle (Bradley and Terry, 1952).

        p = sigmoid((r_first - r_second) / scale)

    Equal scores are a tie (0.5). If at least one score has the mark "failed", the comparison is "failed".
    Otherwise, if at least one score has "abstain", the comparison is "abstain". A comparison costs as much as
    its two scores.

    The answer also has the two scores (`Answer.scores`), with None for a missing one. If both are missing, it
    has no scores. Rewards of steps are left out; the scores of a mixture's sources stay
    (`Answer.sources`).

    Args:
        oracle: the oracle that scores.
        scale: the difference of scores at which the odds are e to 1; above 0.

    Raises:
        ConfigError: the oracle does not score, or the scale is not a finite number above 0.
    """

    answers: Kind = "compare"
    gives_steps: StepUnit | None = None
    reads_group = False
    """A pair is always asked as a whole."""

    def __init__(self, oracle: Oracle, scale: float = 1.0):
        if oracle.answers != "score":
            raise ConfigError(
                f"preferences are made from scores, and this oracle answers {oracle.answers!r}; use it as "
                "it is"
            )
        if not (math.isfinite(scale) and scale > 0):
            raise ConfigError(f"the scale of preferences must be a finite number above 0, not {scale}")
        super().__init__(oracle)
        self.scale = scale
        self.name = oracle.name or type(oracle).__name__
        self._broken: OracleError | None = None

    def price(self, question: Question) -> Price:
        return self.oracle.price(replace(question, kind="score"))

    def submit(self, questions: Sequence[Question]) -> list[str]:
        return self.oracle.submit([replace(question, kind="score") for question in questions])

    def collect(self, tickets: Sequence[str], seconds: float) -> list[tuple[str, Answer]]:
        """Collect scores, and return the comparisons made from them. If an answer of the scoring oracle
        cannot be used, return the comparisons made from its other answers, and raise at every later call. If
        no other answer can be used, raise at this call too.

        Raises:
            OracleError: the scoring oracle breaks the contract.
        """
        if self._broken is not None:
            raise self._broken
        there = []
        unit = self.oracle.gives_steps
        for ticket, answer in pairs_of(self.oracle.collect(tickets, seconds), self.name):
            try:
                there.append(
                    (
                        ticket,
                        self._compare(
                            plain_answer(answer, "score", 2, self.name, f"ticket {ticket!r}", unit=unit)
                        ),
                    )
                )
            except OracleError as error:
                self._broken = error
        if self._broken is not None and not there:
            raise self._broken
        return there

    def _compare(self, given: Answer) -> Answer:
        answer = replace(given, steps=(), step_unit="characters")
        scores = tuple(
            value if mark == "ok" else None for value, mark in zip(answer.values, answer.marks, strict=True)
        )
        mark: Mark = next((mark for mark in ("failed", "abstain") if mark in answer.marks), "ok")
        if mark != "ok":
            return replace(
                answer, values=(0.5,), marks=(mark,), scores=() if scores == (None, None) else scores
            )
        first, second = answer.values
        scores = () if None in scores else scores
        if first == second:
            return replace(answer, values=(0.5,), marks=("tie",), scores=scores)
        return replace(
            answer, values=(_sigmoid((first - second) / self.scale),), marks=("ok",), scores=scores
        )


def _sigmoid(x: float) -> float:
    small = math.exp(-abs(x))
    return (1.0 if x >= 0 else small) / (1.0 + small)


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
