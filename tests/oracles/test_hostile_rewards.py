"""Reward functions that raise, return or leave behind bad values. The error is one message of limited length
that names the function and the remedy, without a traceback. The process is left as it was before the call."""

import asyncio
import contextlib
import io
import itertools
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fixtures import make_group, make_questions

from oat.errors import (
    MAX_MESSAGE,
    Again,
    ConfigError,
    Interrupted,
    OatError,
    OatWarning,
    OracleError,
)
from oat.oracles.callables import CallableOracle
from oat.oracles.contract import calling
from oat.plugins import loading as plugins
from oat.types import Answer

LONG = 20_000_000
MANY = 3


class Mute(Exception):
    """An exception whose text cannot be made."""

    def __str__(self) -> str:
        raise RuntimeError("no words")


class MuteBase(BaseException):
    def __str__(self) -> str:
        raise MuteBase


class Unshown:
    def __repr__(self) -> str:
        raise MuteBase("no repr")


class Text(str):
    """A text that lies about its length and cannot be printed."""

    def __repr__(self) -> str:
        raise RuntimeError("no repr")

    def __len__(self) -> int:
        return 2**62

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("no equal")

    __hash__ = str.__hash__

    def __getitem__(self, place: Any) -> str:
        raise RuntimeError("no part")


class Endless(list[float]):
    def __iter__(self) -> Iterator[float]:
        return itertools.repeat(1.0)


class Broken(list[float]):
    def __len__(self) -> int:
        raise SystemExit(3)

    def __iter__(self) -> Iterator[float]:
        raise MuteBase


class Number(float):
    def __float__(self) -> float:
        raise KeyboardInterrupt


def raiser(error: BaseException) -> Callable[..., Any]:
    def reward(prompts: Any, completions: Any) -> Any:
        raise error

    return reward


def giver(make: Callable[[], Any]) -> Callable[..., Any]:
    return lambda prompts, completions: make()


