"""Tools: functions that the model may call within an episode.

    tools = Tools([calculator])

    def step(self, state, response):
        answered = tools.answer(response)  # None: the response calls nothing
        ...
        return Turn(state, answered.message, reward=0.0)

An environment chooses the form in which calls are read:

* `template_calls`, the default, reads every form in which published chat templates write calls, such as
  `<tool_call>{"name": "calculator", "arguments": {"text": "3*4"}}</tool_call>` (`text/calls.py`).
* `json_calls` reads this one form alone. Hermes, Qwen and other chat models write it.
* `bracket_calls` reads `[calculator(3*4)]`, the form of Toolformer (arXiv:2302.04761, Section 2). It has few
  tokens. What stands between the parentheses is the tool's only argument, as text.

Text of the model is only read. No text is evaluated as code, and only the functions that the environment
names are called.

What the model or a tool gets wrong is told to the model as a text that begins with `error:`. It ends no run,
since the same responses would come again when the run is continued.
"""

import asyncio
import inspect
import re
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self, get_type_hints

from oat.environments.arguments import annotation_text, converted, copied, is_possible
from oat.environments.results import error_text, result_text, same_text
from oat.errors import ConfigError, EpisodeError, did_you_mean, is_signal, shortened, shown, warn
from oat.plugins.calls import awaited, is_installed, last_place, restoring
from oat.plugins.streams import StandardStreams
from oat.text.call_forms import ToolCall
from oat.text.calls import bracket_calls, json_calls, template_calls
from oat.types import Message

__all__ = ["ToolAnswer", "ToolCall", "Tools", "bracket_calls", "json_calls", "template_calls", "tools_of"]

_OF_THE_CALL = (ValueError, ArithmeticError, LookupError, re.error, SyntaxError)
"""Exceptions of a tool that error_context its arguments. Their texts are told to the model."""
_WRITTEN: Mapping[Any, str] = {
    template_calls: "<function={}>{{}}</function>",
    json_calls: '<tool_call>{{"name": "{}"}}</tool_call>',
    bracket_calls: "[{}()]",
}
"""A call for each of our parsers, with which a tool's name is tried."""


@dataclass(frozen=True)
class ToolAnswer:
    """The answer to the calls of a response.

    Attributes:
        message: the results in the order of the calls, one in a line. If its role is `tool`, its fields are
            `name`, the names of the tools, and `tool_call_id`, by which the calls named themselves.
        calls: the calls.
        failed: number of calls that gave an error instead of a result.
        broken: number of these whose tool failed by a fault of its own.
    """

    message: Message
    calls: tuple[ToolCall, ...]
    failed: int
    broken: int = 0


class _Text:
    """What has a given text in the signature that is told to the model."""

    def __init__(self, text: str):
        self._text = text

    def __repr__(self) -> str:
        return self._text


