"""Tools are called by what the model writes, and by nothing else."""

import functools
import json
import math
from fractions import Fraction
from typing import Any, BinaryIO

import pydantic
import pytest
from cpu_time import seconds

from oat.environments.tools import ToolCall, Tools, bracket_calls, json_calls, template_calls
from oat.errors import ConfigError
from oat.oracles.rules.countdown import evaluate
from oat.types import Message


def calculator(text: str) -> Fraction:
    return evaluate(text)


def power(base: float, exponent: int = 2, *, is_negative: bool = False) -> float:
    return -(base**exponent) if is_negative else base**exponent


def anything(value: Any = None) -> str:
    return repr(value)


def lookup(name: str) -> str:
    return {"Oslo": "Norway"}[name]


def search(first: str = "", **filters: int) -> str:
    return f"{first}{sorted(filters.items())}"


def now() -> str:
    return "noon"


def broken(text: str) -> str:
    raise TypeError(text)


def total(*terms: float) -> float:
    return sum(terms)


def opened(file: BinaryIO) -> str:
    return ""


def unread(text: "Nowhere") -> str:  # type: ignore[name-defined]  # noqa: F821
    return text


TOOLS = [calculator, power, anything, lookup, search, now, broken]


def noted(x: int = pydantic.Field(ge=0)) -> int:
    return x


