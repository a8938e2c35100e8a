"""Calls of tools in messages, as a chat template takes them.

In data, the arguments of a call are an object or, as OpenAI's API returns them, the JSON text of one. Some
templates take only objects, and would encode a text a second time. Others take only texts. `study_calls`
finds out which by rendering a call, and reading it.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from oat.errors import TemplateError, shown
from oat.text.call_forms import ToolCall, json_value
from oat.text.calls import template_calls

_NAME, _ARGUMENTS = "oattool", {"oatname": "oat value"}
PROBE = ToolCall(_NAME, _ARGUMENTS)
"""The call with which templates are studied."""
_JSON = json.dumps(_ARGUMENTS)
_PLAIN = re.compile(r"[\w.\-]+", re.ASCII)


@dataclass(frozen=True)
class CallStyle:
    """How a template takes the calls of a message.

    Attributes:
        are_objects: True: arguments must be objects; False: they must be JSON text; None: they may be both,
            or the template writes none.
    """

    are_objects: bool | None = None

    def put(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Return a message, as a dict, with its calls in this style.

        Raises:
            TemplateError: its calls are no list; or the arguments of a call must be an object, and are not.
        """
        calls = message.get("tool_calls")
        if not calls:
            return dict(message)
        if not isinstance(calls, list):
            raise TemplateError(
                f"`tool_calls` is {shown(calls)}, and must be a list of calls; repair the record"
            )
        return {**message, "tool_calls": [self._call(call) for call in calls]}

    def _call(self, call: Any) -> Any:
        if not isinstance(call, dict):
            return call
        if isinstance(call.get("function"), dict):
            return {**call, "function": self._call(call["function"])}
        return {**call, "arguments": self._arguments(call)} if "name" in call else call

    def _arguments(self, call: Mapping[str, Any]) -> Any:
        given = call.get("arguments")
        if given is None or (isinstance(given, str) and not given.strip()):
            given = {} if self.are_objects else "{}"
        value = given
        if isinstance(given, str):
            if not self.are_objects:  # a template that writes texts as they are may have a form of its own
                return given
            try:
                value = json_value(given)
            except (ValueError, RecursionError):
                value = None
        if not isinstance(value, dict):
            raise TemplateError(
                f"a call of {shown(call.get('name'))} has the arguments {shown(given)}, which are neither an "
                "object nor the JSON text of one that has each name once; repair the record"
            )
        return json.dumps(value, ensure_ascii=False) if self.are_objects is False else value


def study_calls(render: Callable[[list[dict[str, Any]]], str]) -> CallStyle:
    """Return how a template takes calls.

    Args:
        render: renders messages, given as dicts.

    Returns:
        The style in which a call that the template writes is read back as this call. If both forms of
        arguments are, they are left as given. If neither is, a form in which the arguments stand in the text.
    """

    def written(is_object: bool) -> str:
        try:
            return render([{"role": "user", "content": "oatuser"}, probe_message(is_object)])
        except TemplateError:
            return ""

    texts = {is_object: written(is_object) for is_object in (True, False)}
    # a text that is encoded a second time does not stand in the rendering as it is
    seen = [each for each, text in texts.items() if _NAME in text and (each or _JSON in text)]
    read = [each for each in seen if _is_read(texts[each])]
    if read:
        return CallStyle(None if len(read) > 1 else read[0])
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


def probe_message(is_object: bool = True) -> dict[str, Any]:
    """Return an assistant's message with the call `PROBE`."""
    function = {"name": _NAME, "arguments": _ARGUMENTS if is_object else _JSON}
    # some templates want an id of nine letters
    calls = [{"id": "oatcall01", "type": "function", "function": function}]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def is_probe(call: ToolCall) -> bool:
    """Return True if a call that was read is `PROBE`."""
    return (call.name, call.arguments) == (PROBE.name, PROBE.arguments)


def _is_read(text: str) -> bool:
    """Return True if a rendered conversation ends with `PROBE`, and with no other call."""
    _, _, behind = text.partition("oatuser")
    begin, end = (each(mark) for each, mark in ((behind.find, "{"), (behind.rfind, "}")))
    # a template may write nothing but JSON in the turn, which is known as a call if it stands alone
    return any([*map(is_probe, template_calls(each))] == [True] for each in (behind, behind[begin : end + 1]))