@dataclass(frozen=True)
class _Tool:
    """A function that is called by the names of its parameters.

    Attributes:
        types: the annotated types by the parameters' names.
        takes: the sentence that tells the model what arguments there are.
    """

    name: str
    function: Callable[..., Any]
    signature: inspect.Signature
    types: Mapping[str, Any]
    takes: str

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
            if type(parameter.default).__name__ == "FieldInfo":  # only a framework would read it
                raise ConfigError(
                    f"the default of {parameter.name} of the tool {name} is a Field of pydantic, which the "
                    f"tool itself would get; write {parameter.name}: Annotated[..., Field(...)], with the "
                    "default behind it"
                )
        try:
            made = "__init__" if isinstance(function, type) else ""
            types = get_type_hints(getattr(function, made) if made else function, include_extras=True)
            wrong = next((one for one in signature.parameters if not is_possible(types.get(one, Any))), None)
        except Exception as error:
            raise ConfigError(
                f"the types of the tool {name} cannot be read ({type(error).__name__}: {error}); repair its "
                "annotations"
            ) from error
        if wrong is not None:
            raise ConfigError(
                f"the tool {name} takes {signature}, and {wrong} cannot be a value of JSON, which is what a "
                "model writes; annotate it with int, float, str, bool, list, dict or a class of these "
                "(elements of a set and keys of a dict must have a hash), and make of it within the tool "
                "what you need"
            )
        return cls(name, function, signature, types, f"{name} takes {_told_signature(signature)}")

    def bound(self, given: Mapping[str, Any] | str) -> tuple[dict[str, Any], str]:
        """Return the arguments of a call by name, converted to the types of their parameters; and what is
        wrong with them, or ""."""
        parameters = self.signature.parameters
        if isinstance(given, str):
            names = list(parameters)[:1]
            given = {names[0]: given} if names and (given or _is_needed(parameters[names[0]])) else {}
        try:
            self.signature.bind(**given)
        except TypeError as error:
            return {}, f"{error}; {self.takes}"
        rest = next((name for name, one in parameters.items() if one.kind is one.VAR_KEYWORD), None)
        arguments: dict[str, Any] = {}
        for name, value in given.items():
            is_own = name in parameters and name != rest
            if is_own and value is None is parameters[name].default:
                arguments[name] = None
                continue
            try:
                wanted = self.types.get(name if is_own else rest or name, Any)
                arguments[name] = converted(copied(value), wanted)
            except Exception as error:  # what a model writes ends no run
                text, told = shown(value), str(error)
                more = f" ({shortened(told, 200)})" if told and not told.startswith(text) else ""
                return {}, f"{name} is {text}{more}; {self.takes}"
        return arguments, ""


_Told = tuple[str, Literal["result", "failed", "broken"]]
"""What is told of a call, and what it is: a result; an error of the call; or an error of the tool."""


