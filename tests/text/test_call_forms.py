"""What a chat template writes for a call of a tool is read back as this call, in every published form."""

import json
from pathlib import Path
from typing import Any

import pytest
from call_templates import CALLS, SINGLE, template
from chats import save_byte_level, write
from hypothesis import given, settings
from hypothesis import strategies as st

from oat.environments.tools import Tools
from oat.errors import TemplateError
from oat.text.calls import bracket_calls, json_calls, template_calls
from oat.text.renderer import Renderer
from oat.types import Message

MARKS = ("</tool_call>", "<tool_call>", "</parameter>", "</function>", "```", "<|call|>", "]", "}", '"', "\\")
MARKS += ("\u2028", "\x85", "\\ufdd0")
NUMERALS = ("00123", "+4915", "1_000", "0x10", "3.10", " 12", "1e5", "NaN")
"""Texts that spell numbers, as no template writes a number."""
ORDINARY = ("it's", "C:\\new\\table\\", "\n\ndef f():\n    pass\n\n", "', b='c", "x\ny", "a, b] (c=1)")
ENDINGS = ('<|"|>,b:<|"|>', "<escape>,b:<escape>", "</parameter>\n<parameter=b>\n", "</parameter></function>")
ENDINGS += ('</parameter>\n<parameter name="b">', "</parameter></invoke>", "</arg_value></tool_call>")
"""Texts that end a text of a form without escapes."""
NAMES = ("get_" * 40, "fs/read", "db:query", "mcp__fs__read-file", "from", "città.é")
MARKS += ("<think>", "</think>", *ORDINARY)
IDS = "callid000, callid001, callid002"
LITERALS = ("null", "3", "True", "[1]", "'")
QUOTES = {"gemma 4": '<|"|>', "functiongemma": "<escape>"}
"""The quotes of forms that have no escape for them."""

WORDS = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0\ufdd0\ufdd1"), max_size=6)
PARTS = WORDS | st.sampled_from([*MARKS, *LITERALS, "\n", " "])
TEXTS = st.lists(PARTS, max_size=4).map("".join)
NUMBERS = st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | NUMBERS | TEXTS,
    lambda part: st.lists(part, max_size=3) | st.dictionaries(st.sampled_from("ab"), part, max_size=2),
    max_leaves=4,
)
ARGUMENTS = st.fixed_dictionaries(
    {"text": TEXTS, "number": st.integers()},
    optional={
        "ratio": NUMBERS,
        "flag": st.booleans(),
        "items": st.lists(VALUES, max_size=3),
        "more": st.dictionaries(st.sampled_from(["a", "ключ"]), VALUES, max_size=2),
        "maybe": st.none() | st.integers(),
    },
)

GOT: list[dict[str, Any]] = []


def note(
    text: str,
    number: int,
    ratio: float = 0.0,
    flag: bool = False,
    items: list[Any] = [],  # noqa: B006
    more: dict[str, Any] = {},  # noqa: B006
    maybe: int | None = 0,
) -> str:
    GOT.append({name: value for name, value in locals().items()})
    return "noted"


DEFAULTS = {"ratio": 0.0, "flag": False, "items": [], "more": {}, "maybe": 0}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("calls")
    return save_byte_level(folder, specials=["<|endoftext|>", "<u>", "<a>", "<e>"])


@pytest.fixture(scope="module")
def renderers(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Renderer]:
    folder = tmp_path_factory.mktemp("templates")
    return {form: Renderer(tokenizer, template=write(folder, template(form))) for form in CALLS}


def called(*arguments: Any, name: str = "note", content: str = "") -> Message:
    calls = [
        {"id": f"callid{number:03}", "type": "function", "function": {"name": name, "arguments": each}}
        for number, each in enumerate(arguments)
    ]
    return Message("assistant", content, {"tool_calls": calls})


