"""`check_environment` passes the environments of `oat`, and finds the faults of others."""

import asyncio
import itertools
import random
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from oat.environments.base import Turn
from oat.errors import ConfigError, ContractError, DataError
from oat.testing import check_environment
from oat.types import Message, Prompt

TESTS = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("name", "record"),
    [
        ("protocol/guessing.py:Guessing", {"prompt": "guess"}),
        ("protocol/guessing.py:Together", {"prompt": "guess"}),
        ("protocol/guessing.py:Waiting", {"prompt": "guess"}),
        ("../examples/05_environment.py:HigherLower", {"prompt": "guess", "secret": 2}),
        ("../examples/07_calculator.py:Calculator", {"prompt": "50+51", "answer": 101}),
    ],
)
def test_those_there_are_pass(name: str, record: dict[str, Any]) -> None:
    check_environment(str(TESTS / name), [record])
    check_environment(str(TESTS / name), [record, record], responses=["1", "3", "2"], turns=2)


class Counting:
    """An environment of three turns with a number drawn per episode. Subclasses add a fault."""

    def reset(self, prompt: Prompt, generator: np.random.Generator) -> Any:
        return {
            "turn": 1,
            "drawn": int(generator.integers(1_000_000)),
            "said": [],
            "level": prompt.columns.get("levels", [3])[0],
        }

    def step(self, state: Any, response: str) -> Any:
        after = {**state, "turn": state["turn"] + 1, "said": [*state["said"], response]}
        return self.spoilt(
            Turn(
                after,
                Message("user", f"{state['drawn']}") if state["turn"] < 3 else None,
                float(len(response)),
            ),
            state,
        )

    def spoilt(self, turn: Turn, state: Mapping[str, Any]) -> Any:
        return turn


def test_a_sound_one_passes() -> None:
    check_environment(Counting)
    check_environment(Counting, ["a", {"prompt": "b", "levels": [1, 2]}], responses=["x", "yy"])


class Optional(Counting):
    """Takes options."""

    def __init__(self, size: int = 1, *, word: str = "go"):
        self.size, self.word = size, word

    def step(self, state: Any, response: str) -> Any:
        turn = super().step(state, response)
        message = turn.message and Message("user", self.word * self.size)
        return replace(turn, message=message)


def test_options_are_those_of_a_configuration() -> None:
    check_environment(Optional)
    check_environment(Optional, options={"size": 3, "word": "x"})
    with pytest.raises(ConfigError, match=r"Optional has no option 'words'; did you mean `word`\?"):
        check_environment(Optional, options={"words": "x"})
    with pytest.raises(ContractError, match=r"unsupported operand|can't multiply"):
        check_environment(Optional, options={"size": "3"})


class Batch(Counting):
    """Answers all episodes in one call, and has no `step`."""

    step = None  # type: ignore[assignment]

    def step_all(self, states: Any, responses: Any) -> Any:
        return [Counting.step(self, *each) for each in zip(states, responses, strict=True)]


class Both(Batch):
    step = Counting.step  # type: ignore[assignment]


class Async(Counting):
    async def reset(self, prompt: Prompt, generator: np.random.Generator) -> Any:
        return super().reset(prompt, generator)

    async def step(self, state: Any, response: str) -> Any:
        await asyncio.sleep(0.001 * (len(response) % 3))
        return super().step(state, response)


class AsyncBatch(Batch):
    async def step_all(self, states: Any, responses: Any) -> Any:
        return super().step_all(states, responses)


@pytest.mark.parametrize("environment", [Batch, Both, Async, AsyncBatch])
def test_batches_and_async_methods_are_played_as_in_a_run(environment: type) -> None:
    check_environment(environment, LEVELS)


class Ranks(Batch):
    """The reward depends on the other episodes of the batch."""

    def step_all(self, states: Any, responses: Any) -> Any:
        turns = super().step_all(states, responses)
        most = max(turn.reward for turn in turns)
        return [replace(turn, reward=turn.reward / max(most, 1)) for turn in turns]


class First(Batch):
    """The first episode of a batch gets more."""

    def step_all(self, states: Any, responses: Any) -> Any:
        turns = super().step_all(states, responses)
        return [replace(turns[0], reward=turns[0].reward + len(turns)), *turns[1:]]


