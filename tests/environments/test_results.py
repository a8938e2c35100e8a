"""What is told of a tool's result: the same in two equal runs, whatever the tool returns or raises."""

import argparse
import asyncio
import ctypes
import functools
import json
import os
import random
import re
import shutil
import subprocess
import sys
import threading
import warnings
import weakref
from collections import Counter, defaultdict, deque
from dataclasses import dataclass, field
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from types import MappingProxyType, SimpleNamespace
from typing import Annotated, Any, NamedTuple

import numpy as np
import pytest
from damages import DAMAGES, STREAMS

from oat.environments.tools import ToolAnswer, Tools, bracket_calls, tools_of
from oat.errors import EpisodeError, OatWarning

WORDS = ("oat", "rye", "spelt", "millet", "barley")


class Bag:
    def __init__(self) -> None:
        self.words = {*WORDS}

    def __repr__(self) -> str:
        return f"Bag({self.words})"


class Slotted(Bag):
    __slots__ = ("more",)

    def __str__(self) -> str:
        return f"{self.words!r}"


@dataclass
class Held:
    words: set[str] = field(default_factory=lambda: {*WORDS})
    nested: Any = None


@dataclass(frozen=True)
class Team:
    members: Any


class Row(NamedTuple):
    members: Any


class Private:
    __slots__ = ("__words",)

    def __init__(self, words: Any) -> None:
        self.__words = words

    def __repr__(self) -> str:
        return f"Private({self.__words})"


class Hexadecimal:
    def __repr__(self) -> str:
        return f"<Hexadecimal {hex(id(self))}>"


class Decimals:
    def __repr__(self) -> str:
        return f"Decimals(id={id(self)})"


class Hashed:
    def __repr__(self) -> str:
        return f"Hashed({hash(self)})"


HASHABLE = (frozenset, tuple, lambda part: Team(frozenset(part)), lambda part: Row(frozenset(part)))
WRAPPED = (
    *(*HASHABLE, set, list, deque, Team, Row, Private, Held, Counter),
    *(lambda part: {key: set(part) for key in part}, lambda part: {"a": set(part)}.values()),
    *(lambda part: dict.fromkeys(part).keys(), lambda part: {"a": frozenset(part)}.items()),
    *(lambda part: MappingProxyType({"a": {*part}}), lambda part: SimpleNamespace(a={*part})),
    *(lambda part: slice(frozenset(part)), lambda part: functools.partial(len, {*part})),
    *(lambda part: KeyError({*part}), lambda part: np.array([{*part}, 0], dtype=object)),
)
"""Classes and functions that make a value of a list of values with hashes."""


def nested(seed: int) -> Any:
    """Return a result with sets at several depths, the same for the same seed."""
    generator = random.Random(seed)
    part = [generator.sample(WORDS, 3) for _ in range(3)]
    for _ in range(generator.randrange(3)):
        wrap = generator.choice(HASHABLE)
        part = [[wrap(each), *generator.sample(WORDS, 1)] for each in part]
    return generator.choice(WRAPPED)([generator.choice(HASHABLE)(each) for each in part])


class Grain(Enum):
    OAT = "oat"


RESULTS: dict[str, Any] = {
    "text": "a",
    "nothing": None,
    "numbers": [1, 2.5, True, float("nan"), 3j, Fraction(1, 3), Decimal("0.1")],
    "bytes": b"a",
    "set": {*WORDS},
    "frozenset": frozenset(WORDS),
    "numbers in a set": {3, 1, 10**20},
    "mixed set": {"a", 1, None, (1, "b"), frozenset(WORDS)},
    "set of sets": {frozenset(WORDS), frozenset(WORDS[:2]), (frozenset(WORDS[1:]),)},
    "dict with a set": {"a": {*WORDS}, "b": [{*WORDS}, ({*WORDS},)]},
    "deque": deque([{*WORDS}]),
    "counter": Counter(WORDS),
    "defaultdict": defaultdict(list, a=[{*WORDS}]),
    "object with a set": Bag(),
    "object with slots": Slotted(),
    "dataclass": Held(nested=Held()),
    "namespace": SimpleNamespace(words={*WORDS}),
    "enum": Grain.OAT,
    "array": np.arange(3),
    "array of sets": np.array([{*WORDS}, 1], dtype=object),
    "exception": KeyError({*WORDS}),
    "class": Bag,
    "text that looks like an address": ["a crash at 0x1f", {"b": "at 0x2f"}],
    "many sets": [{*WORDS[:2]}, {*WORDS}] * 20,
    "views": [{"a": {*WORDS}}.values(), {"a": {*WORDS}}.items(), dict.fromkeys([frozenset(WORDS)]).keys()],
    "proxy": MappingProxyType({"a": {*WORDS}}),
    "slice and partial": (slice(frozenset(WORDS)), functools.partial(print, {*WORDS})),
    "dataclasses in a set": {Team(frozenset(WORDS[i : i + 3])) for i in range(3)},
    "private slot": Private({*WORDS}),
    "numbers in base 16": [Fraction(1, 3), "0x7f1b2c3d4e5f", {"colour": "0xff00aa"}, b"at 0x7f1b2c3d4e5f"],
    **{f"nested {seed}": nested(seed) for seed in range(60)},
}
"""Results that have a text of their own."""

