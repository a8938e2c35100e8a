"""The faults that the results of an environment may have."""

import math
from collections.abc import Mapping
from dataclasses import replace
from numbers import Real
from typing import Any

from oat.environments.base import Turn
from oat.errors import shown
from oat.types import Message


def state_fault(state: Any) -> str | None:
    """Return what is wrong with the result of `reset`, with advice; None if it is a state."""
    if isinstance(state, Mapping):
        return None
    return f"returned {shown(state, 60)}; return the state before the first response, a dict"


def turn_fault(turn: Any) -> str | None:
    """Return what is wrong with an answer to a response, with advice; None if nothing is. Other roles than
    `assistant` are not checked here, since the renderer knows which roles a conversation may have."""
    if not isinstance(turn, Turn):
        return f"returned {shown(turn, 60)}; return an oat.environments.base.Turn"
    if not isinstance(turn.state, Mapping):
        return f"returned the state {shown(turn.state, 60)}; return a dict, also with the last turn"
    message = turn.message
    is_message = (
        isinstance(message, Message) and isinstance(message.content, str) and isinstance(message.role, str)
    )
    if message is not None and not is_message:
        return f"returned the message {shown(message, 60)}; return an oat.types.Message, or None to end"
    if message is not None and (fault := _message_fault(message)):
        return fault
    if not _is_finite(turn.reward):
        return f"returned the reward {shown(turn.reward, 60)}; return a finite number"
    return None


def plain_turn(turn: Turn) -> Turn:
    """Return a faultless turn with its reward as a float. Numbers of other types, such as NumPy's, cannot be
    recorded."""
    return replace(turn, reward=float(turn.reward))


def turns_fault(turns: Any, count: int) -> str | None:
    """Return what is wrong with the result of `step_all` for so many responses; None if it is a list of as
    many answers. The answers are not looked at."""
    if not isinstance(turns, list | tuple):
        return f"returned {shown(turns, 60)}; return a list of turns, one for each response, in order"
    if len(turns) != count:
        return f"returned {len(turns)} turns for {count} responses; return one for each, in order"
    return None


def _message_fault(message: Message) -> str | None:
    if message.role == "assistant":
        return (
            "returned a message of the role assistant, which is the model's own; return what the user or a "
            "tool says (the role user, or tool)"
        )
    try:
        f"{message.role}{message.content}".encode()
    except UnicodeEncodeError as error:
        return (
            f"returned the message {shown(message.content, 60)}, which has a lone surrogate "
            f"({error.object[error.start]!r}), and no tokenizer reads it; return "
            'content.encode("utf-8", "replace").decode()'
        )
    return None


def _is_finite(reward: Any) -> bool:
    try:
        return isinstance(reward, Real) and math.isfinite(reward)
    except OverflowError:  # an int that is too large for a float
        return False