def is_told_apart(form: str, text: str) -> bool:
    """Return True if a form writes a text in such a way that its end can be known."""
    if form in QUOTES:
        return QUOTES[form] not in text and "<" not in text
    if form in ("qwen 3 coder", "seed", "glm", "minimax 2", "deepseek 3.2"):
        return "</" not in text.replace("</tool_call>", "")
    return True


def texts_in(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [text for key, part in value.items() for text in (key, *texts_in(part))]
    return [text for part in value for text in texts_in(part)] if isinstance(value, list) else [str(value)]


@pytest.mark.parametrize("form", CALLS)
def test_a_written_call_is_read_back(renderers: dict[str, Renderer], form: str) -> None:
    """Calls are recorded as objects or as OpenAI's JSON text. A template writes them, they become tokens, and
    the tokens a text. The tools are called with the same arguments, of the same types; or the record is
    refused, if the form has no escape for the end of a text."""
    renderer, tools = renderers[form], Tools([note], most_characters=10_000)

    @settings(derandomize=True, deadline=None, max_examples=8)
    @given(st.lists(ARGUMENTS, min_size=1, max_size=1 if form in SINGLE else 2), st.booleans())
    def check(arguments: list[dict[str, Any]], is_text: bool) -> None:
        recorded = [json.dumps(each) if is_text else each for each in arguments]
        try:
            text = renderer.text(renderer.response(called(*recorded)))
        except TemplateError:
            assert not all(is_told_apart(form, text) for text in texts_in(arguments))
            return
        GOT.clear()
        answered = tools.answer(text)
        assert answered is not None, text
        assert answered.message.content == "\n".join(["noted"] * len(arguments)), text
        assert repr(GOT) == repr([in_order({**DEFAULTS, **each}) for each in arguments]), text

    check()


def free(**given: Any) -> str:
    GOT.append(given)
    return "noted"


@pytest.mark.parametrize("form", CALLS)
def test_a_text_stays_this_text(renderers: dict[str, Renderer], form: str) -> None:
    """Texts that spell numbers, have marks of Python, or line breaks at both ends. A text that ends a text of
    the form is read, or its record is refused."""
    tools = Tools([free])
    ordinary = {f"a{place}": text for place, text in enumerate([*NUMERALS, *ORDINARY])}
    for arguments in (ordinary, *({"a": text} for text in ENDINGS)):
        GOT.clear()
        try:
            response = renderers[form].response(called(arguments, name="free"))
        except TemplateError:
            assert not all(is_told_apart(form, text) for text in arguments.values())
            continue
        tools.answer(renderers[form].text(response))
        assert [arguments] == GOT


@pytest.mark.parametrize("form", CALLS)
def test_a_result_says_whose_it_is(renderers: dict[str, Renderer], form: str) -> None:
    """A template that writes a tool's name or the id of a call beside a result gets those of the calls."""
    names = ["note"] if form in SINGLE else ["note", "free", "note"]
    message = called(*[{"text": "x", "number": 3}] * len(names))
    for call, name in zip(message.fields["tool_calls"], names, strict=True):
        call["function"]["name"] = name
    text = renderers[form].text(renderers[form].response(message))
    answered = Tools([note, free]).answer(text)
    assert answered is not None
    ids = {"kimi": "functions.note:0, functions.free:1, functions.note:2", "solar": IDS}.get(form)
    fields = {"name": "note" if form in SINGLE else "note, free"} | ({"tool_call_id": ids} if ids else {})
    assert answered.message.fields == fields
    plain = Tools([note, free], role="user").answer(text)
    assert plain is not None
    assert plain.message.fields == {}


@pytest.mark.parametrize("form", CALLS)
def test_names_are_read(renderers: dict[str, Renderer], form: str) -> None:
    """Names that tools may be given, and names of their arguments, whatever characters they have."""

    def tool(name: str) -> Any:
        def made(**given: str) -> str:
            GOT.append({name: given})
            return "noted"

        made.__name__ = name
        return made

    tools = Tools([*map(tool, NAMES)])
    for names in [[name] for name in NAMES] if form in SINGLE else [NAMES]:
        arguments = {name.replace(":", "$"): "x" for name in names}  # Gemma's form has no escape for a colon
        message = called(*[arguments] * len(names))
        for call, name in zip(message.fields["tool_calls"], names, strict=True):
            call["function"]["name"] = name
        GOT.clear()
        tools.answer(renderers[form].text(renderers[form].response(message)))
        assert [{name: arguments} for name in names] == GOT


@pytest.mark.parametrize("form", [form for form in CALLS if form not in SINGLE])
def test_a_mention_of_a_call_hides_no_call(renderers: dict[str, Renderer], form: str) -> None:
    """What follows an opening may be no call. A call behind it is read as without the mention."""
    text = renderers[form].text(renderers[form].response(called({"text": "a <tool_call> b", "number": 3})))
    calls = template_calls(text)
    assert [call.fault for call in calls] == [""]
    for mention in (
        "<tool_call>",
        "`<tool_call>` or <function=f>",
        "<tool_call>\n<tool_call>",
        "<tool_calls>",
    ):
        assert template_calls(f"I use {mention} now.\n{text}") == calls, mention


@pytest.mark.parametrize("form", [form for form in CALLS if form != "llama 3.1"])
def test_a_call_that_another_opening_closes_is_read_or_told(
    renderers: dict[str, Renderer], form: str
) -> None:
    """Models forget closing marks. Of a call without some of its end, before another call, there is the call
    or an error; and so of the other call. Llama's form is a response of nothing but the call."""
    first, other = (
        renderers[form].text(renderers[form].response(called({"text": text, "number": 4711})))
        for text in ("oatcat", "oatdog")
    )
    end = first.index("4711") + 4
    for cut in {*range(end, len(first), 3), len(first) - 1}:
        calls = template_calls(f"{first[:cut]}\n{other}")
        for text in ("oatcat", "oatdog"):
            assert any(call.fault or text in str(call.arguments) for call in calls), (first[cut:], calls)


THOUGHTS = [
    ("<think>", "</think>"),
    ("<thinking>", "</thinking>"),
    ("[THINK]", "[/THINK]"),
    ("◁think▷", "◁/think▷"),
    ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),
]