ADDRESSED: dict[str, Any] = {
    "object": object(),
    "function": lambda: None,
    "generator": (word for word in WORDS),
    "iterator": iter(WORDS),
    "map": map(len, WORDS),
    "object in a list": [{"a": object()}],
    "object in a dataclass": Held(nested=object()),
    "view": memoryview(b"a"),
    "address in base 16": Hexadecimal(),
    "address in base 10": [Decimals()],
    "hash of an object": Held(nested=Hashed()),
    "thread": threading.current_thread(),
    "lock": [threading.Lock()],
    "pointer": ctypes.c_void_p(2**40),
    "reference": weakref.ref(Bag),
}
"""Results whose text has an address."""

RAISED: dict[str, Any] = {
    "of the call": ValueError("no"),
    "pattern": re.error("bad pattern"),
    "syntax": SyntaxError("bad"),
    "with a set": KeyError({*WORDS}),
    "with an address": ValueError(f"{object()} is bad"),
    "own fault": TypeError(f"unsupported {object()}"),
    "file": FileNotFoundError(2, "none"),
    "memory": MemoryError(),
    "recursion": RecursionError("deep"),
    "end": SystemExit(3),
    "stop": StopIteration(1),
    "group": ExceptionGroup("two", [ValueError(1), TypeError(2)]),
    "late": TimeoutError(),
    "cancelled": asyncio.CancelledError(),
    "closed": GeneratorExit(),
    "base": BaseException("b"),
    "pointer": RuntimeError(f"ptr={hex(id(WORDS))}"),
    "object with an address": ValueError(Hexadecimal(), Decimals()),
    "nested sets": LookupError({"a": {*WORDS}}.values(), {Team(frozenset(WORDS)), Team(1)}),
}


class Sized:
    """As pandas and argparse do, it makes a text for the terminal."""

    def __repr__(self) -> str:
        return f"{shutil.get_terminal_size()} {argparse.ArgumentParser('a', usage='b ' * 99).format_help()}"


def told(results: dict[str, Any], raised: dict[str, Any]) -> dict[str, str]:
    """Return what tools tell of results and of exceptions, by name."""

    def give(name: str) -> Any:
        return results[name]

    def fail(name: str) -> Any:
        raise raised[name]

    tools = Tools([give, fail], parse=bracket_calls)
    found = {}
    for call in [*(f"give({name})" for name in results), *(f"fail({name})" for name in raised)]:
        answered = tools.answer(f"[{call}]")
        assert answered is not None
        found[call] = f"{answered.message.content} {answered.failed} {answered.broken}"
    return found


@pytest.mark.filterwarnings("ignore::oat.errors.OatWarning")
def test_two_processes_tell_the_same() -> None:
    """Another process with another seed of hashes, other addresses and another terminal tells the same of all
    results. It does so after tools have closed its streams and tried to leave it."""
    results = {**RESULTS, "for a terminal": Sized()}
    program = (
        "import json, damages, test_results as t; d = damages.damaged(); "
        "r = {**t.RESULTS, 'for a terminal': t.Sized()}; "
        "print(json.dumps([d, t.told(r, t.RAISED)]))"
    )
    seed = "1" if os.environ.get("PYTHONHASHSEED") == "2" else "2"
    environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.path.dirname(__file__)}
    environment |= {"COLUMNS": "200", "LINES": "50"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        env=environment,
        capture_output=True,
        check=True,
        stdin=subprocess.DEVNULL,
    )
    found, same = json.loads(done.stdout)
    closed = {f"{call}({name})": "ok 0 0" for call in ("closes", "closes_async") for name in STREAMS}
    assert found == {**DAMAGES, **closed}
    assert done.stderr.decode().split("\n")[:-1] == [*found]
    assert same == told(results, RAISED)


