"""Tools: plain functions that the model may call within an episode.

    tools = Tools([calculator])

    def step(self, state, response):
        answered = tools.answer(response)  # None: the response calls nothing
        ...
        return Turn(state, answered.message, reward=0.0)

A response calls a tool in one of two forms. An environment chooses one:

* `json_calls` reads `<tool_call>{"name": "calculator", "arguments": {"text": "3*4"}}</tool_call>`. Hermes,
  Qwen and other chat models write this form.
* `bracket_calls` reads `[calculator(3*4)]`, the form of Toolformer (arXiv:2302.04761, Section 2). It has few
  tokens. What stands between the parentheses is the tool's only argument, as text.

Text of the model is only read. No text is evaluated as code, and only the functions that the environment
names are called.
"""

import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, get_type_hints

from oat.errors import ConfigError, did_you_mean, shortened, shown
from oat.types import Message

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_BRACKET = re.compile(r"\[(\w{1,64})\(([^\[\]]*)\)\]")
_OF_THE_CALL = (ValueError, ArithmeticError, LookupError)
"""Exceptions of a tool that blame its arguments. Their texts are told to the model."""


@dataclass(frozen=True)
class ToolCall:
    """A call that the model wrote.

    Attributes:
        name: name of the tool; "" if the call could not be read.
        arguments: the arguments by name, or the only argument.
        fault: what is wrong with the call's form; "" if nothing is.
    """

    name: str
    arguments: Mapping[str, Any] | str = ""
    fault: str = ""


@dataclass(frozen=True)
class ToolAnswer:
    """The answer to the calls of a response.

    Attributes:
        message: the results in the order of the calls, one in a line.
        calls: the calls.
        failed: number of calls that gave an error instead of a result.
    """

    message: Message
    calls: tuple[ToolCall, ...]
    failed: int


@dataclass(frozen=True)
class _Tool:
    """A function that is called by the names of its parameters.

    Attributes:
        types: the annotated types by the parameters' names.
    """

    name: str
    function: Callable[..., Any]
    signature: inspect.Signature
    types: Mapping[str, Any]

    @classmethod
    def of(cls, function: Callable[..., Any]) -> Self:
        """Return the tool of a function.

        Raises:
            ConfigError: it cannot be a tool.
        """
        name = getattr(function, "__name__", "")
        wrap = "wrap it in a function of your own"
        if not name:
            raise ConfigError(f"a tool is {shown(function)}, which has no name; {wrap}")
        try:
            signature = inspect.signature(function)
        except ValueError as error:
            raise ConfigError(f"the tool {name} has no signature that can be read; {wrap}") from error
        for parameter in signature.parameters.values():
            if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.VAR_POSITIONAL):
                raise ConfigError(
                    f"the tool {name} takes {signature}, and a call gives arguments by name, which "
                    f"{parameter.name} cannot have; {wrap}"
                )
        try:
            types = get_type_hints(function)
        except Exception as error:
            raise ConfigError(
                f"the types of the tool {name} cannot be read ({type(error).__name__}: {error}); repair its "
                "annotations"
            ) from error
        return cls(name, function, signature, types)

    def bound(self, given: Mapping[str, Any] | str) -> tuple[dict[str, Any], str]:
        """Return the arguments of a call by name, converted to the types of their parameters; and what is
        wrong with them, or ""."""
        takes = f"{self.name} takes {self.signature}"
        parameters = self.signature.parameters
        if isinstance(given, str):
            names = list(parameters)[:1]
            given = {names[0]: given} if names and (given or _is_needed(parameters[names[0]])) else {}
        try:
            self.signature.bind(**given)
        except TypeError as error:
            return {}, f"{error}; {takes}"
        rest = next((name for name, one in parameters.items() if one.kind is one.VAR_KEYWORD), None)
        arguments = {}
        for name, value in given.items():
            is_own = name in parameters and name != rest
            try:
                arguments[name] = _converted(value, self.types.get(name if is_own else rest or name))
            except (ValueError, OverflowError):
                return {}, f"{name} is {shortened(repr(value))}; {takes}"
        return arguments, ""


def json_calls(response: str) -> list[ToolCall]:
    """Return the calls between `<tool_call>` and `</tool_call>`, each a JSON object with `name` and
    `arguments`. A call that is not closed is none."""
    found: list[ToolCall] = []
    begin = response.find(_OPEN)
    while begin >= 0:
        end = response.find(_CLOSE, begin)
        if end < 0:
            break
        found.append(_of_json(response[begin + len(_OPEN) : end]))
        begin = response.find(_OPEN, end)
    return found


