"""The forms in which chat templates write calls of tools: functions that read a call behind its opening.

A call is read by its grammar, not up to its closing mark: `</tool_call>` within a string is a part of the
string. Forms in XML write texts without quotes. There a value ends at its closing mark only if another
parameter, or the end of the call, follows. What type it has is unknown (`Written`).

No text is evaluated as code. Literals of Python are read by `ast`.
"""

import ast
import json
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite
from typing import Any

from oat.errors import shown

_WRONG = 'a call is {"name": ..., "arguments": {...}}'
_BLANK = re.compile(r"\s*")
_MOST_CLOSINGS = 4
"""Number of closing marks that may stand in the strings of a call of Python, plus 1."""
_NAMES, ARGUMENTS = ("name", "tool_name", "function"), ("arguments", "parameters")
"""The fields of a call that may name its tool, and those that may hold its arguments."""
BESIDE = frozenset({"id", "type", "index", "tool_call_id"})
"""The fields that may stand beside those. They say nothing that a tool gets."""
_PYTHON_PIECE = re.compile(
    r"""'{3}(?:\\.|[^\\])*?(?:'{3}|\Z)|"{3}(?:\\.|[^\\])*?(?:"{3}|\Z)|'(?:\\.|[^'\\])*+'?|"(?:\\.|[^"\\])*+"?"""
    r"""|(?P<word>[^\s'"()\[\]{},=]++)""",
    re.DOTALL,
)
"""A text of Python, or else a word."""
_WORDS = {"true": True, "false": False, "null": None, "True": True, "False": False, "None": None}


class Written(str):
    """An argument that was written without quotes: a text, or another value as `str` writes it."""

    __slots__ = ()


class WrittenInJson(Written):
    """An argument that was written without quotes: a text, or another value as JSON writes it."""

    __slots__ = ()


@dataclass(frozen=True)
class ToolCall:
    """A call that the model wrote.

    Attributes:
        name: name of the tool; "" if the call could not be read.
        arguments: the arguments by name, or the only argument.
        fault: what is wrong with the call's form; "" if nothing is.
        id: the text by which the opening of the call names it, as Kimi's does; "" if it names none.
    """

    name: str
    arguments: Mapping[str, Any] | str = ""
    fault: str = ""
    id: str = field(default="", compare=False)


Found = tuple[Sequence[ToolCall], int]
"""Calls, and the offset of the text behind them."""
Read = Callable[[str, "re.Match[str]"], Found | None]
"""A function that reads the calls behind an opening. None: there are none, or the first is not closed; then
none of this form follows."""


def json_value(text: str) -> Any:
    """Return the value of JSON. Strings may have line breaks.

    Raises:
        ValueError, RecursionError: it is not JSON, a number is not finite, or an object has a name twice.
    """
    value, end = _DECODER.raw_decode(text, _behind_blank(text, 0))
    if text[end:].strip():
        raise ValueError("more than one value")
    return value


def literal(text: str) -> Any:
    """Return the value of a literal of Python, if JSON could hold it.

    Raises:
        ValueError: it is no such literal.
    """
    return _plain(_syntax(text))


def read_json(text: str, match: "re.Match[str]", *, close: str = "", is_keyed: bool = False) -> Found | None:
    """Read calls in JSON: an object, a list of objects, or several objects.

    Args:
        close: the text that must follow; "": none must.
        is_keyed: True: the only name of an object is the tool's, and its value the arguments.
    """
    at, values = match.end(), []
    while (decoded := _decoded(text, at)) is not None:
        value, at = decoded
        values += value if isinstance(value, list) else [value]
        behind = _behind_blank(text, at)
        at = behind + 1 if text[behind : behind + 1] in (",", ";") else at
    behind = _behind_blank(text, at)
    if at > match.end() and text.startswith(close, behind):
        return [_keyed(value) if is_keyed else _call_of(value) for value in values], behind + len(close)
    wrong = [ToolCall("", fault=f"this is not JSON; {_WRONG}")]
    if not close:
        return wrong, match.end()
    end = text.find(close, match.end())
    return None if end < 0 else (wrong, end + len(close))


def read_closed_by_next(text: str, match: "re.Match[str]", *, read: Read, close: str) -> Found | None:
    """Read calls whose closing mark may be missing, if the same opening follows instead. Models forget the
    mark so.

    Args:
        read: the function that reads calls with their closing mark.
        close: this mark, as a template of `re.Match.expand`.
    """
    found = read(text, match)
    if found is not None and not any(call.fault for call in found[0]):
        return found
    following = match.re.search(text, match.end())
    if following is None:
        return found
    part = text[match.start() : following.start()] + match.expand(close)
    again = match.re.match(part)
    closed = read(part, again) if again is not None else None
    is_whole = closed is not None and closed[1] == len(part) and not any(call.fault for call in closed[0])
    return (closed[0], following.start()) if closed is not None and is_whole else found