def test_a_text_of_its_own_is_told_as_python_writes_it() -> None:
    """Only the order of a set's elements differs from `str`."""
    for name, result in RESULTS.items():
        said = told({name: result}, {})[f"give({name})"].removesuffix(" 0 0")
        assert sorted(said) == sorted(str(result)), name
    said = told({"words": {"b", "a", "c"}, "numbers": {10, 9}}, {})
    assert [*said.values()] == ["{'a', 'b', 'c'} 0 0", "{9, 10} 0 0"]


@pytest.mark.parametrize("name", ADDRESSED)
def test_a_result_with_an_address_ends_the_run_by_name(name: str) -> None:
    kind = type(ADDRESSED[name]).__name__
    with pytest.raises(EpisodeError, match=rf"the tool give returned a {kind} .*(address|state)") as caught:
        told({name: ADDRESSED[name]}, {})
    assert not re.search("0x[0-9a-f]{4}|[0-9]{6}", str(caught.value))


@pytest.mark.filterwarnings("ignore::oat.errors.OatWarning")
def test_exceptions_are_told_and_counted() -> None:
    found = told({}, RAISED)
    own = {name for name in RAISED if found[f"fail({name})"].endswith(" 1 1")}
    assert own == {
        "own fault", "file", "memory", "recursion", "end", "stop", "group", "late", "cancelled",
        "closed", "base", "pointer",
    }  # fmt: skip
    assert all(text.startswith("error: ") and " 1 " in text for text in found.values())
    assert found["fail(of the call)"] == "error: no 1 0"
    assert found["fail(own fault)"] == "error: the tool failed (TypeError: unsupported <object object>) 1 1"


def test_an_address_in_a_text_is_left_out() -> None:
    """A program's output may have it. A number that is no address stays."""
    text = "<A object at 0x7f1b2c3d4e5f> is 0xdeadbeef, at 0x1f, at 0x7f1b2c3d4e5f6071"
    found = told({"text": text, "list": [text]}, {})
    wanted = "<A object> is 0xdeadbeef, at 0x1f, at 0x7f1b2c3d4e5f6071"
    assert [*found.values()] == [f"{wanted} 0 0", f"{[wanted]} 0 0"]


def test_a_tool_that_makes_warnings_errors_ends_no_run() -> None:
    """Its warning is its own error; that of `oat` about it stays a warning, also in an async environment."""

    def strict(text: str) -> str:
        warnings.simplefilter("error")
        warnings.warn("old", stacklevel=1)
        return text

    async def strict_async(text: str) -> str:
        warnings.catch_warnings().__enter__()
        return strict(text)

    before = [*warnings.filters]
    with pytest.warns(OatWarning, match="the tool strict failed: UserWarning: old"):
        answered = Tools([strict], parse=bracket_calls).answer("[strict(a)]")
    assert answered is not None
    assert answered.broken == 1
    tools = Tools([strict_async], parse=bracket_calls)
    with pytest.warns(OatWarning, match="the tool strict_async failed: UserWarning: old"):
        asyncio.run(tools.answer_async("[strict_async(a)]"))
    assert [*warnings.filters] == before
    with warnings.catch_warnings():  # a user who wants errors gets them
        warnings.simplefilter("error", OatWarning)
        with pytest.raises(OatWarning):
            Tools([strict], parse=bracket_calls).answer("[strict(a)]")


@pytest.mark.filterwarnings("ignore::oat.errors.OatWarning")
def test_an_async_tool_may_raise_generator_exit() -> None:
    """It is told like other exceptions. A call that is closed, since its event loop has ended, ends."""
    ended = []

    async def leaves(text: str) -> str:
        await asyncio.sleep(0)
        raise GeneratorExit

    async def waits(text: str) -> str:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(text)
        return text

    answered = asyncio.run(Tools([leaves], parse=bracket_calls).answer_async("[leaves(a)]"))
    assert answered is not None
    assert answered.broken == 1

    async def closed() -> None:
        call = Tools([waits], parse=bracket_calls).answer_async("[waits(a)][waits(b)]")
        call.send(None)
        await asyncio.to_thread(call.close)

    asyncio.run(closed())
    assert ended == ["a"]


