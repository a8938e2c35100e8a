"""The episodes of a batch are answered together: by one call, at the same time, each within a deadline."""

import asyncio
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from oat.environments.base import Turn
from oat.environments.batched import BatchedEnvironment
from oat.errors import EpisodeError, OatWarning
from oat.types import Message, Prompt

STATES = [{"number": number} for number in range(4)]
SAID = ["a", "b", "c", "d"]
ROWS = [7, 8, 9, 10]


def prompts(count: int = 4) -> list[Prompt]:
    return [Prompt(ROWS[n], n, (Message("user", f"p{n}"),)) for n in range(count)]


def generators(count: int = 4) -> list[np.random.Generator]:
    return [np.random.default_rng(n) for n in range(count)]


def answer(state: Mapping[str, Any], response: str) -> Turn:
    return Turn({**state, "said": response}, Message("user", response.upper()), float(state["number"]))


class Plain:
    def reset(self, prompt: Prompt, generator: np.random.Generator) -> Any:
        return {"prompt": prompt.occurrence, "drawn": int(generator.integers(100))}

    def step(self, state: Any, response: str) -> Any:
        return answer(state, response)


class Together(Plain):
    """Has both methods; a run calls `step_all` alone."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, Any]] = []

    def step(self, state: Any, response: str) -> Any:
        raise AssertionError("step_all is there")

    def step_all(self, states: Any, responses: Any) -> Any:
        self.calls.append((states, responses))
        return tuple(answer(*each) for each in zip(states, responses, strict=True))


class Waiting(Plain):
    """Waits before it answers, by response: its number in tenths of a second.

    Attributes:
        most: the highest number of steps that waited together.
    """

    def __init__(self) -> None:
        self.loops: set[int] = set()
        self.cancelled: list[str] = []
        self.open = self.most = 0

    async def step(self, state: Any, response: str) -> Any:
        self.loops.add(id(asyncio.get_running_loop()))
        self.open += 1
        self.most = max(self.most, self.open)
        try:
            await asyncio.sleep(int(response) / 10)
        except asyncio.CancelledError:
            self.cancelled.append(response)
            raise
        finally:
            self.open -= 1
        return answer(state, response)


def batched(environment: Any, deadline_s: float = 5.0) -> BatchedEnvironment:
    return BatchedEnvironment(environment, deadline_s)


def assert_answered(turns: Sequence[Turn | None], said: Sequence[str] = SAID) -> None:
    assert turns == [answer(state, response) for state, response in zip(STATES, said, strict=True)]


def test_a_plain_one_is_stepped_episode_by_episode() -> None:
    played = batched(Plain())
    states = played.reset(prompts(), generators())
    assert states == [{"prompt": n, "drawn": int(np.random.default_rng(n).integers(100))} for n in range(4)]
    assert_answered(played.step(STATES, SAID, ROWS))
    assert played.step([], [], []) == []


def test_step_all_gets_the_whole_batch_in_one_call() -> None:
    environment = Together()
    played = batched(environment)
    assert_answered(played.step(STATES, SAID, ROWS))
    assert environment.calls == [(STATES, SAID)]
    assert played.step([], [], []) == []
    assert len(environment.calls) == 1


def test_async_steps_run_at_the_same_time_in_one_thread_that_stays() -> None:
    environment = Waiting()
    played = batched(environment)
    for _ in range(2):
        assert_answered(played.step(STATES, ["3", "2", "3", "1"], ROWS), ["3", "2", "3", "1"])
    assert environment.most == 4
    assert len(environment.loops) == 1
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "oat-environment"]
    played.close()
    thread.join(60)
    assert not thread.is_alive()
    assert_answered(played.step(STATES, ["0"] * 4, ROWS), ["0"] * 4)
    played.close()


def test_an_async_step_all_is_awaited() -> None:
    class Async(Together):
        async def step_all(self, states: Any, responses: Any) -> Any:
            await asyncio.sleep(0.01)
            return super().step_all(states, responses)

    played = batched(Async())
    assert_answered(played.step(STATES, SAID, ROWS))
    assert [state["prompt"] for state in played.reset(prompts(), generators()) if state] == [0, 1, 2, 3]
    played.close()


def test_past_its_deadline_an_episode_is_late_and_its_call_is_cancelled() -> None:
    environment = Waiting()
    played = batched(environment, 1.0)
    with pytest.warns(
        OatWarning,
        match=r"the environment Waiting did not answer 2 of 4 episodes within 1 s "
        r"\(sampling.environment_deadline_s\); they end here and have no reward",
    ):
        turns = played.step(STATES, ["0", "90", "1", "80"], ROWS)
    assert [turn is None for turn in turns] == [False, True, False, True]
    assert turns[2] == answer(STATES[2], "1")
    assert_answered(played.step(STATES, ["0"] * 4, ROWS), ["0"] * 4)
    assert sorted(environment.cancelled) == ["80", "90"]
    played.close()


def test_a_late_step_all_and_a_late_reset_leave_their_episodes_without_an_answer() -> None:
    class Slow(Together):
        async def reset(self, prompt: Prompt, generator: np.random.Generator) -> Any:
            await asyncio.sleep(prompt.occurrence * 10)
            return {}

        async def step_all(self, states: Any, responses: Any) -> Any:
            await asyncio.sleep(10)

    played = batched(Slow(), 1.0)
    with pytest.warns(OatWarning, match=r"4 of 4 episodes within"):
        assert played.step(STATES, SAID, ROWS) == [None] * 4
    with pytest.warns(OatWarning, match=r"3 of 4 episodes within"):
        assert played.reset(prompts(), generators()) == [{}, None, None, None]
    played.close()


def test_one_that_blocks_the_loop_is_named_and_the_next_call_has_another_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("oat.environments.event_loop._GRACE_S", 0.2)
    free = threading.Event()

    class Blocking(Waiting):
        async def step(self, state: Any, response: str) -> Any:
            if response == "9":
                free.wait(20)
            return await super().step(state, response)

    played = batched(Blocking(), 1.0)
    with pytest.raises(
        EpisodeError,
        match=r"the environment Blocking blocks its event loop: 1 s \(sampling.environment_deadline_s\) "
        r"were over.*asyncio.to_thread, in an episode from one of the records 7, 8, 9, 10; repair it",
    ):
        played.step(STATES, ["0", "9", "0", "0"], ROWS)
    assert_answered(played.step(STATES, ["0"] * 4, ROWS), ["0"] * 4)
    free.set()
    played.close()


def test_calls_in_threads_that_never_return_make_no_other_episode_late() -> None:
    free = threading.Event()

    class Threaded(Plain):
        async def step(self, state: Any, response: str) -> Any:
            said = await asyncio.to_thread(lambda: response if response != "stuck" else free.wait(20))
            return answer(state, str(said))

    played = batched(Threaded(), 1.0)
    stuck = 40  # more than the threads of asyncio's own executor, which are at most 32
    with pytest.warns(OatWarning, match=r"40 of 40 episodes"):
        played.step([{"number": 0}] * stuck, ["stuck"] * stuck, [1] * stuck)
    assert_answered(played.step(STATES, SAID, ROWS))
    free.set()
    played.close()


ENDING = """
import asyncio, os, signal, threading, time
from oat.environments.event_loop import EventLoop

