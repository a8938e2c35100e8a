"""The environment's protocol. Within an episode, an environment answers each of the model's responses, and
gives it a reward.

An environment is a function of its state: `step(state, response)` returns the next state, so an episode can
be played again.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from oat.errors import ConfigError
from oat.plugins.calls import bare, guarded
from oat.plugins.loading import load_symbol
from oat.types import Message, Prompt


@dataclass(frozen=True)
class Turn:
    """The environment's answer to one response.

    Attributes:
        state: the state of the episode after the response. The next `step` gets it; the environment itself
            keeps no state.
        message: the message that the model reads next; None ends the episode.
        reward: the reward of this response. The reward of an episode is the sum over its responses.
    """

    state: Mapping[str, Any]
    message: Message | None
    reward: float


class Environment(Protocol):
    """Plays episodes. Its methods are functions of their arguments, so that an episode can be played again. A
    bad response gets a low reward; an exception becomes an `EpisodeError`."""

    def reset(self, prompt: Prompt, generator: np.random.Generator) -> Mapping[str, Any]:
        """Return the state before the first response."""

    def step(self, state: Mapping[str, Any], response: str) -> Turn:
        """Return the answer to a response."""


def build_environment(name: str) -> Environment:
    """Return a user's environment, `path/to/file.py:Name` or `package.module:Name`, made without arguments.

    Raises:
        ConfigError: the code cannot be loaded, raises an exception, or does not make an environment.
    """
    return make_environment(load_symbol(name), name)


def make_environment(found: Any, name: str) -> Environment:
    """Return the environment that a class makes without arguments.

    Args:
        found: the class.
        name: its name in messages.

    Raises:
        ConfigError: the class raises an exception, or the object that it makes lacks a method.
    """
    with guarded(
        name,
        lambda what: ConfigError(
            f"{name} cannot be made without arguments ({bare(what)}); give a class whose constructor "
            "needs none"
        ),
    ):
        environment: Environment = found()
    missing = [method for method in ("reset", "step") if not callable(getattr(environment, method, None))]
    if missing:
        raise ConfigError(
            f"{name} lacks {' and '.join(missing)}; see the Environment protocol in oat/environments/base.py"
        )
    return environment