class Tools:
    """The tools of an environment.

    * An argument is checked against the type that its parameter is annotated with, and converted to it if
      nothing is lost (`environments/arguments.py`).
    * A call that cannot be read, with an unknown name or with wrong arguments is answered by an error, which
      the model reads. So is a call whose tool raises an exception. If this is a ValueError, an
      ArithmeticError, a LookupError, a SyntaxError or `re.error`, it blames the arguments. Any other
      exception is a fault of the tool: a warning says so once, and the metric `episode/broken_calls` counts
      it. Only `oat.errors.EpisodeError` passes, with which a tool can end the run.
    * The result of an `async` tool is awaited. `answer` runs it in an event loop of its own; an `async`
      environment calls `await tools.answer_async(response)`, which uses the environment's loop.
    * A result is told as text (`environments/results.py`). One whose text has the address of an object, or
      the state of the process, ends the run, since two runs would differ.
    * A tool that changes its arguments, or the filters of warnings, changes them for itself alone. One that
      closes or replaces a standard stream gets a warning, and `os._exit` is a fault of the tool.

    Attributes:
        parse, role: the arguments.
        broken: number of calls so far whose tool failed by a fault of its own (`episode/broken_calls`).

    Args:
        functions: the tools. A tool is called by the name of its function.
        parse: reads the calls in a response: `template_calls`, `json_calls`, `bracket_calls`, or a function
            like them.
        role: role of the message that answers.
        most_calls: number of calls in a response that are answered; the others are left out.
        most_characters: largest number of characters of a result; the rest is cut off.

    Raises:
        ConfigError: two tools have one name; one of our parsers cannot read a name; or a tool cannot be
            called by the names of its parameters, or its types cannot be read, or no value of JSON has one
            of them.
    """

    def __init__(
        self,
        functions: Sequence[Callable[..., Any]],
        *,
        parse: Callable[[str], Sequence[ToolCall]] = template_calls,
        role: str = "tool",
        most_calls: int = 8,
        most_characters: int = 2000,
    ):
        self.parse = parse
        self.role = role
        self._most_calls = most_calls
        self._most_characters = most_characters
        self._tools: dict[str, _Tool] = {}
        self._warned: set[tuple[str, type]] = set()
        self.broken = 0
        for function in functions:
            tool = _Tool.of(function)
            if tool.name in self._tools:
                raise ConfigError(f"two tools are called {tool.name}; rename one")
            if parse in _WRITTEN and not _is_read(parse, tool.name):
                raise ConfigError(
                    f"a tool is called {shown(tool.name)}, which {parse.__name__} reads in no call; give the "
                    "function a `__name__` of letters, digits and underscores"
                )
            self._tools[tool.name] = tool

    def answer(self, response: str) -> ToolAnswer | None:
        """Make the calls in a response, and return the results; None if it calls nothing.

        Raises:
            EpisodeError: a tool raised it, or a result has no text that is the same in every run.
        """
        calls = self._calls(response)
        return self._answer(calls, [self._told(call) for call in calls])

    async def answer_async(self, response: str) -> ToolAnswer | None:
        """As `answer`, for an environment whose methods are `async`."""
        calls = self._calls(response)
        return self._answer(calls, [await self._told_async(call) for call in calls])

    def _calls(self, response: str) -> tuple[ToolCall, ...]:
        return tuple(self.parse(response))[: self._most_calls]

    def _answer(self, calls: tuple[ToolCall, ...], told: Sequence[_Told]) -> ToolAnswer | None:
        if not calls:
            return None
        content = "\n".join(self._text(text) for text, _ in told)
        kinds = [kind for _, kind in told]
        failed = len(kinds) - kinds.count("result")
        message = Message(self.role, content, self._fields(calls) if self.role == "tool" else {})
        return ToolAnswer(message, calls, failed, kinds.count("broken"))

    def _fields(self, calls: tuple[ToolCall, ...]) -> dict[str, str]:
        """Return what a template may write beside the results: whose they are. Different names are joined."""
        said = {"name": [call.name for call in calls], "tool_call_id": [call.id for call in calls]}
        joined = {field: ", ".join(dict.fromkeys(filter(None, names))) for field, names in said.items()}
        return {field: self._text(names) for field, names in joined.items() if names}

    def _told(self, call: ToolCall) -> _Told:
        """Make a call, and return what is told of it."""
        tool, arguments, fault = self._prepared(call)
        if tool is None:
            return f"error: {fault}", "failed"
        filters = _Filters()
        try:
            with restoring(f"the tool {tool.name}", EpisodeError):
                result = tool.function(**arguments)
                text = result_text(awaited(result) if inspect.isawaitable(result) else result, tool.name)
        except BaseException as error:
            filters.put_back()
            return self._error(tool, error)
        filters.put_back()
        return text, "result"

    async def _told_async(self, call: ToolCall) -> _Told:
        tool, arguments, fault = self._prepared(call)
        if tool is None:
            return f"error: {fault}", "failed"
        # other calls change the process meanwhile, so only what was closed is known to be this tool's doing
        task, filters, streams = asyncio.current_task(), _Filters(), StandardStreams(is_alone=False)
        try:
            result = tool.function(**arguments)
            text = result_text(await result if inspect.isawaitable(result) else result, tool.name)
        except BaseException as error:
            filters.put_back()
            _tell_mended(tool, streams)
            if _ends(task, error):
                raise
            return self._error(tool, error)
        filters.put_back()
        _tell_mended(tool, streams)
        return text, "result"

    def _prepared(self, call: ToolCall) -> tuple[_Tool | None, dict[str, Any], str]:
        """Return the tool of a call and its arguments; or None, nothing, and what is wrong."""
        if call.fault:
            return None, {}, call.fault
        if call.name not in self._tools:
            fault = f"there is no tool {shortened(call.name)!r}; {did_you_mean(call.name, self._tools)}"
            return None, {}, fault
        tool = self._tools[call.name]
        arguments, fault = tool.bound(call.arguments)
        return (None if fault else tool), arguments, fault

    def _error(self, tool: _Tool, error: BaseException) -> _Told:
        """Return what is told of an exception of a tool.

        Raises:
            EpisodeError, or an exception of a signal: it is the exception.
        """
        if is_signal(error) or isinstance(error, EpisodeError):
            raise error
        kind, text = type(error), error_text(error)
        if isinstance(error, _OF_THE_CALL):
            return f"error: {text or kind.__name__}", "failed"
        self.broken += 1
        said = " ".join(f"{kind.__name__}: {text}".split()) if text else kind.__name__
        if (tool.name, kind) not in self._warned:
            self._warned.add((tool.name, kind))
            place = last_place(error, lambda file: not (file.startswith("<") or is_installed(file)))
            warn(
                f"the tool {tool.name} failed: {shortened(said, 300)}{f' ({place})' if place else ''}. The "
                "model reads this as an error, and the run goes on (said once for each kind of error). "
                "Repair the tool, or let it raise a ValueError if the arguments are to error_context"
            )
        return f"error: the tool failed ({said})", "broken"

    def _text(self, text: str) -> str:
        """Return text that a tokenizer can read."""
        plain = text.replace("\0", "").encode("utf-8", "replace").decode("utf-8")
        return shortened(plain, self._most_characters)