class Differs(Both):
    def step(self, state: Any, response: str) -> Any:
        return replace(super().step(state, response), reward=-1.0)


class TooFew(Batch):
    def step_all(self, states: Any, responses: Any) -> Any:
        return super().step_all(states, responses)[: len(states) - (len(states) > 1)]


class OneForAll(Batch):
    def step_all(self, states: Any, responses: Any) -> Any:
        return super().step_all(states, responses)[0]


class FragileBatch(Batch):
    def step_all(self, states: Any, responses: Any) -> Any:
        return [replace(turn, reward=float(int("four"))) for turn in super().step_all(states, responses)]


class BatchInPlace(Batch):
    def step_all(self, states: Any, responses: Any) -> Any:
        turns = super().step_all(states, responses)
        for state, response in zip(states, responses, strict=True):
            state["said"].append(response)
        return turns


class Forgotten(Counting):
    """`step` is async, and is not awaited by the one that calls it."""

    async def wait(self, state: Any, response: str) -> Any:
        return super().step(state, response)

    def step(self, state: Any, response: str) -> Any:
        waiting = self.wait(state, response)
        waiting.close()
        return waiting


class FragileAsync(Async):
    async def step(self, state: Any, response: str) -> Any:
        return replace(await super().step(state, response), reward=float(int(response)))


class Slow(Async):
    async def step(self, state: Any, response: str) -> Any:
        await asyncio.sleep(30)


class Shares(Async):
    """Keeps a number in the object while others run."""

    turn = 0

    async def step(self, state: Any, response: str) -> Any:
        self.turn = state["drawn"]
        await asyncio.sleep(0.01)
        return replace(await super().step(state, response), reward=float(self.turn))


class NoState(Counting):
    def reset(self, prompt: Prompt, generator: np.random.Generator) -> Any:
        return None


class Fragile(Counting):
    def step(self, state: Any, response: str) -> Any:
        return replace(super().step(state, response), reward=float(int(response)))


class Tuple(Counting):
    def spoilt(self, turn: Turn, state: Mapping[str, Any]) -> Any:
        return turn.state, turn.message, turn.reward


class EndsWithoutState(Counting):
    def spoilt(self, turn: Turn, state: Mapping[str, Any]) -> Any:
        return turn if turn.message else replace(turn, state=None)


class Text(Counting):
    def spoilt(self, turn: Turn, state: Mapping[str, Any]) -> Any:
        return replace(turn, message="go on")


class Content(Counting):
    def spoilt(self, turn: Turn, state: Mapping[str, Any]) -> Any:
        return replace(turn, message=Message("user", 7))  # type: ignore[arg-type]


class Assistant(Counting):
    def spoilt(self, turn: Turn, state: Mapping[str, Any]) -> Any:
        return replace(turn, message=Message("assistant", "go on"))


class Stranger(Counting):
    def spoilt(self, turn: Turn, state: Mapping[str, Any]) -> Any:
        return replace(turn, message=turn.message and Message("usr", "go on"))


class Unencodable(Counting):
    def spoilt(self, turn: Turn, state: Mapping[str, Any]) -> Any:
        return replace(turn, message=turn.message and Message("user", "\ud800"))


class Nul(Counting):
    def spoilt(self, turn: Turn, state: Mapping[str, Any]) -> Any:
        return replace(turn, message=turn.message and Message("user", "\0"))


class Immense(Counting):
    def spoilt(self, turn: Turn, state: Mapping[str, Any]) -> Any:
        return replace(turn, reward=10**400)


class NotANumber(Counting):
    def spoilt(self, turn: Turn, state: Mapping[str, Any]) -> Any:
        return replace(turn, reward=float("nan") if turn.message is None else 0.0)


class NoReward(Counting):
    def spoilt(self, turn: Turn, state: Mapping[str, Any]) -> Any:
        return replace(turn, reward=None)


class Endless(Counting):
    def spoilt(self, turn: Turn, state: Mapping[str, Any]) -> Any:
        return replace(turn, message=Message("user", "go on"))


