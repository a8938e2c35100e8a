"""The check of an environment. It plays episodes with made-up responses, and checks them against the
protocol. It finds these faults:

* A state, a turn, a message or a reward has a wrong type, or a reward is not finite.
* An episode does not end.
* A response makes a method raise an exception. The method should give a low reward instead.
* A method changes the prompt or the state that it gets. In a state, changes of plain data, arrays and tensors
  are found.
* An episode differs when it is played again with the same seed, or together with other episodes. The cause is
  a random number from another generator, a value that is kept outside the state, or an answer that depends on
  the other episodes of a batch. Together, episodes are played as in a run: by `step_all` if there is one, and
  at the same time if methods are `async`.
* `step` and `step_all`, if there are both, give different answers.
* An `async` method does not answer in time, or blocks the event loop.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from oat import wire
from oat.data.formats import checked
from oat.data.messages import ROLES
from oat.data.prompts import Source, read_prompts
from oat.environments.base import Environment, Turn, make_environment
from oat.environments.batched import is_async
from oat.environments.contract import state_fault, turn_fault, turns_fault
from oat.environments.event_loop import LATE, EventLoop
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
    options: Mapping[str, Any] | None = None,
    deadline_s: float = 10.0,
) -> None:
    """Play episodes with made-up responses, and check them against the protocol of environments. The head of
    this file lists the faults that are found. The check cannot end a plain call that never returns.

    Args:
        environment: a class, or its name as in a configuration.
        prompts: texts, or records in a format that a run reads (docs/data.md), with the further columns that
            the environment reads.
        responses: the model's responses, played in a cycle. For each prompt, the check plays one episode
            from each starting point in the cycle. The default has eight made-up texts, such as a number, an
            empty text and a long text.
        turns: number of turns after which an episode counts as endless.
        options: the environment's options, as in a configuration; None: there are none.
        deadline_s: the time within which an `async` method must answer.

    Raises:
        ContractError: a fault was found.
        DataError: a prompt has no format that a run can read.
        ConfigError: the environment cannot be loaded, does not take these options, cannot be made with them,
            or lacks a method.
    """
    said = _RESPONSES if responses is None else tuple(responses)
    found = load_symbol(environment) if isinstance(environment, str) else environment
    check = _Check(found, said, turns, options or {}, deadline_s)
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
    with closing(check.loop):
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
    def __init__(
        self,
        cls: Any,
        responses: Sequence[str],
        turns: int,
        options: Mapping[str, Any],
        deadline_s: float,
    ):
        super().__init__(getattr(cls, "__qualname__", type(cls).__name__))
        self.cls = cls
        self.responses = responses
        self.turns = turns
        self.options = options
        self.deadline_s = deadline_s
        self.loop = EventLoop()

    def fresh(self) -> Environment:
        return make_environment(self.cls, self.name, self.options)

    def alone(self, environment: Environment, episodes: Sequence[_Episode]) -> list[list[_Told]]:
        """Play the episodes one after another, and return the turns of each episode."""
        has_step = callable(getattr(environment, "step", None))
        return [self.played(environment, [episode], not has_step)[0] for episode in episodes]

    def together(self, episodes: Sequence[_Episode]) -> list[list[_Told]]:
        """Play the episodes with a new environment, as a run plays those of a batch. First all episodes
        begin. Then each makes its first turn, then each that goes on makes its second, and so on. The last
        episode comes first, so that none has the place that it had alone. Return the turns of each
        episode."""
        environment = self.fresh()
        has_step_all = callable(getattr(environment, "step_all", None))
        return self.played(environment, episodes[::-1], has_step_all)[::-1]

    def played(
        self, environment: Environment, episodes: Sequence[_Episode], by_step_all: bool
    ) -> list[list[_Told]]:
        """Play episodes turn by turn, check each turn, and return the turns of each episode.

        Args:
            by_step_all: call `step_all` for each turn of all episodes; otherwise `step` for each episode.
        """
        before = [wire.encode(episode.prompt) for episode in episodes]
        states = self.begun(environment, episodes, before)
        told: list[list[_Told]] = [[] for _ in episodes]
        going = list(range(len(episodes)))
        for turn in range(self.turns):
            said = {n: self.responses[(episodes[n].first + turn) % len(self.responses)] for n in going}
            where = {
                n: f"turn {turn + 1} of an episode of {_text(episodes[n].prompt)!r}, after {_short(text)!r}"
                for n, text in said.items()
            }
            turns = self.stepped(environment, states, said, where, by_step_all)
            for n in list(going):
                self.require(
                    wire.encode(episodes[n].prompt) == before[n],
                    "step changed the prompt of its episode; work on copies of its columns",
                )
                states[n] = turns[n].state
                told[n].append((turns[n].message, float(turns[n].reward)))
                if turns[n].message is None:
                    going.remove(n)
            if not going:
                return told
        self.require(
            False,
            f"an episode of {_text(episodes[going[0]].prompt)!r} did not end within {self.turns} turns; end "
            "it at some turn with the message None, or check with more `turns`",
        )
        return told

    def begun(
        self, environment: Environment, episodes: Sequence[_Episode], before: Sequence[bytes]
    ) -> list[Mapping[str, Any]]:
        """Call `reset` for each episode, check the results, and return them."""
        calls = {
            n: partial(environment.reset, episode.prompt, np.random.default_rng(episode.seed))
            for n, episode in enumerate(episodes)
        }
        states = self.called(calls, dict.fromkeys(calls, "reset"))
        for n, episode in enumerate(episodes):
            self.require(
                wire.encode(episode.prompt) == before[n],
                "reset changed its argument `prompt`; work on copies of its columns",
            )
            fault = state_fault(states[n])
            self.require(fault is None, f"reset {fault}")
        return [states[n] for n in calls]

    def stepped(
        self,
        environment: Environment,
        states: Sequence[Mapping[str, Any]],
        said: Mapping[int, str],
        where: Mapping[int, str],
        by_step_all: bool,
    ) -> dict[int, Turn]:
        """Call `step` or `step_all` for the episodes in `said`, check the turns, and return them."""
        before = {n: _encoded(states[n]) for n in said}
        method = "step_all" if by_step_all else "step"
        if by_step_all:
            call = partial(environment.step_all, [states[n] for n in said], list(said.values()))
            (turns,) = self.called({0: call}, {0: f"step_all ({next(iter(where.values()))})"}).values()
            fault = turns_fault(turns, len(said))
            self.require(fault is None, f"step_all {fault}")
            found = dict(zip(said, turns, strict=True))
        else:
            found = self.called(
                {n: partial(environment.step, states[n], text) for n, text in said.items()},
                {n: f"step ({where[n]})" for n in said},
            )
        for n, turn in found.items():
            self.require(
                _encoded(states[n]) == before[n],
                f"{method} changed its argument `state`; return another: {{**state, ...}}, with copies of "
                "its lists",
            )
            fault = turn_fault(turn)
            self.require(fault is None, f"{where[n]}: {method} {fault}")
            if turn.message is not None:
                self.told(turn.message, where[n])
        return found

    def called(self, calls: Mapping[int, Callable[[], Any]], names: Mapping[int, str]) -> dict[int, Any]:
        """Make calls, at the same time if the environment has `async` methods, and return the results.

        Args:
            names: for each call, its method and place, for messages.
        """
        if not is_async(self.cls):
            return {n: self.call(names[n], call) for n, call in calls.items()}
        outcomes = self.loop.outcomes(list(calls.values()), self.deadline_s)
        if outcomes is None:
            first = next(iter(names.values()))
            self.require(
                False,
                f"{first} blocks the event loop for more than {self.deadline_s:g} s; await what takes time, "
                "or call it by asyncio.to_thread",
            )
        found = {}
        for n, outcome in zip(calls, outcomes or (), strict=True):
            found[n] = self.call(names[n], outcome.result)
            self.require(
                found[n] is not LATE,
                f"{names[n]} did not answer within {self.deadline_s:g} s; make it faster, or check with a "
                "longer `deadline_s`",
            )
        return found

    def told(self, message: Message, where: str) -> None:
        """Check that a message has a valid role, and text that can be tokenised and stored."""
        role = message.role[:40]
        is_known = message.role in ROLES
        self.require(is_known, f"{where}: the message has the role {role!r}; {did_you_mean(role, ROLES)}")
        try:
            checked(message.plain, f"{self.name}: {where}: the message")
        except DataError as error:
            raise ContractError(str(error)) from error

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
