"""Calls of tools, read from the text of a response.

`template_calls` reads the forms in which published chat templates write calls; each row of `_FORMS` is one.
`json_calls` reads the first of them alone, and `bracket_calls` reads `[calculator(3*4)]`.

Thoughts, as between `<think>` and `</think>`, have no calls: a model tells there what it might call. Servers
that read calls (vLLM, SGLang) leave thoughts out first, too. A mark within a string of a call is a part of
the string.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice

from oat.text.call_forms import (
    Found,
    Read,
    ToolCall,
    read_bare,
    read_braces,
    read_closed_by_next,
    read_function,
    read_invoke,
    read_json,
    read_keys,
    read_named,
    read_python,
)

_NAME = r"""(?P<name>[^\s<>()\[\]{}"'`=,;|]++)"""
_KIMI_NAME = _NAME.replace("]++", "]+?")  # the name may have a colon, and `:0` is no part of it
_SOLAR_ID = r"(?:<\|tool_call:begin\|>(?P<id>[^\s<>|]{1,64}))?"
_KIMI = re.escape("<|tool_call_argument_begin|>")

_THOUGHTS = {
    **{f"<{name}>": f"</{name}>" for name in ("think", "thinking", "thought", "reasoning", "seed:think")},
    "[THINK]": "[/THINK]",
    "◁think▷": "◁/think▷",
    "<|begin_of_thought|>": "<|end_of_thought|>",
    "<|START_THINKING|>": "<|END_THINKING|>",
    "<|inner_prefix|>": "<|inner_suffix|>",
    "<|channel>thought": "<channel|>",
    "<|channel|>analysis<|message|>": "<|start|>",
}
"""The marks between which thoughts stand: those of most models, then those of Magistral, Kimi VL,
OpenThinker, Command A Reasoning, Apertus, Gemma 4, and gpt-oss."""
_BEGINS = re.compile("|".join(map(re.escape, _THOUGHTS)))
_LEADING = re.compile(rf"\s*+(?P<mark>{_BEGINS.pattern})")
_ENDS = re.compile("|".join(map(re.escape, [*_THOUGHTS.values()][:-2])))
"""A mark that ends thoughts and nothing else."""
_BEGUN = re.compile(r"\s*(?:[{\[\"]|<\S{0,16}(?:parameter|arg_key)\b|[\w.\-]{1,64}\()")
"""What stands behind the opening of a call, and not behind a mention of it."""
_CLOSING = re.compile(r"\s*(?:</\w+>)?")
"""What may stand between the end of a call and the end of a longer text that could not be read as one."""
_MOST = 1000
"""Largest number of calls that are read in a response, and of openings."""

_Form = tuple["re.Pattern[str]", Read]
"""The pattern that opens a call, and the function that reads the call behind it."""


def _form(opening: str, read: Read, close: str = "") -> _Form:
    """Return a form.

    Args:
        close: the closing mark that `read` needs; it may name groups of the opening, such as `\\g<prefix>`.
            "": none.
    """
    return re.compile(opening), partial(read_closed_by_next, read=read, close=close) if close else read


def _closed(opening: str, read: Callable[..., Found | None], close: str) -> _Form:
    """Return the form of a function that takes its closing mark."""
    return _form(opening, partial(read, close=close), close)


_FORMS = (
    # GLM 4.5, then Hermes, Qwen 2.5 and 3, SmolLM 3, Granite 4
    _form(rf"<tool_call>\s*{_NAME}\s*(?=<arg_key>|</tool_call>)", read_keys, "</tool_call>"),
    _closed(r"<tool_call>(?!\s*<function=)", read_json, "</tool_call>"),
    # Qwen3-Coder, Qwen 3.5, Nemotron 3, Seed-OSS; with JSON: Functionary 3.1
    _form(rf"(?P<seed><seed:tool_call>\s*+)?<function={_NAME}>", read_function, "</function>"),
    # MiniMax 2; with a prefix: DeepSeek 3.2
    _form(rf'<(?P<prefix>[\w｜:]{{0,16}})invoke name="{_NAME}">', read_invoke, r"</\g<prefix>invoke>"),
    # DeepSeek 3 and R1, then 3.1
    _form(rf"<｜tool▁call▁begin｜>\w+<｜tool▁sep｜>{_NAME}\s*```json\b", read_named),
    _form(rf'<｜tool▁call▁begin｜>{_NAME}<｜tool▁sep｜>(?=\s*[{{"])', read_named),
    # gpt-oss
    _form(rf"to=functions\.{_NAME}(?:(?!<\|message\|>)[^{{}}]){{0,80}}+<\|message\|>", read_named),
    # Mistral, before and since tokenizer 11
    _form(r"\[TOOL_CALLS\](?=\s*[\[{])", read_json),
    _form(rf"\[TOOL_CALLS\]\s*{_NAME}(?:\[CALL_ID\]\w*)?(?:\[ARGS\]|(?=\s*\{{))", read_named),
    # Kimi K2, then Solar
    _form(rf"<\|tool_call_begin\|>\s*(?P<id>(?:functions\.)?{_KIMI_NAME}(?::\d+)?)\s*{_KIMI}", read_named),
    _form(rf"{_SOLAR_ID}<\|tool_call:name\|>{_NAME}<\|tool_call:args\|>", read_named),
    # Phi 4 mini and Granite 3, then earlier ones
    _form(r"<\|tool_call\|>", read_json),
    _form(r"<function_call>", read_json),
    _form(r"functools(?=\[)", read_json),
    # Command R 7B and A, then Command R and R+
    _form(r"<\|START_ACTION\|>", read_json),
    _closed(r"Action:\s*```json\b", read_json, "```"),
    # MiniMax 1, Apriel, Hunyuan, then Nemotron Nano 2, Apertus, GigaChat and InternLM 2
    _closed(r"<tool_calls>", read_json, "</tool_calls>"),
    _closed(r"<TOOLCALL>", read_json, "</TOOLCALL>"),
    _closed(r"<\|tools_prefix\|>", partial(read_json, is_keyed=True), "<|tools_suffix|>"),
    _form(r"<\|function_call\|>|function call<\|role_sep\|>", read_json),
    _form(r"<\|action_start\|>(?:<\|plugin\|>)?", read_json),
    # Gemma 4, then FunctionGemma
    _closed(rf"<\|tool_call>call:{_NAME}(?={{)", partial(read_braces, quote='<|"|>'), "<tool_call|>"),
    _closed(
        rf"<start_function_call>call:{_NAME}(?={{)",
        partial(read_braces, quote="<escape>"),
        "<end_function_call>",
    ),
    # LFM 2, then Olmo 3
    _closed(r"<\|tool_call_start\|>", read_python, "<|tool_call_end|>"),
    _closed(r"<function_calls>(?!\s*<)", read_python, "</function_calls>"),
    # Llama 3.1 and later, with a builtin environment and without
    _form(r"<\|python_tag\|>(?=\s*\{)", read_json),
    _form(r"\A\s*(?=\{)", read_bare),
)


def _read_thoughts(text: str, match: "re.Match[str]") -> Found | None:
    """Read thoughts, which have no calls."""
    close = _THOUGHTS[match[0]]
    end = text.find(close, match.end())
    return ((), end + len(close)) if end >= 0 else None


def _bracket(text: str, match: "re.Match[str]") -> Found:
    return [ToolCall(match["name"], match["text"])], match.end()


_THOUGHT_FORMS = [_form(re.escape(mark), _read_thoughts) for mark in _THOUGHTS]
_HERMES_FORM = (_closed("<tool_call>", read_json, "</tool_call>"),)
_BRACKET_FORM = (_form(r"\[(?P<name>\w++)\((?P<text>[^\[\]]*)\)\]", _bracket),)


def template_calls(response: str) -> list[ToolCall]:
    """Return the calls in a response, in any form in which a published chat template writes them. A call that
    is not closed is none, unless another opening follows it; and neither is one within thoughts."""
    return _calls(response, _FORMS)


def json_calls(response: str) -> list[ToolCall]:
    """Return the calls between `<tool_call>` and `</tool_call>`, each a JSON object with `name` and
    `arguments`. A call that is not closed is none, unless another opening follows it; and neither is one
    within thoughts."""
    return _calls(response, _HERMES_FORM)


def bracket_calls(response: str) -> list[ToolCall]:
    """Return the calls of the form `[name(text)]`. The text has no brackets. A call within thoughts is
    none."""
    return _calls(response, _BRACKET_FORM)


def _calls(response: str, forms: Sequence[_Form]) -> list[ToolCall]:
    """Return the calls in the given forms, in the order of the text, that do not stand within thoughts."""
    text = response[_behind_thoughts(response, forms) :]
    found = [*_spans(text, forms)]
    end = _unclosed(text, [place for _, place in found])
    return [*islice((call for calls, place in found if place.start < end for call in calls), _MOST)]


def _behind_thoughts(text: str, forms: Sequence[_Form]) -> int:
    """Return the offset of a response behind the thoughts at its beginning. The prompt may have opened them:
    then the first mark that is not within a call ends them."""
    begins, ends, at = _BEGINS.search(text), _ENDS.search(text), 0
    if ends is not None and (begins is None or ends.start() < begins.start()):
        read = [place for calls, place in _spans(text, forms) if not any(call.fault for call in calls)]
        while ends is not None and at == 0:
            around = next((place for place in read if ends.start() in place), None)
            if around is None:
                at = ends.end()
            else:
                ends = _ENDS.search(text, around.stop)
    while (leading := _LEADING.match(text, at)) is not None:
        end = text.find(_THOUGHTS[leading["mark"]], leading.end())
        if end < 0:
            return len(text)
        at = end + len(_THOUGHTS[leading["mark"]])
    return at


def _unclosed(text: str, places: Sequence[range]) -> int:
    """Return the offset of the first thoughts in a text that are not closed; its length if there are none.

    Args:
        places: where calls stand, in order. A mark within a call is a part of the call.
    """
    last = {mark: text.rfind(close) for mark, close in _THOUGHTS.items()}
    at = 0
    for place in [*places, range(len(text), len(text))]:
        for match in _BEGINS.finditer(text, at, place.start):
            if last[match[0]] < match.end():
                return match.start()
        at = place.stop
    return len(text)


def _spans(text: str, forms: Sequence[_Form]) -> Iterator[tuple[Sequence[ToolCall], range]]:
    """Yield the calls in the given forms, and the range of the text in which they stand. Closed thoughts are
    a range without calls. A form of which a call is not closed is sought no further, and at most `_MOST`
    openings are read. So the time is linear in the length of the text."""
    at = 0
    opened = [(opening.search(text), opening, read) for opening, read in [*forms, *_THOUGHT_FORMS]]
    unread: tuple[Sequence[ToolCall], range] | None = None
    is_begun = False
    for _ in range(_MOST):
        opened = [
            (opening.search(text, at) if match is not None and match.start() < at else match, opening, read)
            for match, opening, read in opened
        ]
        opened = [each for each in opened if each[0] is not None]
        first = min(opened, key=lambda each: each[0].start() if each[0] is not None else 0, default=None)
        match = first[0] if first is not None else None
        if unread is not None and (match is None or match.start() >= unread[1].stop):
            # no call stands within what could not be read
            yield unread
            at, unread = unread[1].stop, None
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
            yield calls, range(match.start(), end)
            at = end
        elif unread is None:
            unread, at = (calls, range(match.start(), end)), match.end()
            is_begun = _BEGUN.match(text, at) is not None
        elif is_read and (end > unread[1].stop or _CLOSING.fullmatch(text, end, unread[1].stop)):
            if is_begun:
                yield unread[0], range(unread[1].start, match.start())
            # otherwise, what could not be read only mentions the opening of a call
            yield calls, range(match.start(), end)
            at, unread = max(end, unread[1].stop), None
        else:
            at = match.end() if calls else end
    if unread is not None:
        yield unread
