"""Calls of tools, read from the text of a response.

`template_calls` reads the forms in which published chat templates write calls; each row of `_FORMS` is one.
`json_calls` reads the first of them alone, and `bracket_calls` reads `[calculator(3*4)]`.
"""

import re
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice

from oat.text.call_forms import (
    Read,
    ToolCall,
    read_bare,
    read_braces,
    read_function,
    read_invoke,
    read_json,
    read_keys,
    read_named,
    read_python,
)

_BRACKET = re.compile(r"\[(\w++)\(([^\[\]]*)\)\]")
_NAME = r"(?P<name>[\w.\-]++)"
_KIMI = re.escape("<|tool_call_argument_begin|>")
_HERMES = partial(read_json, close="</tool_call>")
_GEMMA = partial(read_braces, quote='<|"|>', close="<tool_call|>")
_FUNCTION_GEMMA = partial(read_braces, quote="<escape>", close="<end_function_call>")

_CLOSING = re.compile(r"\s*(?:</\w+>)?")
"""What may stand between the end of a call and the end of a longer text that could not be read as one."""
_MOST = 1000
"""Largest number of calls that are read in a response, and of openings."""

_Form = tuple["re.Pattern[str]", Read]
"""The pattern that opens a call, and the function that reads the call behind it."""


def _form(opening: str, read: Read) -> _Form:
    return re.compile(opening), read


_FORMS = (
    # GLM 4.5, then Hermes, Qwen 2.5 and 3, SmolLM 3, Granite 4
    _form(rf"<tool_call>\s*{_NAME}\s*(?=<arg_key>|</tool_call>)", read_keys),
    _form(r"<tool_call>(?!\s*<function=)", _HERMES),
    # Qwen3-Coder, Qwen 3.5, Nemotron 3, Seed-OSS; with JSON: Functionary 3.1
    _form(rf"<function={_NAME}>", read_function),
    # MiniMax 2; with a prefix: DeepSeek 3.2
    _form(rf'<(?P<prefix>[\w｜:]{{0,16}})invoke name="{_NAME}">', read_invoke),
    # DeepSeek 3 and R1, then 3.1
    _form(rf"<｜tool▁call▁begin｜>\w+<｜tool▁sep｜>{_NAME}\s*```json\b", read_named),
    _form(rf'<｜tool▁call▁begin｜>{_NAME}<｜tool▁sep｜>(?=\s*[{{"])', read_named),
    # gpt-oss
    _form(rf"to=functions\.{_NAME}(?:(?!<\|message\|>)[^{{}}]){{0,80}}+<\|message\|>", read_named),
    # Mistral, before and since tokenizer 11
    _form(r"\[TOOL_CALLS\](?=\s*[\[{])", read_json),
    _form(rf"\[TOOL_CALLS\]\s*{_NAME}(?:\[CALL_ID\]\w*)?\[ARGS\]", read_named),
    # Kimi K2, then Solar
    _form(rf"<\|tool_call_begin\|>\s*(?:functions\.)?{_NAME}(?::\d+)?\s*{_KIMI}", read_named),
    _form(rf"<\|tool_call:name\|>{_NAME}<\|tool_call:args\|>", read_named),
    # Phi 4 mini and Granite 3, then earlier ones
    _form(r"<\|tool_call\|>", read_json),
    _form(r"<function_call>", read_json),
    _form(r"functools(?=\[)", read_json),
    # Command R 7B and A, then Command R and R+
    _form(r"<\|START_ACTION\|>", read_json),
    _form(r"Action:\s*```json\b", partial(read_json, close="```")),
    # MiniMax 1, Apriel, Hunyuan, then Nemotron Nano 2, Apertus, GigaChat and InternLM 2
    _form(r"<tool_calls>", partial(read_json, close="</tool_calls>")),
    _form(r"<TOOLCALL>", partial(read_json, close="</TOOLCALL>")),
    _form(r"<\|tools_prefix\|>", partial(read_json, close="<|tools_suffix|>", is_keyed=True)),
    _form(r"<\|function_call\|>|function call<\|role_sep\|>", read_json),
    _form(r"<\|action_start\|>(?:<\|plugin\|>)?", read_json),
    # Gemma 4, then FunctionGemma
    _form(rf"<\|tool_call>call:{_NAME}(?={{)", _GEMMA),
    _form(rf"<start_function_call>call:{_NAME}(?={{)", _FUNCTION_GEMMA),
    # LFM 2, then Olmo 3
    _form(r"<\|tool_call_start\|>", partial(read_python, close="<|tool_call_end|>")),
    _form(r"<function_calls>(?!\s*<)", partial(read_python, close="</function_calls>")),
    # Llama 3.1 and later, with a builtin environment and without
    _form(r"<\|python_tag\|>(?=\s*\{)", read_json),
    _form(r"\A\s*(?=\{)", read_bare),
)


def template_calls(response: str) -> list[ToolCall]:
    """Return the calls in a response, in any form in which a published chat template writes them. A call that
    is not closed is none."""
    return [*islice(_calls(response, _FORMS), _MOST)]


def json_calls(response: str) -> list[ToolCall]:
    """Return the calls between `<tool_call>` and `</tool_call>`, each a JSON object with `name` and
    `arguments`. A call that is not closed is none."""
    return [*islice(_calls(response, [_form("<tool_call>", _HERMES)]), _MOST)]


def bracket_calls(response: str) -> list[ToolCall]:
    """Return the calls of the form `[name(text)]`. The text has no brackets."""
    return [ToolCall(match[1], match[2]) for match in _BRACKET.finditer(response)]


def _calls(text: str, forms: Sequence[_Form]) -> Iterator[ToolCall]:
    """Yield the calls in the given forms, in the order of the text. A form of which a call is not closed is
    sought no further, and at most `_MOST` openings are read. So the time is linear in the length of the
    text."""
    at = 0
    opened = [(opening.search(text), opening, read) for opening, read in forms]
    unread: tuple[Sequence[ToolCall], int] | None = None
    for _ in range(_MOST):
        opened = [
            (opening.search(text, at) if match is not None and match.start() < at else match, opening, read)
            for match, opening, read in opened
        ]
        opened = [each for each in opened if each[0] is not None]
        first = min(opened, key=lambda each: each[0].start() if each[0] is not None else 0, default=None)
        match = first[0] if first is not None else None
        if unread is not None and (match is None or match.start() >= unread[1]):
            # no call stands within what could not be read
            yield from unread[0]
            at, unread = unread[1], None
            continue
        if first is None or match is None:
            return
        found = first[2](text, match)
        if found is None:
            opened.remove(first)
            continue
        calls, end = found
        is_read = not any(call.fault for call in calls)
        if unread is None and is_read:
            yield from calls
            at = end
        elif unread is None:
            unread, at = found, match.end()
        elif is_read and (end > unread[1] or _CLOSING.fullmatch(text, end, unread[1])):
            # what could not be read only mentions the opening of a call
            yield from calls
            at, unread = max(end, unread[1]), None
        else:
            at = match.end()
    if unread is not None:
        yield from unread[0]