RAISED = {
    "asyncio.CancelledError": asyncio.CancelledError("gone"),
    "concurrent CancelledError": CancelledError(),
    "BaseException": BaseException("plain"),
    "GeneratorExit": GeneratorExit("out"),
    "KeyboardInterrupt": KeyboardInterrupt("mine"),
    "SystemExit": SystemExit("bye"),
    "StopIteration": StopIteration(7),
    "StopAsyncIteration": StopAsyncIteration(),
    "a long text": ValueError("x" * LONG),
    "a long name": type("E" * LONG, (Exception,), {})("y"),
    "many lines": ValueError("a\nb\n" * 1000),
    "without words": Mute(),
    "without words, not even an Exception": MuteBase(),
    "a text that lies": ValueError(Text("z" * 1000)),
    "a group": ExceptionGroup("several", [ValueError("x" * 1000)] * 100),
    "an error of ours, of any length": OracleError("o" * LONG),
}
RETURNED: dict[str, tuple[Callable[[], Any], str]] = {
    "a set": (lambda: {1.0, 2.0, 3.0}, "{1.0, 2.0, 3.0}, whose values have no order"),
    "a frozenset": (lambda: frozenset((1.0, 2.0, 3.0)), "whose values have no order"),
    "a dict": (lambda: dict.fromkeys("abc", 1.0), "whose values have no order"),
    "keys": (lambda: dict.fromkeys((1.0, 2.0, 3.0)).keys(), "whose values have no order"),
    "a string": (lambda: "123", "returned '123' for 3 entries"),
    "bytes": (lambda: b"123", "returned b'123' for"),
    "a bytearray": (lambda: bytearray(b"123"), "returned bytearray(b'123') for"),
    "a number": (lambda: 1.0, "returned 1.0 for"),
    "nothing": (lambda: None, "returned None for"),
    "too few": (lambda: [1.0], "1 values for 3 entries"),
    "too many": (lambda: [1.0] * 1_000_000, "1000000 values for 3 entries"),
    "an endless generator": (lambda: itertools.repeat(1.0), "more than 3 values for 3 entries"),
    "an endless list": (lambda: Endless([1.0] * 3), "3 values for 3 entries"),
    "a list that raises": (lambda: Broken([1.0] * 3), "raised MuteBase"),
    "a long string": (lambda: "x" * LONG, "xxx...' for"),
    "a text that lies": (lambda: Text("abc"), "returned 'abc' for"),
    "an object": (lambda: object(), "returned <object"),
    "a shy object": (Unshown, "whose repr fails"),
    "a scalar of torch": (lambda: torch.tensor(1.0), "0-d"),
    "rows": (lambda: np.ones((3, 2)), "as value 0"),
    "NaN": (lambda: [1.0, float("nan"), 1.0], "nan as value 1"),
    "an infinity": (lambda: [1.0, 1.0, -np.inf], "inf as value 2"),
    "a number of a thousand digits": (lambda: [10**1000] * 3, "as value 0"),
    "a complex number": (lambda: [1j] * 3, "1j as value 0"),
    "a decimal": (lambda: [Decimal(1)] * 3, "as value 0"),
    "texts": (lambda: ["1", "2", "3"], "'1' as value 0"),
    "long texts": (lambda: ["x" * LONG] * 3, "as value 0"),
    "texts that lie": (lambda: [Text("1")] * 3, "as value 0"),
    "shy values": (lambda: [Unshown()] * 3, "whose repr fails as value 0"),
    "a number that raises": (lambda: [Number(1)] * 3, "raised KeyboardInterrupt"),
    "an exception": (lambda: [ValueError("x" * LONG)] * 3, "as value 0"),
    "a coroutine in a list": (lambda: [None, None, Unshown], "as value 2"),
    "a class": (lambda: float, "returned <class 'float'> for"),
}
TAKEN: dict[str, tuple[Callable[[], Any], tuple[float, ...]]] = {
    "a tuple": (lambda: (1, 2, 3), (1.0, 2.0, 3.0)),
    "a generator": (lambda: (float(n) for n in range(3)), (0.0, 1.0, 2.0)),
    "numbers of numpy": (lambda: np.arange(3, dtype=np.float16), (0.0, 1.0, 2.0)),
    "numbers of torch": (lambda: torch.arange(3), (0.0, 1.0, 2.0)),
    "words of logic": (lambda: [True, np.True_, torch.tensor(False)], (1.0, 1.0, 0.0)),
    "fractions": (lambda: [Fraction(1, 2)] * 3, (0.5, 0.5, 0.5)),
}


def ask(function: Callable[..., Any], name: str = "reward.py:mine") -> Answer:
    """Ask a function as the ledger does, and return its answer."""
    oracle = CallableOracle(function, name)
    (question,) = make_questions([make_group(0, "a", "b", "c")], "score", 0, oracle=name)
    tickets = calling(name, oracle.submit, [question])
    while not (found := calling(name, oracle.collect, tickets, 5.0)):
        pass
    answer: Answer = found[0][1]
    return answer


def late(function: Callable[..., Any]) -> Callable[..., Any]:
    async def reward(prompts: Any, completions: Any) -> Any:
        await asyncio.sleep(0)
        return function(prompts, completions)

    return reward


def check_message(error: OatError, *parts: str) -> str:
    said = str(error)
    assert len(said) <= MAX_MESSAGE + 100, len(said)
    assert said.count("\n") == 0
    for part in ("reward.py:mine", *parts):
        assert part in said, said[:500]
    return said


@pytest.mark.usefixtures("heard")
@pytest.mark.parametrize("way", [lambda function: function, late], ids=["at once", "async"])
@pytest.mark.parametrize("what", RAISED)
def test_what_a_reward_raises(what: str, way: Callable[..., Any]) -> None:
    if what == "an error of ours, of any length":
        with pytest.raises(OracleError) as found:
            ask(way(raiser(RAISED[what])))
        assert len(str(found.value)) <= MAX_MESSAGE + 100
        return
    with pytest.raises(OracleError) as found:
        ask(way(raiser(RAISED[what])))
    assert len(check_message(found.value, "raised", "repair the function")) < 600


