"""What a reward function gets if it may look at the group: every response of a group, equal ones too, in one
call and in order. TRL's functions may look at the responses of a prompt together.

A call has the groups of one round (in an evaluation: of one mode), and no two groups with the same prompt. So
a function finds a group by its prompt or by its place, as in TRL. Its rewards cannot depend on which rounds
happen to be answered together, which is a matter of time.

A function whose reward of a response depends on this response alone declares `reads_group = False`. Then the
ledger shows it equal responses once.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from oat.errors import ConfigError, shown
from oat.types import Question

STATE = "trainer_state"
"""The name of the parameter that gets a `TrainerState`."""


class TrainerState:
    """The state of the run, for a function with a parameter `trainer_state`. It has two fields of
    transformers' `TrainerState`.

    Attributes:
        global_step: the number of the step that asks, from 0. It is also the number of steps that the policy
            has learned, unless questions are asked ahead (`oracle.max_outstanding`). For an evaluation, the
            number of steps that the policy has learned.
        max_steps: the setting `stop.max_steps`; the attribute is missing if the setting is None.
    """

    max_steps: int

    def __init__(self, global_step: int, max_steps: int | None):
        self.global_step = global_step
        if max_steps is not None:
            self.max_steps = max_steps

    def __getattr__(self, name: str) -> NoReturn:
        why = "stop.max_steps is not set" if name == "max_steps" else "it has global_step and max_steps"
        raise AttributeError(f"`{STATE}` has no {name}: {why}")


def declared(function: Callable[..., Any], name: str) -> bool | None:
    """Return the attribute `reads_group` of a function, or of the function in a partial; None if it has none.

    Raises:
        ConfigError: the attribute is neither True nor False.
    """
    found = attribute(function, "reads_group")
    if found is not None and not isinstance(found, bool):
        raise ConfigError(
            f"`reads_group` of {name} is {shown(found)}; give False if the reward of a response depends on "
            "this response and its prompt alone, or leave it out"
        )
    return found


def attribute(function: Callable[..., Any], name: str) -> Any:
    """Return an attribute of a function, or of the function in a partial; None if it has none."""
    found = getattr(function, name, None)
    while found is None and isinstance(function, functools.partial):
        function = function.func
        found = getattr(function, name, None)
    return found


def round_of(question: Question) -> tuple[str, int, int]:
    """Return the round to which a question belongs: purpose, step and round."""
    return question.key.purpose, question.key.step, question.key.round


def calls_of(questions: Sequence[Question], prompt: Callable[[Question], Any]) -> list[list[int]]:
    """Return the questions of each call, as indices in ascending order.

    Args:
        prompt: function that returns the prompt of a question as the function gets it.
    """
    calls: dict[tuple[str, int, int, int], list[int]] = {}
    seen: dict[tuple[str, int, int, str], int] = {}
    for place, question in enumerate(questions):
        own = (*round_of(question), repr(prompt(question)))
        again = seen[own] = seen.get(own, -1) + 1
        calls.setdefault((*round_of(question), again), []).append(place)
    return list(calls.values())