for seconds in (0.3, 1.0):
    timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT))
    timer.daemon = True
    timer.start()
try:
    EventLoop().outcomes([lambda: asyncio.to_thread(time.sleep, 90)], 60)
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.mark.fault("R4")
def test_a_call_in_a_thread_keeps_no_process_alive() -> None:
    """A process ends though such a call goes on, without a message of Python's own at a second Ctrl-C."""
    ended = subprocess.run([sys.executable, "-c", ENDING], capture_output=True, text=True, timeout=45)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "interrupted\n", "")


class Wrong(Plain):
    """Answers the third episode wrongly."""

    def __init__(self, wrong: Any):
        self.wrong = wrong

    def step(self, state: Any, response: str) -> Any:
        if state["number"] != 2:
            return answer(state, response)
        if isinstance(self.wrong, BaseException):
            raise self.wrong
        return self.wrong


class WrongAsync(Wrong):
    async def step(self, state: Any, response: str) -> Any:
        return super().step(state, response)


class WrongTogether(Wrong):
    def step_all(self, states: Any, responses: Any) -> Any:
        return [self.step(*each) for each in zip(states, responses, strict=True)]


GOOD = Turn({}, None, 0.0)


class Hostile:
    def __repr__(self) -> str:
        raise TypeError(self.__class__)


