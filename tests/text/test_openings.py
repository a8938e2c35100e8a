"""What a prompt has written of its response: rules read it, and recorded responses do not repeat it."""

import re
import warnings
from collections.abc import Callable

import pytest
from chats import assistant, save_byte_level, user
from transformers import PreTrainedTokenizerFast

from oat import wire
from oat.data.fit import Fit
from oat.errors import TemplateError
from oat.oracles.rules.countdown import CountdownRule, countdown
from oat.oracles.rules.shape import FormatRule, RegexRule
from oat.rollout.recorded import RecordedActor
from oat.text.renderer import Renderer
from oat.types import Message, Prompt

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TAGS = {
    "<think>": "</think>",
    "<reasoning>": "</reasoning>",
    "<seed:think>": "</seed:think>",
    "[THINK]": "[/THINK]",
    "◁think▷": "◁/think▷",
    "<|begin_of_thought|>": "<|end_of_thought|>",
    "<|START_THINKING|>": "<|END_THINKING|>",
    "【thoughts】": "【/thoughts】",
}
BEHIND = ("", "\n", "\nOkay, ", " I see:\n\n")
TURN = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
LOOP = "{% for m in messages %}" + TURN + "{% endfor %}"
PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n"
ASKED = [user("What is 12 + 30?")]
WISHED = [Message("system", "be kind /think"), *ASKED]
NO_WISH = [Message("system", "be kind /no_think"), *ASKED]


def always(opened: str, closing: str) -> str:
    return f"{LOOP}{PROMPT}{opened}{{% endif %}}"


def if_wished(opened: str, closing: str) -> str:
    """A template that begins the response where the system message asks for it."""
    return f"{LOOP}{PROMPT}{{% if '/think' in messages[0].content %}}{opened}{{% endif %}}{{% endif %}}"


def unless_unwished(opened: str, closing: str) -> str:
    """A template that begins the response, or ends its thoughts too, as that of Nemotron Nano."""
    tag = opened.split("\n")[0].split(" ")[0]
    return (
        LOOP.replace("{{ m.content }}", "{{ m.content.replace('/no_think', '') }}")
        + f"{PROMPT}{{% if '/no_think' in messages[0].content %}}{tag}{closing}"
        + f"{{% else %}}{opened}{{% endif %}}{{% endif %}}"
    )


def around_all(opened: str, closing: str) -> str:
    """A template that writes empty thoughts before every response without thoughts, earlier ones too."""
    lacks = f"{{% if m.role == 'assistant' and '{closing}' not in m.content %}}"
    wrapped = f"{lacks}{opened}\n{closing}\n\n{{% endif %}}{{{{ m.content }}}}"
    return LOOP.replace("{{ m.content }}", wrapped) + f"{PROMPT}{opened}{{% endif %}}"


def without_flag(opened: str, closing: str) -> str:
    """A template that reads no `add_generation_prompt`."""
    return (
        "{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content }}<|im_end|>{% else %}"
        f"[INST]{{{{ m.content }}}}[/INST]{{% if loop.last %}}{opened}{{% endif %}}"
        "{% endif %}{% endfor %}"
    )


KINDS: dict[Callable[[str, str], str], list[Message]] = {
    always: ASKED,
    if_wished: WISHED,
    unless_unwished: WISHED,
    around_all: ASKED,
    without_flag: ASKED,
}


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory) -> list[PreTrainedTokenizerFast]:
    """Tokenizers to which the tags are plain text, and added tokens."""
    marks = [*TAGS, *TAGS.values()]
    return [
        save_byte_level(tmp_path_factory.mktemp("plain"), specials=SPECIALS),
        save_byte_level(tmp_path_factory.mktemp("added"), specials=SPECIALS, added=marks),
    ]


def rendering(tokenizer: PreTrainedTokenizerFast, template: str, **given) -> Renderer:
    tokenizer.chat_template = template
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Renderer(tokenizer, template="tokenizer", **given)