@pytest.mark.usefixtures("heard")
@pytest.mark.parametrize("way", [lambda function: function, late], ids=["at once", "async"])
@pytest.mark.parametrize("what", RETURNED)
def test_what_a_reward_returns(what: str, way: Callable[..., Any]) -> None:
    make, said = RETURNED[what]
    with pytest.raises(OracleError) as found:
        ask(way(giver(make)))
    assert (
        len(check_message(found.value, said, "repair" if "raise" in what or "0-d" in said else "return"))
        < 600
    )


@pytest.mark.parametrize("what", TAKEN)
def test_what_is_taken(what: str) -> None:
    make, values = TAKEN[what]
    assert ask(giver(make)).values == values


def test_signals_of_people_pass_through() -> None:
    """Exceptions of signals pass through, also KeyboardInterrupt outside a run, as in a notebook."""
    for error in (Interrupted(signal.SIGTERM), Again(), KeyboardInterrupt()):
        with pytest.raises(KeyboardInterrupt) as found:
            ask(raiser(error))
        assert found.value is error


CHANGES: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "torch.set_grad_enabled": (lambda: torch.set_grad_enabled(False), torch.is_grad_enabled),
    "torch.set_default_dtype": (lambda: torch.set_default_dtype(torch.float64), torch.get_default_dtype),
    "torch.set_default_device": (lambda: torch.set_default_device("meta"), torch.get_default_device),
    "torch.use_deterministic_algorithms": (
        lambda: torch.use_deterministic_algorithms(True),
        torch.are_deterministic_algorithms_enabled,
    ),
    "torch.set_num_threads": (
        lambda: torch.set_num_threads(torch.get_num_threads() + 1),
        torch.get_num_threads,
    ),
    "torch.set_float32_matmul_precision": (
        lambda: torch.set_float32_matmul_precision("medium"),
        torch.get_float32_matmul_precision,
    ),
    "torch.set_autocast_enabled": (
        lambda: torch.set_autocast_enabled("cpu", True),
        lambda: torch.is_autocast_enabled("cpu"),
    ),
    "sys.stdout": (lambda: setattr(sys, "stdout", open(os.devnull, "w")), lambda: sys.stdout),  # noqa: SIM115
    "sys.stderr": (lambda: setattr(sys, "stderr", None), lambda: sys.stderr),
    "the handler of SIGTERM": (
        lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN),
        lambda: signal.getsignal(signal.SIGTERM),
    ),
    "the handler of SIGINT": (
        lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
        lambda: signal.getsignal(signal.SIGINT),
    ),
    "the timer of SIGALRM": (
        lambda: signal.alarm(1000),
        lambda: signal.getitimer(signal.ITIMER_REAL) != (0.0, 0.0),
    ),
}


@pytest.mark.parametrize("raises", [False, True])
@pytest.mark.parametrize("what", CHANGES)
def test_what_a_reward_leaves_is_put_back(what: str, raises: bool) -> None:
    change, read = CHANGES[what]
    before = read()

    def reward(prompts: Any, completions: Any) -> list[float]:
        change()
        assert read() != before
        if raises:
            raise ValueError
        return [1.0] * len(completions)

    refused = pytest.raises(OracleError, match="raised ValueError") if raises else contextlib.nullcontext()
    with pytest.warns(OatWarning, match=rf"reward.py:mine changed {what} and left it so") as warned, refused:
        assert ask(reward).values == (1.0, 1.0, 1.0)
    assert len(warned) == 1
    assert read() == before


def test_a_reward_that_does_so_while_it_is_imported(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import torch\ntorch.set_grad_enabled(False)\ntorch.set_default_dtype(torch.float64)\n\ndef "
        "reward(): ...\n"
    )
    with pytest.warns(
        OatWarning, match=r"mine.py changed torch.set_grad_enabled and torch.set_default_dtype and left it so"
    ):
        plugins.load_symbol(f"{tmp_path / 'mine.py'}:reward")
    assert torch.is_grad_enabled()
    assert torch.get_default_dtype() == torch.float32