@pytest.mark.parametrize("cls", [Wrong, WrongAsync, WrongTogether])
@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (ValueError("no"), r"raised ValueError: no \(line \d+ of test_batched\.py\)"),
        (SystemExit(3), r"raised SystemExit: 3 \(line \d+ of test_batched\.py\)"),
        (({}, None, 0.0), r"is wrong: \w+ returned \({}, None, 0.0\); return an oat.environments.base.Turn"),
        (
            Hostile(),
            r"is wrong: \w+ returned a Hostile whose repr fails; return an oat.environments.base.Turn",
        ),
        (Turn(None, None, 0.0), r"is wrong: \w+ returned the state None"),  # type: ignore[arg-type]
        (Turn({}, "go on", 0.0), r"is wrong: \w+ returned the message 'go on'"),  # type: ignore[arg-type]
        (
            Turn({}, Message("assistant", "so"), 0.0),
            r"is wrong: \w+ returned a message of the role assistant, .*; return what the user or a tool",
        ),
        (
            Turn({}, Message("user", "a\ud800b"), 0.0),
            r"is wrong: \w+ returned the message .*, which has a lone surrogate .*; return content.encode",
        ),
        (Turn({}, None, float("nan")), r"is wrong: \w+ returned the reward nan; return a finite number"),
        (Turn({}, None, None), r"is wrong: \w+ returned the reward None"),  # type: ignore[arg-type]
    ],
)
def test_what_is_wrong_names_the_record(cls: type[Wrong], wrong: Any, said: str) -> None:
    played = batched(cls(wrong))
    is_whole_batch = cls is WrongTogether and isinstance(wrong, BaseException)
    where = "one of the records 7, 8, 9, 10" if is_whole_batch else "record 9"
    with pytest.raises(
        EpisodeError,
        match=rf"^the environment {cls.__name__} {said}.*, in an episode from {where}; repair it, and run",
    ):
        played.step(STATES, SAID, ROWS)
    played.close()


@pytest.mark.parametrize("cls", [Wrong, WrongTogether])
@pytest.mark.parametrize(
    "reward",
    [np.float32(0.5), np.int64(2), np.float64(0.25), Fraction(1, 2), True],
    ids=lambda r: type(r).__name__,
)
def test_rewards_of_every_kind_of_number_become_floats(cls: type[Wrong], reward: Any) -> None:
    turns = batched(cls(Turn({}, None, reward))).step(STATES, SAID, ROWS)
    assert turns[2] is not None
    assert turns[2].reward == reward
    assert type(turns[2].reward) is float


@pytest.mark.parametrize(
    ("turns", "said"),
    [
        (None, "step_all returned None; return a list of turns, one for each response, in order"),
        ({1: GOOD}, "return a list of turns"),
        ([GOOD] * 3, "step_all returned 3 turns for 4 responses; return one for each, in order"),
        ([GOOD] * 5, "step_all returned 5 turns for 4 responses"),
    ],
)
def test_step_all_returns_a_turn_for_each_response(turns: Any, said: str) -> None:
    class Odd(Plain):
        def step_all(self, states: Any, responses: Any) -> Any:
            return turns

    with pytest.raises(EpisodeError, match=said):
        batched(Odd()).step(STATES, SAID, ROWS)


def test_a_reset_that_is_wrong_names_the_record() -> None:
    class Stateless(Plain):
        def reset(self, prompt: Prompt, generator: np.random.Generator) -> Any:
            return None if prompt.occurrence == 1 else {}

    with pytest.raises(EpisodeError, match=r"reset returned None; return the state .*from record 8;"):
        batched(Stateless()).reset(prompts(), generators())