def read_bare(text: str, match: "re.Match[str]") -> Found | None:
    """Read a response that is one call in JSON and nothing else."""
    decoded = _decoded(text, 0)
    if decoded is None or text[decoded[1] :].strip() or not isinstance(decoded[0], dict):
        return None
    names = decoded[0].keys()
    is_call = (
        isinstance(decoded[0].get("name"), str)
        and names & {*ARGUMENTS}
        and names <= {"name", "id", "type", *ARGUMENTS}
    )
    return ([_call_of(decoded[0])], len(text)) if is_call else None


def read_named(text: str, match: "re.Match[str]") -> Found | None:
    """Read the arguments, in JSON, of a call whose name is in its opening."""
    decoded, id = _decoded(text, match.end()), match.groupdict().get("id") or ""
    if decoded is None:
        return [ToolCall(match["name"], fault=f"the arguments are no JSON; {_WRONG}", id=id)], match.end()
    return [replace(_with_arguments(match["name"], decoded[0]), id=id)], decoded[1]


def read_function(text: str, match: "re.Match[str]") -> Found | None:
    """Read `<function=name>` with parameters in XML (Qwen3-Coder) or in JSON (Functionary). Seed-OSS's form,
    within `<seed:tool_call>`, has no line breaks around values."""
    at = _behind_blank(text, match.end())
    if text[at : at + 1] in ("{", '"'):
        return read_named(text, match)
    parameter = r"<parameter=(?P<name>[^>\n]++)>"
    return _read_xml(text, match, parameter, "</parameter>", "</function>", strips=not match["seed"])


def read_invoke(text: str, match: "re.Match[str]") -> Found | None:
    """Read `<invoke name="...">` (MiniMax), with a prefix (DeepSeek 3.2) or none."""
    prefix = match["prefix"]
    parameter = (
        rf'<{re.escape(prefix)}parameter name="(?P<name>[^"\n]++)"'
        r'(?: string="(?P<is_text>true|false)")?>'
    )
    closes_value, close = f"</{prefix}parameter>", f"</{prefix}invoke>"
    return _read_xml(text, match, parameter, closes_value, close, written_as=WrittenInJson)


def read_keys(text: str, match: "re.Match[str]") -> Found | None:
    """Read a name, then pairs of `<arg_key>` and `<arg_value>` (GLM)."""
    parameter = r"<arg_key>(?P<name>[^<\n]++)</arg_key>\s*<arg_value>"
    return _read_xml(text, match, parameter, "</arg_value>", "</tool_call>", written_as=WrittenInJson)


def read_python(text: str, match: "re.Match[str]", *, close: str) -> Found | None:
    """Read calls of Python whose arguments are literals by name: in a list, or one in a line.

    Args:
        close: the text that must follow.
    """
    first = end = text.find(close, match.end())
    for _ in range(_MOST_CLOSINGS):
        if end < 0:
            break
        calls = _python_calls(text[match.end() : end])
        if calls is not None:
            return calls, end + len(close)
        end = text.find(close, end + 1)
    wrong = [ToolCall("", fault="this is no list of calls; a call is [name(argument=value)]")]
    return None if first < 0 else (wrong, first + len(close))


def read_braces(text: str, match: "re.Match[str]", *, quote: str, close: str) -> Found | None:
    """Read arguments in braces with names that have no quotes (Gemma).

    Args:
        quote: the text at each end of a string.
        close: the text that must follow.
    """
    end = text.find(close, match.end())
    if end < 0:
        return None
    try:
        arguments, at = _braced(text, match.end(), re.compile(rf"{re.escape(quote)}(?=\s*[,:}}\]])"), quote)
        if isinstance(arguments, dict) and text.startswith(close, at):
            return [ToolCall(match["name"], arguments)], at + len(close)
    except (ValueError, RecursionError):
        pass
    return [ToolCall(match["name"], fault="the arguments cannot be read")], end + len(close)


