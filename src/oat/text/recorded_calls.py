"""Calls of tools in messages, as a chat template takes them.

In data, the arguments of a call are an object or, as OpenAI's API returns them, the JSON text of one. Some
templates take only objects, and would encode a text a second time. Others take only texts. A few write a text
between quotes as it is, though a quote within it would end it. `study_calls` finds out which by rendering a
call, and reading it. `check_read_back` checks that a recorded call is read back.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from oat.errors import TemplateError, shown
from oat.text.call_forms import ARGUMENTS, BESIDE, ToolCall, Written, json_value, literal
from oat.text.calls import template_calls

_NAME, _ARGUMENTS = "oattool", {"oatname": "oat value"}
_ASKED = {"role": "user", "content": "oatuser"}
PROBE = ToolCall(_NAME, _ARGUMENTS)
"""The call with which templates are studied."""
_JSON = json.dumps(_ARGUMENTS)
_QUOTED = {"oatname": "it's a \\new\nline"}
"""Arguments that a template must write with escapes if it writes them between quotes."""
_PLAIN = re.compile(r"[\w.\-]+", re.ASCII)


@dataclass(frozen=True)
class CallStyle:
    """How a template takes the calls of a message.

    Attributes:
        are_objects: True: arguments must be objects; False: they must be JSON text; None: they may be both,
            or the template writes none.
        are_read: True: what the template writes for a call is read back as this call.
        escapes: True: the template writes texts between quotes as they are, so they are given to it with
            Python's escapes. Otherwise a quote within a text would end it.
    """

    are_objects: bool | None = None
    are_read: bool = False
    escapes: bool = False

    def put(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Return a message, as a dict, with its calls in this style.

        Raises:
            TemplateError: its calls are no list; a call has no name, or another field than is known; or its
                arguments must be an object, and are not.
        """
        calls = message.get("tool_calls")
        if not calls:
            return dict(message)
        if not isinstance(calls, list):
            raise TemplateError(
                f"`tool_calls` is {shown(calls)}, and must be a list of calls; repair the record"
            )
        return {**message, "tool_calls": [self._call(call) for call in calls]}

    def _call(self, call: Any) -> dict[str, Any]:
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict):
            _refuse_unknown(call, {"function"})
            return {**call, "function": self._function(function)}
        return self._function(call)

    def _function(self, call: Any) -> dict[str, Any]:
        name = call.get("name") if isinstance(call, dict) else None
        given = [key for key in ARGUMENTS if isinstance(call, dict) and key in call]
        if not isinstance(name, str) or not name or len(given) > 1:
            raise TemplateError(
                f"a call of `tool_calls` is {shown(call)}, and must have a `name`, which is a text, and its "
                "arguments under `arguments`; repair the record"
            )
        _refuse_unknown(call, {"name", *given})
        rest = {key: value for key, value in call.items() if key not in given}
        return {**rest, "arguments": self._arguments(name, call[given[0]] if given else None)}

    def _arguments(self, name: str, given: Any) -> Any:
        if given is None or (isinstance(given, str) and not given.strip()):
            given = {} if self.are_objects else "{}"
        value = recorded_arguments(given)
        is_text = isinstance(given, str) and not self.are_objects
        if value is None and not (is_text and not self.are_read):
            raise TemplateError(
                f"a call of {shown(name)} has the arguments {shown(given)}, which are neither an "
                "object nor the JSON text of one that has each name once; repair the record"
            )
        if is_text:  # a template that writes texts as they are may have a form of its own
            return given
        if value is not None and self.escapes:
            value = {key: _escaped(part) for key, part in value.items()}
        return json.dumps(value, ensure_ascii=False) if self.are_objects is False else value


def recorded_arguments(given: Any) -> dict[str, Any] | None:
    """Return the arguments of a recorded call, an object or the JSON text of one; None: they are neither."""
    if isinstance(given, str):
        try:
            given = json_value(given)
        except (ValueError, RecursionError):
            return None
    return given if isinstance(given, dict) else None


def _refuse_unknown(call: Mapping[str, Any], known: set[str]) -> None:
    wrong = next((key for key in call if key not in known | BESIDE), None)
    if wrong is not None:
        raise TemplateError(
            f"a call of `tool_calls` is {shown(dict(call))}, and the meaning of its field {shown(wrong)} is "
            "not known; put the tool's arguments under `arguments`, and remove other fields"
        )


def _escaped(value: Any) -> Any:
    """Return a text with Python's escapes, for quotes of either kind; another value as it is."""
    if not isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False)[1:-1].replace("'", "\\'")


def study_calls(render: Callable[[list[dict[str, Any]]], str]) -> CallStyle:
    """Return how a template takes calls.

    Args:
        render: renders messages, given as dicts.

    Returns:
        The style in which a call that the template writes is read back as this call. If both forms of
        arguments are, they are left as given. If neither is, a form in which the arguments stand in the text.
    """

    def written(is_object: bool, arguments: dict[str, Any] = _ARGUMENTS) -> str:
        try:
            return render([_ASKED, probe_message(is_object, arguments)])
        except TemplateError:
            return ""

    texts = {is_object: written(is_object) for is_object in (True, False)}
    # a text that is encoded a second time does not stand in the rendering as it is
    seen = [each for each, text in texts.items() if _NAME in text and (each or _JSON in text)]
    read = [each for each in seen if _is_read(texts[each], [PROBE])]
    if read:
        quoted = [ToolCall(_NAME, _QUOTED)]
        escaped = {key: _escaped(value) for key, value in _QUOTED.items()}
        escapes = (
            read[0]
            and not _is_read(written(True, _QUOTED), quoted)
            and _is_read(written(True, escaped), quoted)
        )
        are_objects = True if escapes else None if len(read) > 1 else read[0]
        return CallStyle(are_objects, are_read=True, escapes=escapes)
    shown_as_json = [each for each in seen if str(_ARGUMENTS) not in texts[each]]
    return CallStyle(shown_as_json[0] if shown_as_json else None)


