"""The check of an environment. It plays episodes with made-up responses, and checks them against the
protocol."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, cast

import numpy as np

from oat import wire
from oat.data.formats import checked
from oat.data.messages import ROLES
from oat.data.prompt_set import Source, read_prompts
from oat.environments.base import Environment, Turn, make_environment
from oat.errors import ContractError, DataError, WireError, did_you_mean
from oat.plugins.loading import load_symbol
from oat.testing.part import Part
from oat.types import Message, Prompt

_RESPONSES = ("4", "", "a b c\n", "four", "4\n<|im_end|>\x00", "vier, 四, ٤", "-1.5e9", "0" * 2_000)

_Told = tuple[Message | None, float]
"""Message and reward of a turn."""


def check_environment(
    environment: Any,
    prompts: Sequence[str | Mapping[str, Any]] = ("2+2=",),
    *,
    responses: Sequence[str] | None = None,
    turns: int = 100,
) -> None:
    """Play episodes with made-up responses, and check them against the protocol of environments.

    The check finds these faults:

    * A state, a turn, a message or a reward has a wrong type, or a reward is not finite.
    * An episode does not end.
    * A response makes a method raise an exception. The method should give a low reward instead.
    * A method changes the prompt or the state that it gets. In a state, changes of plain data, arrays and
      tensors are found.
    * An episode differs when it is played again with the same seed, or together with other episodes. The
      cause is a random number from another generator, or a value that is kept outside the state.

    The check cannot end a call that never returns.

    Args:
        environment: a class, or its name as in a configuration.
        prompts: texts, or records in a format that a run reads (docs/data.md), with the further columns that
            the environment reads.
        responses: the model's responses, played in a cycle. For each prompt, the check plays one episode
            from each starting point in the cycle. The default has eight made-up texts, such as a number, an
            empty text and a long text.
        turns: number of turns after which an episode counts as endless.

    Raises:
        ContractError: a fault was found.
        DataError: a prompt has no format that a run can read.
        ConfigError: the environment cannot be loaded, cannot be made without arguments, or lacks a method.
    """
    said = _RESPONSES if responses is None else tuple(responses)
    found = load_symbol(environment) if isinstance(environment, str) else environment
    check = _Check(found, said, turns)
    check.require(prompts and said, "there is nothing to play; give at least one prompt and one response")
    read = read_prompts(
        Source([{"prompt": record} if isinstance(record, str) else record for record in prompts])
    )
    episodes = [
        _Episode(prompt, n * len(said) + first, first)
        for n, prompt in enumerate(read)
        for first in range(len(said))
    ]
    one = check.fresh()
    alone = check.alone(one, episodes)
    check.same("played again with the same seed", episodes, alone, check.alone(one, episodes))
    check.same(
        "played turn by turn beside others, by one that was made anew",
        episodes,
        alone,
        check.together(episodes),
    )


@dataclass(frozen=True)
class _Episode:
    """An episode to play.

    Attributes:
        seed: seed of the generator that `reset` gets.
        first: index, among the made-up responses, of the response with which the episode begins.
    """

    prompt: Prompt
    seed: int
    first: int


class _Check(Part):
    def __init__(self, cls: Any, responses: Sequence[str], turns: int):
        super().__init__(getattr(cls, "__qualname__", type(cls).__name__))
        self.cls = cls
        self.responses = responses
        self.turns = turns

    def fresh(self) -> Environment:
        return make_environment(self.cls, self.name)

    def begun(self, environment: Environment, episode: _Episode) -> Mapping[str, Any]:
        """Call `reset`, check its result, and return it: the state before the first response."""
        before = wire.encode(episode.prompt)
        state = self.call("reset", environment.reset, episode.prompt, np.random.default_rng(episode.seed))
        self.require(
            wire.encode(episode.prompt) == before,
            "reset changed its argument `prompt`; work on copies of its columns",
        )
        self.require(
            isinstance(state, Mapping),
            f"reset returned {str(state)[:60]}; return the state before the first response, a dict",
        )
        return cast(Mapping[str, Any], state)

    def played(
        self, environment: Environment, episode: _Episode, state: Mapping[str, Any]
    ) -> Iterator[_Told]:
        """Play an episode, check each turn, and yield its message and reward."""
        where, before = f"an episode of {_text(episode.prompt)!r}", wire.encode(episode.prompt)
        for number in range(self.turns):
            response = self.responses[(episode.first + number) % len(self.responses)]
            turn = self.turn(
                environment, state, response, f"turn {number + 1} of {where}, after {_short(response)!r}"
            )
            self.require(
                wire.encode(episode.prompt) == before,
                "step changed the prompt of its episode; work on copies of its columns",
            )
            yield turn.message, float(turn.reward)
            if turn.message is None:
                return
            state = turn.state
        self.require(
            False,
            f"{where} did not end within {self.turns} turns; end it at some turn with the message None, or "
            "check with more `turns`",
        )

    def turn(self, environment: Environment, state: Mapping[str, Any], response: str, where: str) -> Turn:
        before = _encoded(state)
        turn = self.call(f"step ({where})", environment.step, state, response)
        self.require(
            _encoded(state) == before,
            "step changed its argument `state`; return another: {**state, ...}, with copies of its lists",
        )
        self.require(
            isinstance(turn, Turn),
            f"{where}: step returned {str(turn)[:60]}; return an oat.environments.base.Turn",
        )
        self.require(
            isinstance(turn.state, Mapping),
            f"{where}: the state is {str(turn.state)[:60]}; return a dict, also with the last turn",
        )
        message = turn.message
        is_message = (
            isinstance(message, Message)
            and isinstance(message.content, str)
            and isinstance(message.role, str)
        )
        self.require(
            message is None or is_message,
            f"{where}: the message is {str(message)[:60]}; return an oat.types.Message, or None to end",
        )
        is_other = message is None or message.role != "assistant"
        self.require(
            is_other,
            f"{where}: the message is the assistant's, which only the model writes; give it another role, as "
            "user",
        )
        self.require(
            _is_finite(turn.reward), f"{where}: the reward is {str(turn.reward)[:60]}; return a finite number"
        )
        if message is not None:
            self.told(message, where)
        return turn

    def told(self, message: Message, where: str) -> None:
        """Check that a message has a valid role, and text that can be tokenised and stored."""
        role = message.role[:40]
        is_known = message.role in ROLES
        self.require(is_known, f"{where}: the message has the role {role!r}; {did_you_mean(role, ROLES)}")
        try:
            checked(message.plain, f"{self.name}: {where}: the message")
        except DataError as error:
            raise ContractError(str(error)) from error

    def alone(self, environment: Environment, episodes: Sequence[_Episode]) -> list[list[_Told]]:
        """Play the episodes one after another, and return the turns of each episode."""
        return [
            list(self.played(environment, episode, self.begun(environment, episode))) for episode in episodes
        ]

    def together(self, episodes: Sequence[_Episode]) -> list[list[_Told]]:
        """Play the episodes with a new environment, in the order of a run. First all episodes begin. Then
        each makes its first turn, then each that goes on makes its second, and so on. Return the turns of
        each episode."""
        environment = self.fresh()
        begun = [self.begun(environment, episode) for episode in episodes]
        playing = [
            (self.played(environment, *each), list[_Told]()) for each in zip(episodes, begun, strict=True)
        ]
        told = [so_far for _, so_far in playing]
        while playing:
            before = [len(so_far) for _, so_far in playing]
            for turns, so_far in playing:
                so_far.extend(turn for turn in [next(turns, None)] if turn is not None)
            playing = [each for each, size in zip(playing, before, strict=True) if len(each[1]) > size]
        return told

    def same(
        self,
        how: str,
        episodes: Sequence[_Episode],
        first: Sequence[Sequence[_Told]],
        other: Sequence[Sequence[_Told]],
    ) -> None:
        for episode, one, two in zip(episodes, first, other, strict=True):
            places = [
                place
                for place in range(max(len(one), len(two)))
                if one[place : place + 1] != two[place : place + 1]
            ]
            if places:
                place = places[0]
                a, b = (_shown(each[place]) if place < len(each) else "nothing" for each in (one, two))
                self.require(
                    False,
                    f"turn {place + 1} of an episode of {_text(episode.prompt)!r} told {a}, and {b} when it "
                    f"was {how}; draw numbers in `reset` from `generator` only, and keep what is to be "
                    "remembered in the state, not in the object",
                )


def _is_finite(reward: Any) -> bool:
    try:
        return isinstance(reward, Real) and math.isfinite(reward)
    except OverflowError:  # an int that is too large for a float
        return False


def _encoded(state: Mapping[str, Any]) -> bytes | None:
    """Return the bytes of a state, for comparison; None if the state cannot be encoded."""
    try:
        return wire.encode(dict(state))
    except WireError:
        return None


def _text(prompt: Prompt) -> str:
    return _short(prompt.messages[-1].content)


def _short(text: str) -> str:
    return text if len(text) <= 40 else text[:40] + "..."


def _shown(told: _Told) -> str:
    message, reward = told
    return f"{'the end' if message is None else repr(_short(message.content))} and the reward {reward:g}"