def bracket_calls(response: str) -> list[ToolCall]:
    """Return the calls of the form `[name(text)]`. The text has no brackets."""
    return [ToolCall(match[1], match[2]) for match in _BRACKET.finditer(response)]


class Tools:
    """The tools of an environment.

    * An argument is converted to the type that its parameter is annotated with, if this is `int`, `float`,
      `str` or `bool` and nothing is lost.
    * A call with an unknown name or wrong arguments is answered by an error, which the model reads. So is a
      call whose tool raises a ValueError, an ArithmeticError or a LookupError. Other exceptions pass, since
      they are errors of the tool: they end the training.

    Args:
        functions: the tools. A tool is called by the name of its function, and its result is told as text.
        parse: reads the calls in a response: `json_calls`, `bracket_calls`, or a function like them.
        role: role of the message that answers.
        most_calls: number of calls in a response that are answered; the others are left out.
        most_characters: largest number of characters of a result; the rest is cut off.

    Raises:
        ConfigError: two tools have one name, or a tool cannot be called by the names of its parameters, or
            its types cannot be read.
    """

    def __init__(
        self,
        functions: Sequence[Callable[..., Any]],
        *,
        parse: Callable[[str], Sequence[ToolCall]] = json_calls,
        role: str = "tool",
        most_calls: int = 8,
        most_characters: int = 2000,
    ):
        self._parse = parse
        self._role = role
        self._most_calls = most_calls
        self._most_characters = most_characters
        self._tools: dict[str, _Tool] = {}
        for function in functions:
            tool = _Tool.of(function)
            if tool.name in self._tools:
                raise ConfigError(f"two tools are called {tool.name}; rename one")
            self._tools[tool.name] = tool

    def answer(self, response: str) -> ToolAnswer | None:
        """Make the calls in a response, and return the results; None if it calls nothing."""
        calls = tuple(self._parse(response))[: self._most_calls]
        if not calls:
            return None
        told = [self._told(call) for call in calls]
        content = "\n".join(text for text, _ in told)
        failed = sum(not is_fine for _, is_fine in told)
        return ToolAnswer(Message(self._role, content), calls, failed)

    def _told(self, call: ToolCall) -> tuple[str, bool]:
        """Return what is told of a call, and true if it is a result."""
        fault = call.fault
        if not fault and call.name not in self._tools:
            fault = f"there is no tool {shortened(call.name)!r}; {did_you_mean(call.name, self._tools)}"
        if fault:
            return self._text(f"error: {fault}"), False
        tool = self._tools[call.name]
        arguments, fault = tool.bound(call.arguments)
        if fault:
            return self._text(f"error: {fault}"), False
        try:
            return self._text(str(tool.function(**arguments))), True
        except _OF_THE_CALL as error:
            return self._text(f"error: {error or type(error).__name__}"), False

    def _text(self, text: str) -> str:
        """Return text that a tokenizer can read."""
        plain = text.replace("\0", "").encode("utf-8", "replace").decode("utf-8")
        return shortened(plain, self._most_characters)


def _of_json(text: str) -> ToolCall:
    wrong = 'a call is {"name": ..., "arguments": {...}}'
    try:
        call = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return ToolCall("", fault=f"this is not JSON; {wrong}")
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return ToolCall("", fault=wrong)
    arguments = call.get("arguments", {})
    if not isinstance(arguments, dict):
        return ToolCall(call["name"], fault=f"the arguments are no object; {wrong}")
    return ToolCall(call["name"], arguments)


def _refuse(constant: str) -> Any:
    raise ValueError(constant)


def _is_needed(parameter: inspect.Parameter) -> bool:
    return parameter.default is parameter.empty


def _converted(value: Any, wanted: Any) -> Any:
    """Return a value as the type that is wanted.

    Raises:
        ValueError, OverflowError: the value is of another kind, or would lose something.
    """
    if wanted not in (int, float, str, bool) or type(value) is wanted:
        return value
    if isinstance(value, str) and wanted in (int, float):
        return wanted(value)
    if isinstance(value, int) and not isinstance(value, bool) and wanted is float:
        return float(value)
    if isinstance(value, float) and wanted is int and value.is_integer():
        return int(value)
    raise ValueError(value)