@pytest.mark.parametrize("form", CALLS)
def test_a_call_within_thoughts_is_none(renderers: dict[str, Renderer], form: str) -> None:
    """In every form: a call in thoughts is none, wherever they stand and whatever opened them, and the call
    behind them is read. A mark in an argument is a part of it."""
    renderer = renderers[form]
    arguments = {"text": "a", "number": 3}
    written = renderer.text(renderer.response(called(arguments)))
    (call,) = template_calls(written)
    assert call.name == "note"
    is_bare = written.lstrip().startswith("{")
    for begin, end in THOUGHTS[: -1 if is_bare else None]:  # gpt-oss' marks are not beside bare JSON
        thoughts = f"{begin}\nPerhaps {written}? No.\n"
        for text in (
            f"{thoughts}{end}\n\n42",
            thoughts,
            f"{thoughts}{end}{thoughts}{end}",
            f"So: {thoughts}",
        ):
            assert template_calls(text) == [], text
        before = "" if is_bare else "I see. "
        for text in (f"{thoughts}{end}\n{written}", f"{before}{begin}{end}{thoughts}{end}{written}"):
            assert template_calls(text) == [call], text
    opened = f"perhaps {written}? No.\n</think>\n\n"  # the prompt ends in <think>
    assert template_calls(f"{opened}42") == []
    assert template_calls(opened + written) == [call]


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("<think>[f(1)]</think>[f(2)]", ["2"]),
        ("[f(1)]</think>[f(2)]", ["2"]),
        ("[f(1)]<think>[f(2)]</think>3", ["1"]),
        ("[f(<think>)][f(2)]", ["<think>", "2"]),
        ("[f(</think>)]", ["</think>"]),
        ("[f(1)]<think>[f(2)]", ["1"]),
        ("<think>[f(1)]", []),
    ],
)
def test_thoughts_in_brackets(text: str, read: list[str]) -> None:
    assert [call.arguments for call in bracket_calls(text)] == read