def _unique(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    listed = [*pairs]
    found = dict(listed)
    return found if len(found) == len(listed) else _refuse("a name twice")


def _refuse(what: str) -> Any:
    raise ValueError(what)


def _finite(digits: str) -> float:
    number = float(digits)
    return number if isfinite(number) else _refuse(digits)


_DECODER = json.JSONDecoder(
    strict=False, object_pairs_hook=_unique, parse_constant=_refuse, parse_float=_finite
)


def _behind_blank(text: str, at: int) -> int:
    found = _BLANK.match(text, at)
    return found.end() if found else at


def _decoded(text: str, at: int) -> tuple[Any, int] | None:
    """Return the JSON object, list or string at an offset, and the offset behind it; None: there is none."""
    at = _behind_blank(text, at)
    if text[at : at + 1] not in ("{", "[", '"'):
        return None
    try:
        return _DECODER.raw_decode(text, at)
    except (ValueError, RecursionError):
        return None


def _call_of(value: Any) -> ToolCall:
    """Return the call that a value of JSON says."""
    if not isinstance(value, dict):
        return ToolCall("", fault=_WRONG)
    function = value.get("function")
    if isinstance(function, dict):
        return _unknown(value, {"function"}) or _call_of(function)
    names, given = ([key for key in keys if key in value] for keys in (_NAMES, ARGUMENTS))
    if len(names) != 1 or not isinstance(value[names[0]], str) or len(given) > 1:
        return ToolCall("", fault=_WRONG)
    name = value[names[0]]
    return _unknown(value, {*names, *given}, name) or _with_arguments(name, value[given[0]] if given else {})


def _unknown(value: Mapping[str, Any], known: set[str], name: str = "") -> ToolCall | None:
    """Return a call that has fields without a meaning, which would be lost; None if it has none."""
    wrong = next((key for key in value if key not in known | BESIDE), None)
    return None if wrong is None else ToolCall(name, fault=f"a call has no field {shown(wrong)}; {_WRONG}")


def _keyed(value: Any) -> ToolCall:
    if not isinstance(value, dict) or len(value) != 1:
        return ToolCall("", fault='a call is {"name": {...}}')
    return _with_arguments(*next(iter(value.items())))


def _with_arguments(name: str, arguments: Any) -> ToolCall:
    """Return a call. Its arguments are an object, the JSON text of one, or nothing: null, a blank text."""
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        arguments = {}
    if isinstance(arguments, str):
        try:
            arguments = json_value(arguments)
        except (ValueError, RecursionError):
            return ToolCall(name, fault=f"the arguments are no JSON; {_WRONG}")
    if not isinstance(arguments, dict):
        return ToolCall(name, fault=f"the arguments are no object; {_WRONG}")
    return ToolCall(name, arguments)


def _read_xml(
    text: str,
    match: "re.Match[str]",
    parameter: str,
    closes_value: str,
    close: str,
    *,
    strips: bool = False,
    written_as: type[Written] = Written,
) -> Found | None:
    """Read a call of which each parameter has an opening and a closing mark.

    Args:
        parameter: pattern of a parameter's opening, with the groups `name` and, if the form says which
            values are texts, `is_text`.
        strips: True: a line break at both ends of a value is no part of it.
    """
    if text.find(close, match.end()) < 0:
        return None
    opening = re.compile(rf"\s*{parameter}")
    # a pattern may name a group only once
    next_one = re.sub(r"\?P<\w+>", "?:", parameter)
    ending = re.compile(rf"{re.escape(closes_value)}(?=\s*(?:{next_one}|{re.escape(close)}))")
    at = match.end()
    arguments: dict[str, Any] = {}
    while (opened := opening.match(text, at)) and opened["name"] not in arguments:
        ended = ending.search(text, opened.end())
        if ended is None:
            break
        written = text[opened.end() : ended.start()]
        if re.search(next_one, written):
            break  # a mark was forgotten, or a text has one
        if strips and len(written) > 1 and written[0] == written[-1] == "\n":
            written = written[1:-1]
        is_text = opened.groupdict().get("is_text") == "true"
        arguments[opened["name"]] = written if is_text else written_as(written)
        at = ended.end()
    at = _behind_blank(text, at)
    if text.startswith(close, at):
        return [ToolCall(match["name"], arguments)], at + len(close)
    wrong = f"a parameter is not closed, or stands twice; close each one, and the call with {close}"
    return [ToolCall(match["name"], fault=wrong)], text.find(close, match.end()) + len(close)


def _python_calls(text: str) -> list[ToolCall] | None:
    """Return the calls of an expression of Python, or of several in lines; None if there are none."""
    written = text.strip()
    if not written.startswith("["):
        # not `splitlines`: a string may have the other separators of lines as they are
        written = "[" + ",".join(line for line in written.split("\n") if line.strip()) + "]"
    try:
        return _listed_calls(written, {})
    except ValueError:
        pass
    # a name need not be one of Python's: `read-file`, `from`
    names: dict[str, str] = {}

    def put(found: "re.Match[str]") -> str:
        is_name = found["word"] and written.startswith(("(", "="), found.end())
        return names.setdefault(found[0], f"oatname{len(names)}") if is_name else found[0]

    try:
        plain = _PYTHON_PIECE.sub(put, written)
        return _listed_calls(plain, {stand_in: name for name, stand_in in names.items()})
    except ValueError:
        return None


def _listed_calls(text: str, names: Mapping[str, str]) -> list[ToolCall]:
    """Return the calls in a list of Python.

    Args:
        names: the names for which others stand in the text.

    Raises:
        ValueError: it is no such list.
    """
    listed = _syntax(text)
    return (
        [_python_call(each, names) for each in listed.elts] if isinstance(listed, ast.List) else _refuse(text)
    )


def _python_call(node: ast.expr, names: Mapping[str, str]) -> ToolCall:
    if not isinstance(node, ast.Call) or node.args or not isinstance(node.func, ast.Name | ast.Attribute):
        raise ValueError("no call with arguments by name")
    pairs = [(each.arg or _refuse("**"), _plain(each.value)) for each in node.keywords]
    name = ast.unparse(node.func)
    return ToolCall(names.get(name, name), _unique((names.get(key, key), value) for key, value in pairs))


def _syntax(text: str) -> ast.expr:
    """Return the syntax of an expression of Python.

    Raises:
        ValueError: it has none.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of backslashes that mean nothing
            return ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError("no expression") from error


def _plain(node: ast.expr) -> Any:
    """Return the value of a literal that JSON could hold; its words too, such as `true`.

    Raises:
        ValueError: it is another expression.
    """
    if isinstance(node, ast.Dict):
        keys = [None if key is None else _plain(key) for key in node.keys]
        if not all(isinstance(key, str) for key in keys):
            raise ValueError("a name that is no text")
        return _unique(zip(map(str, keys), map(_plain, node.values), strict=True))
    if isinstance(node, ast.List):
        return [*map(_plain, node.elts)]
    if isinstance(node, ast.Name) and node.id in _WORDS:
        return _WORDS[node.id]
    try:
        value = ast.literal_eval(node)
    except (SyntaxError, TypeError, RecursionError, MemoryError) as error:
        raise ValueError("no literal") from error
    is_plain = value is None or isinstance(value, str | bool | int)
    return (
        value if is_plain or (isinstance(value, float) and isfinite(value)) else _refuse("no value of JSON")
    )


def _braced(text: str, at: int, ending: "re.Pattern[str]", quote: str) -> tuple[Any, int]:
    """Return the value at an offset, and the offset behind it.

    Args:
        ending: pattern of a quote that ends a string.

    Raises:
        ValueError: there is no value.
    """
    at = _behind_blank(text, at)
    if text.startswith(quote, at):
        begin = at + len(quote)
        ended = ending.search(text, begin)
        return (text[begin : ended.start()], ended.end()) if ended else _refuse("a string without an end")
    if text[at : at + 1] not in ("{", "["):
        word = re.compile(r"[^,:{}\[\]]*").match(text, at)
        assert word is not None, "the pattern matches the empty text"
        return _word(word[0].strip()), word.end()
    is_dict, close = text[at] == "{", "}" if text[at] == "{" else "]"
    at = _behind_blank(text, at + 1)
    pairs: list[tuple[Any, Any]] = []
    while text[at : at + 1] != close:
        key: Any = len(pairs)
        if is_dict:
            key, at = _braced(text, at, ending, quote)
            key = key if isinstance(key, str) else _refuse("a name that is no text")
            at = at + 1 if text[at : at + 1] == ":" else _refuse("a name without a value")
        value, at = _braced(text, at, ending, quote)
        pairs.append((key, value))
        at = _behind_blank(text, at)
        if text[at : at + 1] == ",":
            at = _behind_blank(text, at + 1)
        elif text[at : at + 1] != close:
            raise ValueError("no comma")
    return (_unique(pairs) if is_dict else [value for _, value in pairs]), at + 1


def _word(word: str) -> Any:
    """Return the value of a word without quotes: a number, true, false, null, or else the word."""
    if word in _WORDS:
        return _WORDS[word]
    try:
        return json_value(word)
    except ValueError:
        return word or _refuse("no value")
