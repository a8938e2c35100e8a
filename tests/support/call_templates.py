"""Short chat templates that write calls of tools as the published ones do, one for each form."""

FRAME = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<a>{{ m.content or '' }}"
    "{% if m.tool_calls %}CALLS{% endif %}<e>{% else %}<u>{{ m.content }}<e>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)
"""A template without its calls. `<a>`, `<u>` and `<e>` are special tokens; `<e>` ends a turn."""


def _each(call: str, between: str = "") -> str:
    """Return the part of a template that writes each call; `f` is its function."""
    gap = f"{{% if not loop.last %}}{between}{{% endif %}}"
    return f"{{% for c in m.tool_calls %}}{{% set f = c.function %}}{call}{gap}{{% endfor %}}"


def _pairs(pair: str, between: str = "") -> str:
    """Return the part of a template that writes each argument; `k` is its name and `v` its value."""
    gap = f"{{% if not loop.last %}}{between}{{% endif %}}"
    return f"{{% for k, v in f.arguments.items() %}}{pair}{gap}{{% endfor %}}"


_JSON = '{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}'
_TEXT = '{"name": "{{ f.name }}", "arguments": {{ f.arguments }}}'
_PARAMETERS = '{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}'
_LIST = f"[{_each(_JSON, ', ')}]"
_BARE = "{{ v if v is string else v | tojson }}"
_OLD_BARE = "{{ v | tojson if v is mapping or (v is sequence and v is not string) else v | string }}"
_QUOTED = (
    r"""{% if v is string %}'{{ v | replace("\\", "\\\\") | replace("'", "\\'") | replace("\n", "\\n")"""
    r""" | replace("\r", "\\r") }}'{% elif v is mapping or v is iterable %}{{ v | tojson }}"""
    r"""{% else %}{{ v | string }}{% endif %}"""
)
_UNESCAPED = '{{ v | tojson if v is mapping else "\'" + v + "\'" if v is string else v | string }}'
_BRACES = (
    "{%- macro value(v) -%}{% if v is string %}QQ{{ v }}QQ"
    "{% elif v is boolean %}{{ 'true' if v else 'false' }}"
    "{% elif v is mapping %}{ {%- for k, w in v.items() %}{{ k }}:{{ value(w) }}"
    "{% if not loop.last %},{% endif %}{% endfor -%} }"
    "{% elif v is sequence %}[{% for w in v %}{{ value(w) }}{% if not loop.last %},{% endif %}{% endfor %}]"
    "{% else %}{{ v }}{% endif %}{%- endmacro -%}"
)