def call(name: str, /, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


@pytest.mark.parametrize(
    ("response", "said", "failed"),
    [
        (call("calculator", text="3*(4+1)"), "15", 0),
        (f"I need {call('calculator', text='1/3')} and {call('now')}.", "1/3\nnoon", 0),
        (call("power", base=3), "9.0", 0),
        (call("power", base="2.5", exponent=2.0), "6.25", 0),
        (call("power", base=2, exponent=3, is_negative=True), "-8.0", 0),
        (call("anything"), "None", 0),
        (call("search", year="1999", size=2), "[('size', 2), ('year', 1999)]", 0),
        (call("search", first="a", filters=3), "a[('filters', 3)]", 0),
        (call("search", year="x"), "error: year is 'x'; search takes", 1),
        (call("anything", value=[1, {"a": None}]), "[1, {'a': None}]", 0),
        ('<tool_call>{"name": "now"}</tool_call>', "noon", 0),
        (call("calculator", text="1/0"), "error: ", 1),
        (call("lookup", name="Rome"), "error: 'Rome'", 1),
        (call("calculater", text="1"), "error: there is no tool 'calculater'; did you mean `calculator`?", 1),
        (call("power"), "error: missing a required argument: 'base'; power takes (base: float, expon", 1),
        (call("power", base=1, bas=2), "error: got an unexpected keyword argument 'bas'; power takes", 1),
        (call("power", base="x"), "error: base is 'x'; power takes (base: float", 1),
        (call("power", base=1, exponent=2.5), "error: exponent is 2.5; power takes", 1),
        (call("power", base=True), "error: base is True; power takes", 1),
        (call("power", base=1, is_negative=1), "error: is_negative is 1; power takes", 1),
        (call("power", base=10**400), "error: base is 1000", 1),
        (call("power", base=10.0, exponent=400), "error: (34, 'Numerical result out of range')", 1),
        ("<tool_call>{</tool_call>", 'error: this is not JSON; a call is {"name": ..., "arguments"', 1),
        ("<tool_call>[1]</tool_call>", "error: a call is {", 1),
        ('<tool_call>{"name": 3}</tool_call>', "error: a call is {", 1),
        ('<tool_call>{"name": "now", "arguments": 3}</tool_call>', "error: the arguments are no object", 1),
        (
            '<tool_call>{"name": "power", "arguments": {"base": NaN}}</tool_call>',
            "error: this is not JSON",
            1,
        ),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", "error: this is not JSON", 1),
        ("<tool_call>" + "9" * 10_000 + "</tool_call>", "error: there is no tool '999", 1),
    ],
)
def test_a_call_in_json(response: str, said: str, failed: int) -> None:
    answered = Tools(TOOLS).answer(response)
    assert answered is not None
    assert answered.message.role == "tool"
    assert answered.message.content.startswith(said)
    assert answered.failed == failed
    if not failed:
        assert answered.message.content == said


@pytest.mark.parametrize(
    "response",
    ["", "15", "<tool_call>", '<tool_call>{"name": "now"}', "</tool_call><tool_call>", "[now()]", "now()"],
)
def test_a_response_without_a_call(response: str) -> None:
    assert Tools(TOOLS).answer(response) is None


@pytest.mark.parametrize(
    ("response", "said"),
    [
        ("It is [calculator(400/1400)] of them, at [now()].", "2/7\nnoon"),
        ("[anything()]", "None"),
        ("[anything(a(b)c)]", "'a(b)c'"),
        ("[power(3)]", "9.0"),
        ("[power(three)]", "error: base is 'three'; power takes"),
        ("[calculator()]", "error: "),
        ("[now(3)]", "noon"),
        ("[__import__(os)]", "error: there is no tool '__import__'"),
        ("[calculator(__import__('os').system('true'))]", "error: "),
    ],
)
def test_a_call_in_brackets(response: str, said: str) -> None:
    answered = Tools(TOOLS, parse=bracket_calls).answer(response)
    assert answered is not None
    assert answered.message.content.startswith(said)


def test_a_form_of_ones_own_and_another_role() -> None:
    tools = Tools([calculator], parse=lambda text: [ToolCall("calculator", text[1:])], role="user")
    answered = tools.answer("=1+2")
    assert answered is not None
    assert answered.message == Message("user", "3")
    assert answered.calls == (ToolCall("calculator", "1+2"),)


def test_a_tool_that_changes_its_arguments_changes_no_call() -> None:
    def change(items: list, more: Any, pairs: dict[str, Any]) -> str:  # type: ignore[type-arg]
        items[0].append(9)
        more.clear()
        pairs["a"].append(9)
        return f"{items} {more} {pairs}"

    arguments = {"items": [[1]], "more": {"a": 1}, "pairs": {"a": [1]}}
    answered = Tools([change]).answer(call("change", **arguments))
    assert answered is not None
    assert answered.message.content == "[[1, 9]] {} {'a': [1, 9]}"
    assert answered.calls == (ToolCall("change", arguments),)


def test_results_are_bounded_and_can_be_encoded() -> None:
    tools = Tools([anything], most_calls=3, most_characters=10, parse=bracket_calls)
    answered = tools.answer("[anything(ab)]" * 5 + "[anything(" + "x" * 50 + ")]")
    assert answered is not None
    assert answered.message.content == "'ab'\n'ab'\n'ab'"
    answered = Tools([anything], most_characters=10, parse=bracket_calls).answer(f"[anything({'x' * 50})]")
    assert answered is not None
    assert answered.message.content == "'xxxxxxxxx..."

    def hostile(text: str) -> str:
        return "a\0b\ud800c"

    answered = Tools([hostile], parse=bracket_calls).answer("[hostile(1)]")
    assert answered is not None
    assert answered.message.content == "ab?c"


def test_tools_that_cannot_be_used_are_refused() -> None:
    with pytest.raises(ConfigError, match="two tools are called now; rename one"):
        Tools([now, now])
    for name, parse in (("a b", template_calls), ('"', json_calls), ("a-b", bracket_calls)):

        def odd() -> None:
            pass

        odd.__name__ = name
        with pytest.raises(ConfigError, match=rf"a tool is called '.*', which {parse.__name__} reads in no"):
            Tools([odd], parse=parse)
    with pytest.raises(ConfigError, match=r"the tool \w+ has no signature that can be read"):
        Tools([type])  # type: ignore[list-item]
    with pytest.raises(ConfigError, match=r"a tool is .*partial.*, which has no name; wrap it"):
        Tools([functools.partial(power, 2)])
    with pytest.raises(ConfigError, match=r"the tool sqrt takes \(x, /\), .* which x cannot have; wrap it"):
        Tools([math.sqrt])
    with pytest.raises(
        ConfigError, match=r"the tool total takes \(\*terms: float\) -> float, .* terms cannot"
    ):
        Tools([total])
    with pytest.raises(ConfigError, match=r"the tool opened .*, and file cannot be a value of JSON"):
        Tools([opened])
    with pytest.raises(
        ConfigError, match=r"the types of the tool unread .*NameError: name 'Nowhere'.*repair"
    ):
        Tools([unread])
    with pytest.raises(ConfigError, match="the default of x of the tool noted is a Field of pydantic"):
        Tools([noted])


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>" * 30_000,
        "[a(" * 100_000,
        "[" + "a" * 333_333,
        "[a(" + ")" * 333_333,
        "[a(]" * 83_333,
        "<function=f><parameter=a>" * 6_666,
        "<function=f><parameter=a>" * 6_666 + "</parameter>x",
        '<tool_call>{"a' * 10_000,
        "<|tool_call>call:a{b:[" * 6_666,
        "to=functions.a" * 3_333,
        "<|tool_call_begin|>functions.a:0" * 3_333,
        "<|tool_call_start|>" + "a'\\" * 16_666 + "<|tool_call_end|>",
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>" * 3_333,
        '{"name":"a","arguments":' * 6_666,
        "<think></think>" * 16_666,
        "<think>" * 30_000,
        "</think>" * 30_000,
        " " * 166_666 + "<think",
    ],
)
def test_hostile_text_is_read_in_bounded_time(text: str) -> None:
    for read in (json_calls, bracket_calls, template_calls):
        assert seconds(lambda read=read: read(text)) < 0.5
        assert all(call.fault for call in read(text))