def _is_read(parse: Callable[[str], Sequence[ToolCall]], name: str) -> bool:
    """Return True if one of our parsers reads a call of the tool with a name."""
    calls = parse(_WRITTEN[parse].format(name))
    return [(call.name, call.fault) for call in calls] == [(name, "")]


class _Filters:
    """The filters of warnings before a call. A tool that makes warnings errors would make errors of what
    `oat` warns of."""

    def __init__(self) -> None:
        self._module: Any = warnings
        self._list, self._before = self._module.filters, [*self._module.filters]

    def put_back(self) -> None:
        """Put back the filters, if they have changed."""
        if self._module.filters is not self._list or self._list != self._before:
            self._list[:] = self._before
            self._module.filters = self._list


def _tell_mended(tool: _Tool, streams: StandardStreams) -> None:
    """Open the standard streams again if an `async` tool has closed them, and warn of it."""
    if mended := streams.mended():
        warn(f"the tool {tool.name} closed {' and '.join(mended)}, which the run needs; it is open again")


def _ends(task: "asyncio.Task[Any] | None", error: BaseException) -> bool:
    """Return True if an exception within an `async` call was not raised by the tool: the environment is late,
    and its task was cancelled, or the call is closed, since its event loop has ended.

    Args:
        task: the task in which the call began.
    """
    if isinstance(error, asyncio.CancelledError):
        return task is not None and task.cancelling() > 0
    if not isinstance(error, GeneratorExit):
        return False
    try:
        return asyncio.current_task() is not task
    except RuntimeError:  # no event loop runs here
        return True


def _told_signature(signature: inspect.Signature) -> inspect.Signature:
    """Return a signature that has a text which is the same in every process."""
    empty = signature.empty

    def told(annotation: Any) -> Any:
        is_plain = annotation is empty or isinstance(annotation, str | type)
        return annotation if is_plain else _Text(annotation_text(annotation))

    parameters = [
        one.replace(
            annotation=told(one.annotation),
            default=empty if one.default is empty else _Text(same_text(one.default, shown(one.default, 200))),
        )
        for one in signature.parameters.values()
    ]
    return signature.replace(parameters=parameters, return_annotation=told(signature.return_annotation))


def tools_of(environment: Any) -> list[Tools]:
    """Return the tools of an environment: in its attributes, in those of its class, in the module of its
    class, and in lists and dicts that stand there."""
    kinds = [kind for kind in type(environment).__mro__ if kind is not object]
    module = getattr(sys.modules.get(type(environment).__module__), "__dict__", {})
    places = [getattr(environment, "__dict__", {}), *map(vars, kinds), module]
    values = [value for place in places for value in [*place.values()]]
    parts = [[*each.values()] if isinstance(each, dict) else each for each in values]
    inner = [part for each in parts if isinstance(each, list | tuple) for part in each]
    return [*{id(each): each for each in [*values, *inner] if isinstance(each, Tools)}.values()]


def _is_needed(parameter: inspect.Parameter) -> bool:
    return parameter.default is parameter.empty