class TakesFromPrompt(Counting):
    def reset(self, prompt: Prompt, generator: np.random.Generator) -> Any:
        return {**super().reset(prompt, generator), "level": prompt.columns["levels"].pop()}


class TakesFromPromptLater(Counting):
    def reset(self, prompt: Prompt, generator: np.random.Generator) -> Any:
        return {**super().reset(prompt, generator), "levels": prompt.columns["levels"]}

    def step(self, state: Any, response: str) -> Any:
        levels = state["levels"]
        turn = super().step({**state, "levels": list(levels)}, response)
        state["levels"].append(1)
        return turn


class InPlace(Counting):
    def spoilt(self, turn: Turn, state: Any) -> Any:
        state["said"].append("again")
        return turn


class GlobalRandomness(Counting):
    def spoilt(self, turn: Turn, state: Mapping[str, Any]) -> Any:
        return replace(turn, reward=random.random())


class Counter(Counting):
    """Counts episodes over its whole life."""

    def __init__(self) -> None:
        self.counts = itertools.count()

    def reset(self, prompt: Prompt, generator: np.random.Generator) -> Any:
        return {**super().reset(prompt, generator), "drawn": next(self.counts)}


class Remembers(Counting):
    """Keeps the episode in the object, which several episodes share."""

    def reset(self, prompt: Prompt, generator: np.random.Generator) -> Any:
        state = super().reset(prompt, generator)
        self.drawn = state["drawn"]
        return state

    def spoilt(self, turn: Turn, state: Mapping[str, Any]) -> Any:
        return replace(turn, message=turn.message and Message("user", str(self.drawn)))


class Unequal(Counting):
    """Ends an episode earlier if another one runs."""

    def __init__(self) -> None:
        self.open = 0

    def reset(self, prompt: Prompt, generator: np.random.Generator) -> Any:
        self.open += 1
        return super().reset(prompt, generator)

    def spoilt(self, turn: Turn, state: Mapping[str, Any]) -> Any:
        ended = replace(turn, message=None) if self.open > 1 else turn
        self.open -= ended.message is None
        return ended


LEVELS = [{"prompt": "2+2=", "levels": [1, 2, 3]}]


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        (NoState, r"reset returned None; return the state before the first response, a dict"),
        (
            Fragile,
            (
                r"step \(turn 2 of an episode of '2\+2=', after ''\) raised ValueError: invalid literal "
                r".*test_testing_environments.py:\d+\)"
            ),
        ),
        (
            Tuple,
            (
                r"turn 1 of an episode of '2\+2=', after '4': step returned \(.*; return an "
                r"oat.environments.base.Turn"
            ),
        ),
        (
            EndsWithoutState,
            r"turn 3 of .*: step returned the state None; return a dict, also with the last turn",
        ),
        (Text, r"step returned the message 'go on'; return an oat.types.Message, or None to end"),
        (Content, r"step returned the message Message\(.*; return an oat.types.Message, or None to end"),
        (
            Assistant,
            r"turn 1 of .*: step returned a message of the role assistant, which is the model's own; return",
        ),
        (Stranger, r"turn 1 of .*: the message has the role 'usr'; did you mean `user`\?"),
        (Unencodable, r"turn 1 of .*: step returned the message .* lone surrogate .*; return content.encode"),
        (Nul, r"turn 1 of .*: the message: field 'content': .*a NUL character"),
        (Immense, r"turn 1 of .*: step returned the reward 10{59}\.\.\.; return a finite number"),
        (NotANumber, r"turn 3 of .*: step returned the reward nan; return a finite number"),
        (NoReward, r"turn 1 of .*: step returned the reward None; return a finite number"),
        (
            Endless,
            r"an episode of '2\+2=' did not end within 20 turns; end it at some turn with the message None",
        ),
        (TakesFromPrompt, r"reset changed its argument `prompt`; work on copies of its columns"),
        (TakesFromPromptLater, r"step changed its argument `state`; return another"),
        (
            InPlace,
            (
                r"step changed its argument `state`; return another: \{\*\*state, ...\}, with copies of its "
                r"lists"
            ),
        ),
        (
            GlobalRandomness,
            (
                r"turn 1 of .* told '\d+' and the reward 0.\d+, and '\d+' and the reward 0.\d+ when it was "
                r"played again with"
            ),
        ),
        (
            Counter,
            (
                r"turn 1 of .* told '0' and the reward 1, and '8' and the reward 1 when it was played again "
                r"with the same seed; draw numbers"
            ),
        ),
        (
            Remembers,
            (
                r"turn 1 of .* when it was played turn by turn beside others, by one that was made anew; .* "
                r"keep what is to be remembered"
            ),
        ),
        (Ranks, r"turn \d of .* when it was played turn by turn beside others"),
        (First, r"turn \d of .* when it was played turn by turn beside others"),
        (
            Differs,
            r"turn 1 of .* told .* the reward -1, and .* when it was played turn by turn beside others",
        ),
        (TooFew, r"step_all returned 7 turns for 8 responses; return one for each, in order"),
        (OneForAll, r"step_all returned Turn\(.*; return a list of turns, one for each response, in order"),
        (
            FragileBatch,
            r"step_all \(turn 1 of an episode of '2\+2=', after '4'\) raised ValueError: .*\.py:\d+\)",
        ),
        (BatchInPlace, r"step_all changed its argument `state`; return another"),
        (Forgotten, r"turn 1 of .*: step returned <coroutine .*; return an oat.environments.base.Turn"),
        (
            FragileAsync,
            (
                r"step \(turn 2 of an episode of '2\+2=', after ''\) raised ValueError: invalid literal "
                r".*test_testing_environments.py:\d+\)"
            ),
        ),
        (Shares, r"turn \d of .* when it was played turn by turn beside others"),
        (Unequal, r"turn \d of .* the end and the reward \d+ when it was played turn by turn beside others"),
    ],
)
def test_what_is_wrong_is_said(environment: type, said: str) -> None:
    with pytest.raises(ContractError, match=f"^{environment.__name__}: .*{said}"):
        check_environment(environment, LEVELS, turns=20)


