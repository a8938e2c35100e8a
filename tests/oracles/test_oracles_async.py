"""Oracles of async functions."""

import asyncio
import functools
import signal
from dataclasses import replace
from pathlib import Path
from threading import Event

import pytest
from fixtures import make_group, make_questions
from questions import ask, length, question

from oat.errors import OracleError
from oat.oracles.callables import CallableComparison, CallableOracle
from oat.oracles.make import build_oracle


def test_only_the_asked_tickets_are_answered():
    oracle = CallableOracle(length, "length")
    one, two = oracle.submit([question(0, ["a"]), question(1, ["bb"])])
    assert [(ticket, answer.values) for ticket, answer in oracle.collect([two, two, "unknown"], 1.0)] == [
        (two, (2.0,))
    ]
    assert [(ticket, answer.values) for ticket, answer in oracle.collect([one, two], 1.0)] == [(one, (1.0,))]


def test_an_async_function():
    async def reward(prompts, completions, **columns):
        await asyncio.sleep(0)
        return length(completions)

    assert ask(CallableOracle(reward, "slow"), question(0, ["a", "bb"]))[0].values == (1.0, 2.0)


class Judge:
    """An object that is async itself, as a method and as a partial function."""

    async def __call__(self, completions):
        return await self.method(completions)

    async def method(self, completions, weight=1.0):
        await asyncio.sleep(0)
        return [weight * len(text) for text in completions]


class Handing:
    """An object that is not async, but returns an awaitable."""

    def __call__(self, completions):
        return Judge().method(completions)


ASYNCHRONOUS = {
    "object": Judge(),
    "method": Judge().method,
    "partial": functools.partial(Judge().method, weight=1.0),
    "partial of an object": functools.partial(Judge()),
    "awaitable": lambda completions: Judge().method(completions),
    "object that returns one": Handing(),
}


@pytest.mark.parametrize("function", ASYNCHRONOUS.values(), ids=ASYNCHRONOUS)
@pytest.mark.parametrize("in_loop", [False, True])
def test_whatever_is_awaited_is_waited_for(function, in_loop):
    """The oracle waits for any awaitable, also if an event loop is already running, as in a notebook."""

    async def in_a_notebook():
        return ask(CallableOracle(function, "slow"), question(0, ["a", "bb"]))

    answers = (
        asyncio.run(in_a_notebook())
        if in_loop
        else ask(CallableOracle(function, "slow"), question(0, ["a", "bb"]))
    )
    assert answers[0].values == (1.0, 2.0)


@pytest.mark.parametrize("name", ["object", "method", "partial", "partial of an object"])
def test_what_is_known_to_be_asynchronous_begins_when_it_is_asked(name):
    """A call of an async function begins with `submit`, not with `collect`."""
    begun = Event()

    class Seen(Judge):
        async def method(self, completions, weight=1.0):
            begun.set()
            return await super().method(completions, weight)

    of = {
        "object": Seen(),
        "method": Seen().method,
        "partial": functools.partial(Seen().method),
        "partial of an object": functools.partial(Seen()),
    }
    CallableOracle(of[name], "slow").submit([question(0, ["a"])])
    assert begun.wait(60.0)


def test_an_error_of_an_object_names_its_line():
    class Wrong:
        def __call__(self, completions):
            return [1 / 0]

    with pytest.raises(
        OracleError,
        match=r"wrong raised ZeroDivisionError: division by zero \(line \d+ of test_oracles_async.py\)",
    ):
        ask(CallableOracle(Wrong(), "wrong"), question(0, ["a"]))


def test_an_async_function_that_takes_too_long_leaves_its_questions_open() -> None:
    """A slow async function is not called again while it runs. Its answers are returned when they arrive."""
    calls, is_time = [], Event()

    async def slow(prompts: list[str], completions: list[str]) -> list[float]:
        calls.append(len(completions))
        await asyncio.to_thread(is_time.wait, 60.0)
        return [1.0] * len(completions)

    oracle = CallableOracle(slow, "slow", reads_group=False)
    tickets = oracle.submit([question(0, ("a", "b")), question(1, ("c",))])
    assert oracle.collect(tickets, 0.01) == []
    assert oracle.collect(tickets, 0.01) == []
    is_time.set()
    answered = oracle.collect(tickets, 60.0)
    assert [ticket for ticket, _ in answered] == tickets
    assert len(calls) == 1