def check_calls(
    messages: Sequence[Mapping[str, Any]], text: str, render: Callable[[list[dict[str, Any]]], str]
) -> None:
    """Check that every call of a conversation stands in its rendered text.

    Args:
        render: renders messages, given as dicts. They get calls of other names, since the tool's own name may
            stand in other parts of the text too.

    Raises:
        TemplateError: the template leaves out a call.
    """
    names: list[str] = []
    renamed = [_renamed(message, names) for message in messages]
    try:
        written = render(renamed)
        missing = [name for place, name in enumerate(names) if _mark(place) not in written]
    except TemplateError:  # the template knows the tools by name
        missing = [name for name, count in Counter(names).items() if text.count(name) < count]
    if missing:
        listed = ", ".join(map(shown, dict.fromkeys(missing)))
        raise TemplateError(
            f"the chat template leaves out a call of {listed}. Some templates write "
            "only the first call of a message, or no call beside a text: give each call a message of its "
            "own, without text. Some write a call's `id` and not its name: give the `id` that they want, "
            "such as `functions.find:0`. Or choose another template"
        )


def _mark(place: int) -> str:
    return f"{_NAME}{place}x"


def _renamed(message: Mapping[str, Any], names: list[str]) -> dict[str, Any]:
    """Return a message whose calls have names that stand nowhere else, also in their `id`.

    Args:
        names: the tools' names in the calls before these; these calls' are added.
    """

    def rename(call: Any) -> Any:
        if not isinstance(call, dict):
            return call
        function = call.get("function")
        inner = function if isinstance(function, dict) else call
        name = inner.get("name")
        if not isinstance(name, str) or not _PLAIN.fullmatch(name):  # others may be written with escapes
            return call
        mark = _mark(len(names))
        names.append(name)
        own = {**call, "id": str(call["id"]).replace(f".{name}:", f".{mark}:")} if "id" in call else call
        return {**own, "name": mark} if inner is call else {**own, "function": {**inner, "name": mark}}

    calls = message.get("tool_calls")
    return {**message, "tool_calls": [rename(call) for call in calls]} if calls else dict(message)


def check_read_back(
    calls: Sequence[Any], style: CallStyle, render: Callable[[list[dict[str, Any]]], str]
) -> None:
    """Check that what a template writes for the calls of a message is read back as these calls. Nothing is
    checked if the template writes a form that is not read at all.

    Args:
        calls: the calls, as they were recorded.
        render: renders messages, given as dicts.

    Raises:
        TemplateError: other calls are read, or none.
    """
    if not style.are_read:
        return
    message = {"role": "assistant", "content": "", "tool_calls": calls}
    text = render([_ASKED, style.put(message)])
    recorded = []
    for call in calls:
        function = call.get("function", call)
        given = next((function[key] for key in ARGUMENTS if key in function), None)
        recorded.append(ToolCall(function["name"], recorded_arguments(given) or {}))
    if not _is_read(text, recorded):
        behind = text.partition(str(_ASKED["content"]))[2]
        faults = [call.fault for call in template_calls(behind) if call.fault]
        raise TemplateError(
            f"the chat template writes calls as {shown(behind, 300)}, which cannot be read back as the calls "
            f"that were recorded{f' ({faults[0]})' if faults else ''}: it has no escape for a part of them, "
            "or changes it. Repair the record, or choose another template"
        )


def probe_message(is_object: bool = True, arguments: dict[str, Any] = _ARGUMENTS) -> dict[str, Any]:
    """Return an assistant's message with the call `PROBE`, or with other arguments."""
    function = {"name": _NAME, "arguments": arguments if is_object else json.dumps(arguments)}
    # some templates want an id of nine letters
    calls = [{"id": "oatcall01", "type": "function", "function": function}]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def is_probe(call: ToolCall) -> bool:
    """Return True if a call that was read is `PROBE`."""
    return (call.name, call.arguments) == (PROBE.name, PROBE.arguments)


def _is_read(text: str, calls: Sequence[ToolCall]) -> bool:
    """Return True if a rendered conversation ends with the given calls, and with no other call."""
    behind = text.partition(str(_ASKED["content"]))[2]
    begin, end = (each(mark) for each, mark in ((behind.find, "{"), (behind.rfind, "}")))
    # a template may write nothing but JSON in the turn, which is known as a call if it stands alone
    for part in (behind, behind[begin : end + 1]):
        read = template_calls(part)
        if len(read) == len(calls) and all(map(_is_same_call, read, calls)):
            return True
    return False


def _is_same_call(read: ToolCall, recorded: ToolCall) -> bool:
    return not read.fault and read.name == recorded.name and _is_same(read.arguments, recorded.arguments)


def _is_same(read: Any, recorded: Any) -> bool:
    """Return True if a value that was read is the recorded one, or may spell it (`Written`)."""
    if isinstance(read, Written) and not isinstance(recorded, str):
        return any(_is_same(value, recorded) for value in _spelled(read))
    if isinstance(read, dict) and isinstance(recorded, dict):
        return read.keys() == recorded.keys() and all(_is_same(read[key], recorded[key]) for key in read)
    if isinstance(read, list) and isinstance(recorded, list):
        return len(read) == len(recorded) and all(map(_is_same, read, recorded))
    return bool(read == recorded) and isinstance(read, bool) == isinstance(recorded, bool)


def _spelled(text: str) -> Iterator[Any]:
    for read in (json_value, literal):
        with suppress(ValueError, RecursionError):
            yield read(text)