def in_order(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: arguments[name] for name in ("text", "number", *DEFAULTS)}


@pytest.mark.parametrize("form", CALLS)
def test_the_two_forms_of_recorded_arguments_are_learned_alike(
    renderers: dict[str, Renderer], form: str
) -> None:
    arguments = {"text": 'a "b"\n</tool_call>', "number": 3}
    response = renderers[form].response
    assert response(called(arguments)).tolist() == response(called(json.dumps(arguments))).tolist()
    nothing = [response(called(each)).tolist() for each in ({}, "", "{}", None)]
    assert nothing == nothing[:1] * 4
    named = called({})
    named.fields["tool_calls"][0]["function"] = {"name": "note", "parameters": arguments}
    assert response(named).tolist() == response(called(arguments)).tolist()


@pytest.mark.parametrize(
    "function",
    [
        {"name": "note", "input": {"text": "a"}},
        {"name": "note", "args": {"text": "a"}},
        {"name": "note", "text": "a"},
        {"name": "note", "arguments": {}, "parameters": {"text": "a"}},
        {"name": "note", "arguments": {}, "input": {"text": "a"}},
        {"name": "note", "function": {"name": "note", "arguments": {"text": "a"}}},
        {"name": "", "arguments": {}},
        {"name": 3, "arguments": {}},
        {"arguments": {"text": "a"}},
        {"tool": "note", "arguments": {"text": "a"}},
        {},
        "note",
        None,
    ],
)
def test_a_recorded_call_has_the_known_fields(renderers: dict[str, Renderer], function: Any) -> None:
    """What a call says under other names would be learned as a call without it."""
    for call in (function, {"type": "function", "function": function}):
        with pytest.raises(TemplateError, match="a call of `tool_calls` is"):
            renderers["hermes"].response(Message("assistant", "", {"tool_calls": [call]}))


@pytest.mark.parametrize("form", CALLS)
def test_arguments_that_are_no_object_are_refused(renderers: dict[str, Renderer], form: str) -> None:
    """A template that takes objects would write another text as a text within JSON."""
    wrong_texts = ("[1]", "3", "{", '{"a": 1, "a": 2}', '{"a": NaN}', '{"a": 1e999}', "x")
    for wrong in ([1], 3, *wrong_texts):
        with pytest.raises(TemplateError, match="a call of 'note' has the arguments"):
            renderers[form].response(called(wrong))


def test_calls_that_a_template_leaves_out_are_refused(tokenizer: Any, tmp_path: Path) -> None:
    first = template("hermes").replace("for c in m.tool_calls", "for c in m.tool_calls[:1]")
    renderer = Renderer(tokenizer, template=write(tmp_path, first))
    assert "note" in renderer.text(renderer.response(called({})))
    with pytest.raises(TemplateError, match="leaves out a call of 'note'"):
        renderer.response(called({}, {}))
    for said in ("a", "note that a note is a note"):
        with pytest.raises(TemplateError, match="leaves out a call of 'note'"):
            renderer.prompt([Message("user", said), called({}, {}), Message("tool", "b")])


def test_a_template_that_writes_the_id_for_the_name(tokenizer: Any, tmp_path: Path) -> None:
    """Kimi K2's template writes the `id` of a call alone. An id that has no name loses the name."""
    source = template("kimi").replace("functions.{{ f.name }}:{{ loop.index0 }}", "{{ c.id }}")
    assert "c.id" in source
    renderer = Renderer(tokenizer, template=write(tmp_path, source))
    message = called({})
    with pytest.raises(TemplateError, match="Some write a call's `id`"):
        renderer.prompt([Message("user", "note"), message, Message("tool", "b")])
    message.fields["tool_calls"][0]["id"] = "functions.note:0"
    assert len(renderer.prompt([Message("user", "note"), message, Message("tool", "b")]))