def test_an_async_function_that_two_wait_for():
    """A training step stops waiting, an evaluation asks meanwhile, and one of the step's questions is
    cancelled. No question is asked twice, and every answer belongs to its question."""
    calls, is_time = [], Event()

    async def slow(prompts: list[str], completions: list[str]) -> list[float]:
        calls.append(list(completions))
        await asyncio.to_thread(is_time.wait, 60.0)
        return length(completions)

    oracle = CallableOracle(slow, "slow", reads_group=False)
    late = oracle.submit([question(0, ("a",)), question(1, ("bb",))])
    assert oracle.collect(late, 0.01) == []
    other = oracle.submit([question(2, ("ccc",))])
    is_time.set()
    assert [(ticket, answer.values) for ticket, answer in oracle.collect(other, 10.0)] == [(other[0], (3.0,))]
    assert [(ticket, answer.values) for ticket, answer in oracle.collect(late[1:], 10.0)] == [
        (late[1], (2.0,))
    ]
    assert calls == [["a", "bb"], ["ccc"]]


@pytest.mark.parametrize("how", ["itself", "wrapped"])
def test_a_signal_is_for_the_main_thread(how: str) -> None:
    """An async function runs in a thread, where Python refuses handlers of signals. The message says so, also
    if a library hides the cause. A plain function of the same content runs."""

    def timed() -> list[float]:
        before = signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(5)
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        return [1.0]

    async def late(completions: list[str]) -> list[float]:
        try:
            return timed()
        except ValueError as error:
            if how == "itself":
                raise
            raise TimeoutError("no time limit") from error

    async def other(completions: list[str]) -> list[float]:
        raise ValueError("no signal")

    with pytest.raises(OracleError, match="runs off the main thread"):
        ask(CallableOracle(late, "late"), question(0, ["a"]))
    with pytest.raises(OracleError, match=r"no signal \(line \d+ of .*\); repair"):
        ask(CallableOracle(other, "other"), question(0, ["a"]))
    assert ask(CallableOracle(lambda completions: timed(), "plain"), question(0, ["a"]))[0].values == (1.0,)


def test_an_error_of_strings_and_messages_says_which_the_function_got():
    """A function that takes strings for messages, or messages for strings, is told what it got. For another
    error nothing is said of them."""

    def of_messages(prompts, completions):
        return [len(completion[0]["content"]) for completion in completions]

    def of_strings(prompts, completions):
        return [len(completion.strip()) for completion in completions]

    def of_pairs(first, second):
        return [one.strip() == other.strip() for one, other in zip(first, second, strict=True)]

    def broken(prompts, completions):
        raise TypeError("no number")

    plain, chat = question(0, ["a", "b"]), replace(question(0, ["a", "b"]), is_chat=True)
    pair = replace(chat, kind="compare")
    assert ask(CallableOracle(of_messages, "f"), chat)[0].values == (1.0, 1.0)
    for oracle, asked, said in (
        (CallableOracle(of_messages, "f"), plain, "prompts and completions were strings"),
        (CallableOracle(of_strings, "f"), chat, "prompts and completions were lists of messages"),
        (CallableComparison(of_pairs, "f"), pair, "prompts, first and second were lists of messages"),
    ):
        with pytest.raises(OracleError, match=rf"raised \w+: .*; its {said}"):
            ask(oracle, asked)
    with pytest.raises(OracleError, match=r"raised TypeError: no number \([^;]*\); repair"):
        ask(CallableOracle(broken, "f"), plain)


def test_an_error_of_a_function_names_its_line(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "def reward(prompts, completions):\n    return [helper(text) for text in completions]\n\n\ndef "
        "helper(text):\n    return {}[text]\n"
    )
    oracle = build_oracle(f"{file}:reward", {})
    group = make_group(0, "a")
    tickets = oracle.submit(make_questions([group], "score", 0, oracle="o"))
    with pytest.raises(
        OracleError, match=r"mine.py:reward raised KeyError: 'a' \(line 6 of mine.py\); repair the function"
    ):
        oracle.collect(tickets, 1.0)
