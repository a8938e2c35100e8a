"""The environment's protocol. In an episode, an environment answers each response of the model, and gives it
a reward.

An environment keeps no state of its own: `step(state, response)` returns the next state. So an episode can be
played again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from oat.errors import ConfigError, did_you_mean
from oat.plugins.calls import bare, guarded
from oat.plugins.loading import keywords, load_symbol
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
    """An environment, which plays episodes.

    Its class is constructed with the options of the configuration as keywords. Its methods depend only on
    their arguments and these options, so an episode can be played again. For a bad response, return a low
    reward and raise nothing: an exception becomes an `EpisodeError`, which ends the training.

    Each method may be `async`. The episodes of a batch are then answered at the same time, each within
    `sampling.environment_deadline_s` seconds.

    An environment has `step`, or `step_all`, or both. If it has `step_all`, a run calls only this one.
    """

    def reset(self, prompt: Prompt, generator: np.random.Generator) -> Mapping[str, Any]:
        """Return the state before the first response."""

    def step(self, state: Mapping[str, Any], response: str) -> Turn:
        """Return the environment's answer to a response."""

    def step_all(self, states: Sequence[Mapping[str, Any]], responses: Sequence[str]) -> Sequence[Turn]:
        """Return the answers to the responses of several episodes, in order. An answer must not depend on
        the other episodes: they are other ones when a run plays the episode again."""


def build_environment(name: str, options: Mapping[str, Any] | None = None) -> Environment:
    """Make a user's environment.

    Args:
        name: `path/to/file.py:Name` or `package.module:Name` of its class.
        options: the keywords of its constructor; None: there are none.

    Raises:
        ConfigError: the code cannot be loaded, raises an exception, or does not make an environment.
    """
    return make_environment(load_symbol(name), name, options or {})


def make_environment(found: Any, name: str, options: Mapping[str, Any] | None = None) -> Environment:
    """Make an environment from its class.

    Args:
        found: the class.
        name: the class's name in messages.
        options: the keywords of its constructor; None: there are none.

    Raises:
        ConfigError: the class does not take these options, or raises an exception; or the new object lacks a
            method of an environment.
    """
    options = options or {}
    _check_options(found, name, options)

    def refuse(what: str) -> ConfigError:
        return ConfigError(
            f"{name} cannot be made with the options {', '.join(options)} ({bare(what)}); repair its "
            "constructor, or its options"
            if options
            else f"{name} cannot be made without options ({bare(what)}); repair its constructor, or give the "
            "options that it needs, as in environment: {name: ..., option: ...}"
        )

    with guarded(name, refuse):
        environment: Environment = found(**options)
    missing = [method for method in ("reset", "step") if not _has(environment, method)]
    if "step" in missing and _has(environment, "step_all"):
        missing.remove("step")
    if missing:
        raise ConfigError(
            f"{name} lacks {' and '.join(missing)}; see the Environment protocol in oat/environments/base.py"
        )
    return environment


def environment_options(name: str) -> set[str] | None:
    """Return the names of the options that an environment takes: the keywords of its constructor. Return None
    if the constructor takes **kwargs.

    Raises:
        ConfigError: its code cannot be loaded.
    """
    return keywords(load_symbol(name))


def _check_options(found: Any, name: str, options: Mapping[str, Any]) -> None:
    takes = keywords(found) if callable(found) else set()
    for option in options:
        if takes is not None and option not in takes:
            raise ConfigError(f"{name} has no option {option!r}; {did_you_mean(option, takes)}")


def _has(environment: Any, method: str) -> bool:
    return callable(getattr(environment, method, None))