def test_a_template_that_names_calls_and_writes_none(tokenizer: Any, tmp_path: Path) -> None:
    """DeepSeek R1's template writes calls beside a content that is null, which transformers makes a text."""
    source = template("deepseek 3").replace("if m.tool_calls", "if m.tool_calls and m.content is none")
    renderer = Renderer(tokenizer, template=write(tmp_path, source))
    with pytest.raises(TemplateError, match="leaves out a call of 'note'"):
        renderer.response(called({}, content="Let me see."))


def test_calls_that_are_no_list_are_refused(renderers: dict[str, Renderer]) -> None:
    with pytest.raises(TemplateError, match=r"`tool_calls` is '\[\]'"):
        renderers["hermes"].response(Message("assistant", "a", {"tool_calls": "[]"}))


@pytest.mark.parametrize(
    ("text", "read"),
    [
        # what models write around calls
        ('<think>\nI call.\n</think>\n\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\n', {}),
        ('<tool_call>{"name": "f", "arguments": {"a": "</tool_call>"}}</tool_call>', {"a": "</tool_call>"}),
        ('<tool_call>{"name": "f", "arguments": {"a": "x\ny"}}</tool_call>', {"a": "x\ny"}),
        ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', {"a": 1}),
        ('<tool_call>{"name": "f", "arguments": null}</tool_call>', {}),
        ('<tool_call>{"name": "f", "parameters": {"a": "\\u00e9\\"{"}}</tool_call>', {"a": 'é"{'}),
        ('<tool_call>{"type": "function", "function": {"name": "f", "arguments": {}}}</tool_call>', {}),
        ('<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.f '
         '<|constrain|>json<|message|>{"a": 1}', {"a": 1}),
        ("<tool_call>\n<function=f>\n<parameter=a>\nx </parameter> y\n</parameter>\n</function></tool_call>",
         {"a": "x </parameter> y"}),
        ("<tool_call>\n<function=f>\n</function>\n</tool_call>", {}),
        ("<tool_call>f</tool_call>", {}),
        ('{"name": "f", "parameters": {"a": 1}}', {"a": 1}),
        (' {"type": "function", "name": "f", "parameters": {}}\n', {}),
        ("Plan\nAction:```json\n[{\"tool_name\": \"f\", \"parameters\": {}}]\n```", {}),
        ("<|tool_call_start|>[f(a='<|tool_call_end|>')]<|tool_call_end|>", {"a": "<|tool_call_end|>"}),
        ("<function_calls>f(a=True)</function_calls>", {"a": True}),
        ('<|tool_call>call:f{a:<|"|>x, y: {z}<|"|>,b:[1,{c:null}]}<tool_call|>',
         {"a": "x, y: {z}", "b": [1, {"c": None}]}),
        ('<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n<tool_call>', {"a": 1}),
        # what must not be taken for a call
        ('The answer is {"name": "f", "arguments": {}}', None),
        ('{"name": "f", "arguments": {}} is the call', None),
        ('{"name": "f"}', None),
        ('{"name": "f", "arguments": {}, "score": 1}', None),
        ('[{"name": "f", "arguments": {}}]', None),
        ("[f(a=1)]", None),
        ('[TOOL_CALLS]f{"a": 1}', {"a": 1}),
        ("<function=f>", None),
        ("<function=f><parameter=a>1", None),
        ("<tool_call>f<arg_key>a</arg_key>", None),
        ('<invoke name="f">', None),
        ("<|tool_call_start|>[f(", None),
        ("<|tool_call>call:f{a:1", None),
    ],
)  # fmt: skip
def test_what_a_model_writes(text: str, read: dict[str, Any] | None) -> None:
    calls = template_calls(text)
    assert [(call.name, dict(call.arguments), call.fault) for call in calls if call.arguments != ""] == (
        [] if read is None else [("f", read, "")]
    )
    assert len(calls) == (read is not None)


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name": "f", "arguments": {"a": 1,}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": 1, "a": 2}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": 1e999}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {}} and</tool_call>',
        '<tool_call>{"name": "f", "arguments": "a"}</tool_call>',
        '<tool_call>{"name": "f", "arguments": []}</tool_call>',
        "<tool_call>{'name': 'f'}</tool_call>",
        "<function=f><parameter=a>1</parameter><parameter=a>2</parameter></function>",
        "<function=f>\n<parameter=a>\n1\n<parameter=b>\n2\n</parameter>\n</function>",
        '<invoke name="f"><parameter name="a">1<parameter name="b">2</parameter></invoke>',
        "<function=f>x</function>",
        "<function=f>{x}</function>",
        "<|tool_call_start|>[f(1)]<|tool_call_end|>",
        "<|tool_call_start|>[f(a=b)]<|tool_call_end|>",
        "<|tool_call_start|>[f(a=open('x'))]<|tool_call_end|>",
        "<|tool_call_start|>[f(**{'a': 1})]<|tool_call_end|>",
        "<|tool_call_start|>[f(a=1e999)]<|tool_call_end|>",
        "<|tool_call_start|>f<|tool_call_end|>",
        "<|tool_call>call:f{a}<tool_call|>",
        "<|tool_call>call:f{a:1 b:2}<tool_call|>",
        "[TOOL_CALLS]f[ARGS]x",
        "[TOOL_CALLS][1]",
        # what the tool would not get
        '<tool_call>{"name": "f", "input": {"a": 1}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {}, "args": {"a": 1}}</tool_call>',
        '<tool_call>{"name": "f", "a": 1}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {}, "parameters": {"a": 1}}</tool_call>',
        '<tool_call>{"type": "function", "function": {"name": "f", "input": {}}}</tool_call>',
        '<tool_call>{"function": {"name": "f"}, "arguments": {"a": 1}}</tool_call>',
        '<tool_call>{"name": "f", "function": "g"}</tool_call>',
        '{"name": "f", "arguments": {}, "parameters": {"a": 1}}',
    ],
)
def test_a_call_that_cannot_be_read_says_so(text: str) -> None:
    (call,) = template_calls(text)
    assert call.fault


