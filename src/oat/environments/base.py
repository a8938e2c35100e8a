"""The environment's protocol. In an episode, an environment answers each response of the model, and gives it
a reward.

An environment keeps no state of its own: `step(state, response)` returns the next state. So an episode can be
played again.
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
        state: the state of the episode after the response; an argument of the next `step`.
        message: the message that the model reads next; None ends the episode.
        reward: the reward of this response. The reward of an episode is the sum over its responses.
    """

    state: Mapping[str, Any]
    message: Message | None
    reward: float


class Environment(Protocol):
    """An environment, which plays episodes. Its methods depend only on their arguments, so an episode can be
    played again. For a bad response, return a low reward and raise nothing: an exception becomes an
    `EpisodeError`, which ends the training."""

    def reset(self, prompt: Prompt, generator: np.random.Generator) -> Mapping[str, Any]:
        """Return the state before the first response."""

    def step(self, state: Mapping[str, Any], response: str) -> Turn:
        """Return the environment's answer to a response."""


def build_environment(name: str) -> Environment:
    """Make a user's environment, without arguments.

    Args:
        name: `path/to/file.py:Name` or `package.module:Name` of its class.

    Raises:
        ConfigError: the code cannot be loaded, raises an exception, or does not make an environment.
    """
    return make_environment(load_symbol(name), name)


def make_environment(found: Any, name: str) -> Environment:
    """Make an environment from its class, without arguments.

    Args:
        found: the class.
        name: the class's name in messages.

    Raises:
        ConfigError: the class raises an exception, or the new object lacks a method of an environment.
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