CALLS = {
    "hermes": _each(f"\n<tool_call>\n{_JSON}\n</tool_call>"),
    "hermes, arguments first": _each(
        '<tool_call>\n{"arguments": {{ f.arguments | tojson }}, "name": "{{ f.name }}"}\n</tool_call>'
    ),
    "qwen 3": _each(
        '\n<tool_call>\n{"name": "{{ f.name }}", "arguments": '
        "{% if f.arguments is string %}{{ f.arguments }}{% else %}{{ f.arguments | tojson }}{% endif %}}\n"
        "</tool_call>"
    ),
    "whole call": _each("\n<tool_call>\n{{ c | tojson }}\n</tool_call>"),
    "qwen 3 coder": _each(
        "\n<tool_call>\n<function={{ f.name }}>\n"
        + _pairs(f"<parameter={{{{ k }}}}>\n{_OLD_BARE}\n</parameter>\n")
        + "</function>\n</tool_call>"
    ),
    "seed": _each(
        "\n<seed:tool_call>\n<function={{ f.name }}>\n"
        + _pairs(f"<parameter={{{{ k }}}}>{_BARE}</parameter>\n")
        + "</function>\n</seed:tool_call>"
    ),
    "functionary": _each("<function={{ f.name }}>{{ f.arguments | tojson }}</function>"),
    "glm": _each(
        "\n<tool_call>{{ f.name }}\n"
        + _pairs(f"<arg_key>{{{{ k }}}}</arg_key>\n<arg_value>{_BARE}</arg_value>\n")
        + "</tool_call>"
    ),
    "minimax 2": "\n<minimax:tool_call>\n"
    + _each(
        '<invoke name="{{ f.name }}">\n'
        + _pairs(f'<parameter name="{{{{ k }}}}">{_BARE}</parameter>\n')
        + "</invoke>\n"
    )
    + "</minimax:tool_call>",
    "deepseek 3.2": "\n\n<｜DSML｜function_calls>\n"
    + _each(
        '<｜DSML｜invoke name="{{ f.name }}">\n'
        + _pairs(
            '<｜DSML｜parameter name="{{ k }}" string="{{ "true" if v is string else "false" }}">'
            + _BARE
            + "</｜DSML｜parameter>\n"
        )
        + "</｜DSML｜invoke>\n"
    )
    + "</｜DSML｜function_calls>",
    "deepseek 3": "<｜tool▁calls▁begin｜>"
    + _each(
        "{{ '<｜tool▁call▁begin｜>' + c.type + '<｜tool▁sep｜>' + f.name + '\n```json\n' + f.arguments "
        "+ '\n```<｜tool▁call▁end｜>' }}",
        "\n",
    )
    + "<｜tool▁calls▁end｜>",
    "deepseek 3.1": "<｜tool▁calls▁begin｜>"
    + _each("<｜tool▁call▁begin｜>{{ f.name }}<｜tool▁sep｜>{{ f.arguments | tojson }}<｜tool▁call▁end｜>")
    + "<｜tool▁calls▁end｜>",
    "gpt-oss": _each(
        " to=functions.{{ f.name }}<|channel|>commentary json<|message|>{{ f.arguments | tojson }}<|call|>"
    ),
    "mistral": "[TOOL_CALLS] [" + _each('{{ (f | tojson)[:-1] }}, "id": "{{ c.id }}"}', ", ") + "]",
    "mistral 11": _each("[TOOL_CALLS]{{ f.name }}[CALL_ID]{{ c.id }}[ARGS]{{ f.arguments | tojson }}"),
    "devstral": _each("[TOOL_CALLS]{{ f.name }}[ARGS]{{ f.arguments | tojson }}"),
    "kimi": "<|tool_calls_section_begin|>"
    + _each(
        "<|tool_call_begin|>functions.{{ f.name }}:{{ loop.index0 }}<|tool_call_argument_begin|>"
        "{{ f.arguments | tojson }}<|tool_call_end|>"
    )
    + "<|tool_calls_section_end|>",
    "solar": "<|tool_calls|>"
    + _each(
        "<|tool_call:begin|>{{ c.id }}<|tool_call:name|>{{ f.name }}<|tool_call:args|>"
        "{{ f.arguments | tojson }}<|tool_call:end|>"
    )
    + "<|calls|>",
    "phi 4 mini": f"<|tool_call|>{_LIST}<|/tool_call|>",
    "phi 4 mini, text": "<|tool_call|>[" + _each(_TEXT, ",") + "]",
    "functools": f"functools{_LIST}",
    "granite": f"<|tool_call|>{_LIST}",
    "granite 20b": _each(f"<function_call> {_JSON}"),
    "command r7b": "<|START_ACTION|>[\n"
    + _each(
        '    {"tool_call_id": "{{ loop.index0 }}", "tool_name": "{{ f.name }}", "parameters": '
        "{{ f.arguments | tojson }}}",
        ",\n",
    )
    + "\n]<|END_ACTION|>",
    "command r": "\nAction:\n```json\n["
    + _each('{"tool_name": "{{ f.name }}", "parameters": {{ f.arguments | tojson(indent=4) }}}', ",\n")
    + "]```",
    "minimax 1": f"\n<tool_calls>\n{_each(_JSON, chr(10))}\n</tool_calls>",
    "apriel": f"\n<tool_calls>{_LIST}</tool_calls>",
    "nemotron": f"<TOOLCALL>{_LIST}</TOOLCALL>",
    "apertus": "<|tools_prefix|>["
    + _each('{"{{ f.name }}": {{ f.arguments | tojson }}}', ", ")
    + "]<|tools_suffix|>",
    "gigachat": _each(f"<|function_call|>{_JSON}", "\n"),
    "internlm": _each(f"<|action_start|><|plugin|>\n{_PARAMETERS}<|action_end|>\n"),
    "llama 3.1": _each(_PARAMETERS),
    "llama 3.1, ipython": _each(f"<|python_tag|>{_PARAMETERS}"),
    "gemma 4": _BRACES.replace("QQ", '<|"|>')
    + _each(
        "<|tool_call>call:{{ f.name }}{{ '{' }}" + _pairs("{{ k }}:{{ value(v) }}", ",") + "}<tool_call|>"
    ),
    "functiongemma": _BRACES.replace("QQ", "<escape>")
    + _each(
        "<start_function_call>call:{{ f.name }}{{ '{' }}"
        + _pairs("{{ k }}:{{ value(v) }}", ",")
        + "}<end_function_call>"
    ),
    "lfm 2": "<|tool_call_start|>["
    + _each("{{ f.name }}(" + _pairs(f"{{{{ k }}}}={_QUOTED}", ", ") + ")", ", ")
    + "]<|tool_call_end|>",
    "lfm 2.5": "<|tool_call_start|>["
    + _each("{{ f.name }}(" + _pairs(f"{{{{ k }}}}={_UNESCAPED}", ", ") + ")", ", ")
    + "]<|tool_call_end|>",
    "olmo 3": "<function_calls>"
    + _each("{{ f.name }}(" + _pairs("{{ k }}={{ v | tojson }}", ", ") + ")", "{{ '\\n' }}")
    + "</function_calls>",
}
"""What each form writes for the calls of a message, by the name of a family that has it."""

SINGLE = {"llama 3.1"}
"""The forms that write one call only."""


def template(form: str) -> str:
    """Return the chat template of a form."""
    return FRAME.replace("CALLS", CALLS[form])