def test_json_calls_reads_its_own_form_alone() -> None:
    own, other = '<tool_call>{"name": "f"}</tool_call>', '{"name": "f", "arguments": {}}'
    assert [call.name for call in json_calls(own + "[TOOL_CALLS]f[ARGS]{}")] == ["f"]
    assert json_calls(other) == []
    assert [call.fault != "" for call in json_calls("<tool_call>f</tool_call>")] == [True]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("mention <tool_call>. <think>perhaps {} no</think> 42", []),
        ("mention <tool_call>. <think>perhaps {} no</think> {}", ["f"]),
        ('<tool_call>{{"a": "<think>}}</tool_call>', [""]),
        ("{}<think>{}", ["f"]),
        ('hm <tool_call>{{"name": "g", "arguments": {{"a": "</think>"}}}}</tool_call> </think>{}', ["f"]),
    ],
)
def test_thoughts_beside_calls_that_cannot_be_read(text: str, names: list[str]) -> None:
    call = '<tool_call>{"name": "f"}</tool_call>'
    for read in (template_calls, json_calls):
        assert [each.name for each in read(text.format(call, call))] == names


def test_several_forms_are_read_in_the_order_of_the_text() -> None:
    text = '<function=b>{}</function> <tool_call>{"name": "a"}</tool_call> [TOOL_CALLS]c[ARGS]{}'
    assert [call.name for call in template_calls(text)] == ["b", "a", "c"]