def test_inference_mode_cannot_be_put_back() -> None:
    mode = torch.inference_mode()
    try:
        with pytest.raises(OracleError) as found:
            ask(giver(lambda: mode.__enter__() or [1.0] * MANY))
    finally:
        mode.__exit__(None, None, None)
    check_message(found.value, "left torch in another state (torch.inference_mode)")


def test_a_closed_output_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that has a file is opened again."""
    with open(os.devnull, "w") as file:
        monkeypatch.setattr(sys, "stdout", file)
        with pytest.warns(OatWarning, match=r"changed sys.stdout"):
            ask(giver(lambda: sys.stdout.close() or [1.0] * MANY))
        print("a", flush=True)
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    with pytest.raises(OracleError) as found:
        ask(giver(lambda: sys.stdout.close() or [1.0] * MANY))
    check_message(found.value, "closed sys.stdout")


def test_of_two_calls_at_a_time_neither_keeps_what_the_other_left() -> None:
    """Two calls change the process and overlap: the second begins after the first has changed it, and ends
    after that change is undone. At the end the process is as before both."""
    is_changed = threading.Event()
    is_put_back = threading.Event()
    stdout = sys.stdout

    async def first(prompts: Any, completions: Any) -> list[float]:
        torch.set_default_dtype(torch.float64)
        sys.stdout = sys.__stderr__
        is_changed.set()
        await asyncio.to_thread(is_begun.wait, 60.0)
        return [1.0] * MANY

    is_begun = threading.Event()

    async def second(prompts: Any, completions: Any) -> list[float]:
        is_begun.set()
        await asyncio.to_thread(is_put_back.wait, 60.0)
        return [1.0] * MANY

    (question,) = make_questions([make_group(0, "a", "b", "c")], "score", 0, oracle="o")
    oracles = [CallableOracle(function, "o") for function in (first, second)]
    try:
        early = oracles[0].submit([question])
        assert is_changed.wait(60.0)
        late_ = oracles[1].submit([question])
        with pytest.warns(
            OatWarning, match=r"o changed sys.stdout and torch.set_default_dtype and left it so"
        ):
            assert oracles[0].collect(early, 60.0)
        assert (torch.get_default_dtype(), sys.stdout) == (torch.float32, stdout)
        is_put_back.set()
        assert oracles[1].collect(late_, 60.0)
        assert (torch.get_default_dtype(), sys.stdout) == (torch.float32, stdout)
    finally:
        torch.set_default_dtype(torch.float32)
        sys.stdout = stdout


def test_a_call_that_never_comes_back_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """One call of a reward function never ends. Later calls do not undo changes that the process itself made
    after that call began."""
    is_begun, may_end = threading.Event(), threading.Event()

    async def stuck(prompts: Any, completions: Any) -> list[float]:
        is_begun.set()
        await asyncio.to_thread(may_end.wait, 60.0)
        return [1.0] * MANY

    (question,) = make_questions([make_group(0, "a", "b", "c")], "score", 0, oracle="o")
    oracle = CallableOracle(stuck, "o")
    tickets = oracle.submit([question])
    assert is_begun.wait(60.0)
    mine = open(os.devnull, "w")  # noqa: SIM115
    monkeypatch.setattr(sys, "stdout", mine)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        ask(giver(lambda: [1.0] * MANY))
        assert (sys.stdout, torch.get_float32_matmul_precision()) == (mine, "high")
    finally:
        torch.set_float32_matmul_precision(before)
        monkeypatch.undo()
        may_end.set()
        assert oracle.collect(tickets, 60.0)


def test_a_message_has_a_beginning_and_an_end() -> None:
    said = str(ConfigError("begin " + "x" * LONG + " and what to do"))
    assert said.startswith("begin xxx")
    assert said.endswith("xxx and what to do")
    assert f"{LONG + 21 - MAX_MESSAGE:,} characters are left out" in said