def test_a_fault_of_a_tool_is_said_once() -> None:
    def broken(text: str) -> str:
        raise {"a": TypeError, "b": OSError}[text](text)

    tools = Tools([broken], parse=bracket_calls)
    with pytest.warns(
        OatWarning, match=r"the tool broken failed: \w+: \w \(line \d+ of test_results.py\)"
    ) as seen:
        answered = tools.answer("[broken(a)][broken(b)][broken(a)][broken(c)]")
    assert answered is not None
    assert (answered.failed, answered.broken, tools.broken) == (4, 3, 3)
    assert len(seen) == 2


class Hostile:
    def __str__(self) -> str:
        raise TypeError(self.__class__)


class HostileError(Exception):
    def __str__(self) -> str:
        raise SystemExit


@pytest.mark.filterwarnings("ignore::oat.errors.OatWarning")
def test_what_has_no_text_is_a_fault_of_the_tool() -> None:
    found = told({"hostile": Hostile(), "long": 10**5000}, {"hostile": HostileError()})
    assert found["give(hostile)"].endswith(" 1 1")
    assert found["fail(hostile)"] == "error: the tool failed (HostileError) 1 1"
    assert found["give(long)"].endswith(" 1 0")


def test_a_tool_may_end_the_run() -> None:
    with pytest.raises(EpisodeError, match=r"^no credit$"):
        told({}, {"credit": EpisodeError("no credit")})


async def slow(text: str) -> str:
    await asyncio.sleep(0)
    if text == "wrong":
        raise ValueError("wrong")
    return f"{text}!"


async def stream(text: str) -> Any:
    yield text


def test_an_async_tool_is_awaited() -> None:
    """In a plain environment, within an event loop that runs, and in an async environment."""
    tools, response = Tools([slow], parse=bracket_calls), "[slow(a)][slow(wrong)]"
    answered = tools.answer(response)

    async def within() -> list[ToolAnswer | None]:
        return [tools.answer(response), await tools.answer_async(response)]

    for each in (answered, *asyncio.run(within())):
        assert each is not None
        assert (each.message.content, each.failed, each.broken) == ("a!\nerror: wrong", 1, 0)
    with pytest.raises(EpisodeError, match="the tool stream returned a async_generator"):
        Tools([stream], parse=bracket_calls).answer("[stream(a)]")


def test_a_late_async_tool_is_cancelled() -> None:
    cancelled = []

    async def never(text: str) -> str:
        try:
            await asyncio.sleep(60)
        finally:
            cancelled.append(text)
        return text

    async def late() -> None:
        async with asyncio.timeout(0.01):
            await Tools([never], parse=bracket_calls).answer_async("[never(a)][never(b)]")

    with pytest.raises(TimeoutError):
        asyncio.run(late())
    assert cancelled == ["a"]


MODULE = [Tools([slow])]


class Owner:
    kept = {"a": Tools([slow])}  # noqa: RUF012

    def __init__(self) -> None:
        self.own = Tools([slow])


def test_the_tools_of_an_environment_are_found() -> None:
    owner = Owner()
    expected = [owner.own, *Owner.kept.values(), *MODULE]
    assert sorted(map(id, tools_of(owner))) == sorted(map(id, expected))


def test_defaults_without_a_text_are_told_without_addresses() -> None:
    def tool(number: int, words: Any = frozenset(WORDS), other: Any = object()) -> str:  # noqa: B008
        return ""

    answered = Tools([tool], parse=bracket_calls).answer("[tool(a)]")
    assert answered is not None
    assert "other: Any = <object object>" in answered.message.content
    assert f"frozenset({{{', '.join(map(repr, sorted(WORDS)))}}})" in answered.message.content


def test_annotations_without_a_text_are_told_without_addresses() -> None:
    def tool(
        number: Annotated[int, lambda number: number > 0],
        other: Annotated[list[int], Hexadecimal(), frozenset(WORDS)] = [],  # noqa: B006
    ) -> Annotated[str, object()]:
        return ""

    answered = Tools([tool], parse=bracket_calls).answer("[tool(a)]")
    assert answered is not None
    assert "0x7" not in answered.message.content
    assert f"frozenset({{{', '.join(map(repr, sorted(WORDS)))}}})" in answered.message.content
