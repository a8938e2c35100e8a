"""Reward functions of LightRFT and OpenRLHF, unmodified: `reward_func(queries, prompts)` and
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

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from oat.oracles.callables import CallableOracle
from oat.oracles.whole_groups import STATE
from oat.types import Question, Steps


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