def test_an_answer_that_does_not_come_in_time_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ContractError,
        match=r"Slow: step \(turn 1 of .*\) did not answer within 0.2 s; make it faster, or",
    ):
        check_environment(Slow, deadline_s=0.2)
    monkeypatch.setattr("oat.environments.event_loop._GRACE_S", 0.1)
    free = threading.Event()

    class Blocks(Async):
        async def step(self, state: Any, response: str) -> Any:
            free.wait(20)

    with pytest.raises(ContractError, match=r"step \(turn 1 of .* blocks the event loop for more than 0.1 s"):
        check_environment(Blocks, deadline_s=0.1)
    free.set()


class Reader(Counting):
    """Checks that it gets a conversation with a column."""

    def reset(self, prompt: Prompt, generator: np.random.Generator) -> Any:
        assert [message.role for message in prompt.messages] == ["system", "user"]
        assert prompt.is_chat
        assert prompt.columns == {"levels": [2]}
        return super().reset(prompt, generator)


def test_prompts_are_read_as_a_run_reads_them() -> None:
    conversation = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2="}]
    check_environment(Reader, [{"prompt": conversation, "levels": (np.int64(2),)}])
    with pytest.raises(
        DataError, match=r"records:1: field 'prompt': expected in every record, got the columns 'question'"
    ):
        check_environment(Counting, [{"question": "2+2="}])
    with pytest.raises(DataError, match=r"message 1: expected a role, got 'usr'"):
        check_environment(Counting, [{"prompt": [{"role": "usr", "content": "2+2="}]}])


def test_what_is_no_environment_is_said() -> None:
    class Needy(Counting):
        def __init__(self, size: int):
            self.size = size

    with pytest.raises(ConfigError, match=r"Needy cannot be made without options \(TypeError"):
        check_environment(Needy)
    with pytest.raises(ConfigError, match=r"dict lacks reset and step; see the Environment protocol"):
        check_environment(dict)
    for nothing in ({"prompts": []}, {"responses": []}):
        with pytest.raises(
            ContractError,
            match=r"Counting: there is nothing to play; give at least one prompt and one response",
        ):
            check_environment(Counting, **nothing)  # type: ignore[arg-type]