def rules(tag: str, closing: str) -> list[FormatRule | RegexRule]:
    """Rules of one form, which name the tags in several ways."""
    begin, end = re.escape(tag), re.escape(closing)
    body = "(?s:.*)<answer>(?s:.*)</answer>"
    return [
        FormatRule(template=f"{tag}...{closing} <answer>...</answer>"),
        FormatRule(pattern=f"{begin}(?s:.*){end}{body}"),
        FormatRule(pattern=f"({begin}|<plan>)(?s:.*)({end}|</plan>){body}"),
        RegexRule(f"(?s)^(?:{begin}).*{end}"),
        RegexRule(f"{begin}.*{end}{body}", match="whole"),
    ]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("tag", TAGS)
def test_rules_and_records_take_what_the_own_prompt_has_written(tokenizers, kind, tag: str) -> None:
    closing = TAGS[tag]
    said = f"the cat\n{closing}\n<answer>42</answer>"
    start = ([*KINDS].index(kind) + [*TAGS].index(tag)) % 2
    for number, behind in list(enumerate(BEHIND))[start::2]:
        tokenizer = tokenizers[number // 2]
        renderer = rendering(tokenizer, kind(tag + behind, closing))
        asked = KINDS[kind]
        opening = renderer.opening(asked)
        assert (opening.text, opening.tags) == (tag + behind, (tag,))
        for rule, alone in zip(rules(tag, closing), rules(tag, closing), strict=True):
            rule.tell_opening(renderer.opening)
            prompts = [[message.plain for message in asked]] * 3
            texts = [said, f"{tag}\n{said}", "no"]
            scores = rule.grade(prompts, [[assistant(text).plain] for text in texts])
            assert scores == alone.grade([""] * 3, [tag + behind + text for text in texts])
            assert scores[0] == 1.0
        prompt = renderer.decode(renderer.prompt(asked))
        for written in (said, f"{tag}{behind}{said}", f"{tag}\n{said}"):
            ids, mask = renderer.recorded(asked, written)
            assert renderer.decode(ids).startswith(prompt)
            learned = renderer.decode(ids[mask])
            assert learned.strip().removesuffix("<|im_end|>").removesuffix("<|endoftext|>") == said
            assert renderer.decode(renderer.response(written, asked)) == learned
            record = Prompt(1, 0, tuple(asked), columns={"completion": written}, is_chat=True)
            (group,) = RecordedActor(Fit(renderer), ["completion"]).sample([record], {}, ())
            assert group.trajectories[0].text.strip() == said, "oracles get what is learned"


def test_a_form_may_be_about_the_response_alone(tokenizers) -> None:
    renderer = rendering(tokenizers[1], always("<think>\n", "</think>"))
    rules = [
        FormatRule(template="...</think> <answer>...</answer>"),
        RegexRule(r"^[a-z ]+\n</think>"),
        RegexRule(r"\A[^<]*</think>\s*<answer>42</answer>", match="whole"),
    ]
    for rule in rules:
        rule.tell_opening(renderer.opening)
        assert rule.grade(["?"] * 2, ["hm\n</think>\n<answer>42</answer>", "no"]) == [1.0, 0.0]


def test_an_answer_may_be_opened_by_the_prompt(tokenizers) -> None:
    renderer = rendering(tokenizers[1], always("<answer>", "</answer>"))
    rule, texts = CountdownRule(), ["6 * 4</answer>", "<answer>6 * 4</answer>", "6 * 4"]
    assert rule.grade(["?"] * 3, texts, target=[24] * 3, nums=[[6, 4]] * 3) == [0.0, 1.0, 0.0]
    rule.tell_opening(renderer.opening)
    assert rule.grade(["?"] * 3, texts, target=[24] * 3, nums=[[6, 4]] * 3) == [1.0, 1.0, 0.0]


OWN = "<think>hm</think><answer>42</answer>"
FORM = "<think>...</think> <answer>...</answer>"


@pytest.mark.parametrize(
    ("template", "asked", "text"),
    [
        (None, ASKED, ""),
        (None, [user("So: <think>\n")], "<think>\n"),
        (None, [user("Say <think>.")], ""),
        (None, [user("a <think> b</think>")], ""),
        (None, [user("What is x[0], if a < b and [1]")], ""),
        ("chatml", [user("So: <think>\n")], ""),
        (if_wished("<think>\n", ""), ASKED, ""),
        (unless_unwished("<think>\n", "</think>"), NO_WISH, "<think></think>"),
        (unless_unwished("<think>\n", "</think>"), ASKED, "<think>\n"),
        (always("Let me see.\n<think>", ""), ASKED, "Let me see.\n<think>"),
        (always("Sure: ", ""), ASKED, "Sure: "),
        (LOOP + PROMPT + "{% endif %}", [user("<|im_start|>assistant\n<think>\n")], ""),
        (LOOP + PROMPT + "{% endif %}", [user("oatuser oatassistant")], ""),
    ],
)
def test_what_a_prompt_has_written(tokenizers, template: str | None, asked: list[Message], text: str) -> None:
    tokenizer = tokenizers[0]
    if template in (None, "chatml"):
        renderer = Renderer(tokenizer, template=template)
    else:
        renderer = rendering(tokenizer, template)
    opening = renderer.opening(asked)
    assert opening.text == text
    assert Renderer.of(tokenizer, wire.decode(wire.encode(renderer.definition))).opening(asked) == opening
    rule = FormatRule(template=FORM)
    rule.tell_opening(renderer.opening)
    opens = opening.tags == ("<think>",)
    scores = rule.grade([[message.plain for message in asked]] * 2, [OWN, OWN.removeprefix("<think>")])
    assert scores == ([0.0, 1.0] if opens else [1.0, 0.0])


def test_thoughts_that_the_own_prompt_has_not_opened_need_no_end(tokenizers) -> None:
    renderer = rendering(tokenizers[1], unless_unwished("<think>\n", "</think>"))
    for written in ("42", "<think></think>42", "<think>\n</think>\n42"):
        ids, mask = renderer.recorded(NO_WISH, written)
        assert renderer.decode(ids).count("<think>") == 1
        assert renderer.decode(ids[mask]).strip().startswith("42")
    for tag, closing in TAGS.items():
        opened = rendering(tokenizers[1], if_wished(f"{tag}\n", closing))
        assert opened.decode(opened.response("42", ASKED)).startswith("42")
        with pytest.raises(TemplateError, match=re.escape(f"opens {tag}") + ".*" + re.escape(closing)):
            opened.response("42", WISHED)


def test_a_later_turn_has_an_opening_too(tokenizers) -> None:
    renderer = rendering(tokenizers[1], always("[THINK]", "[/THINK]"))
    said = [user("a"), assistant("[THINK]x[/THINK]b"), user("c"), assistant("[THINK]y[/THINK]d")]
    ids, mask = renderer.loss_mask(said)
    assert renderer.decode(ids).count("[THINK]") == 2
    assert "[THINK]" not in renderer.decode(ids[mask])


@pytest.mark.parametrize("tag", [tag for tag in TAGS if not tag.startswith("<|")])
def test_a_stop_string_that_closes_a_tag_belongs_to_the_text(tokenizers, tag: str) -> None:
    tokenizer, closing = tokenizers[1], TAGS[tag]
    renderer = Renderer(tokenizer, template="chatml", stop=(closing, "\nQ:"))

    def text(written: str) -> str:
        ids = tokenizer(written)["input_ids"]
        found = renderer.text(ids)
        assert renderer.text_ends(ids)[-1] == len(found)
        return found

    assert text(f"a{tag}b{closing}\nc") == f"a{tag}b{closing}"
    assert text(f"a{tag}b\nQ:c{closing}") == f"a{tag}b"
    assert text(f"ab{closing}c") == "ab", "the text opens no such tag"


def test_rules_of_answers_with_a_stop_string(tokenizers) -> None:
    renderer = Renderer(tokenizers[0], template="chatml", stop=("</answer>",))
    written = renderer.text(tokenizers[0]("<think>hm</think><answer>4 * 6</answer>")["input_ids"])
    assert FormatRule(template=FORM).grade(["?"], [written]) == [1.0]
    assert countdown(["?"], [written], target=[24], nums=[[4, 6]]) == [1.0]
