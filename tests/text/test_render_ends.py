"""Templates that end the last response otherwise than earlier ones, and templates whose prompt begins the
response."""

import warnings

import numpy as np
import pytest
from chats import assistant, save_byte_level, user
from transformers import PreTrainedTokenizerFast

from oat.errors import TemplateError
from oat.oracles.rules.shape import FormatRule, RegexRule
from oat.text.renderer import Renderer
from oat.types import Message

HARMONY = ["<|endoftext|>", "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>"]
RETURNS = (
    "<|start|>system<|message|>You help.<|end|>"
    "{% for m in messages %}{% if m.role == 'assistant' %}<|start|>assistant<|channel|>final<|message|>"
    "{{ m.content }}{% if loop.last and not add_generation_prompt %}<|return|>{% else %}<|end|>{% endif %}"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
"""A template as that of gpt-oss: the token that ends the last response ends no earlier one."""


def rendering(tokenizer: PreTrainedTokenizerFast, template: str) -> Renderer:
    tokenizer.chat_template = template
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Renderer(tokenizer, template="tokenizer")


@pytest.fixture(scope="module")
def harmony(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    return save_byte_level(tmp_path_factory.mktemp("harmony"), specials=HARMONY)


def test_an_earlier_response_ends_as_the_template_ends_it(harmony: PreTrainedTokenizerFast) -> None:
    renderer = rendering(harmony, RETURNS)
    said = [user("hi"), assistant("yes"), user("and?"), assistant("no")]
    ids, mask = renderer.loss_mask(said)
    whole = harmony.apply_chat_template([each.plain for each in said], tokenize=False)
    assert ids.tolist() == harmony(whole)["input_ids"]
    learned = renderer.decode(ids[mask])
    begin = "<|channel|>final<|message|>"
    assert learned == f"{begin}yes{begin}no<|return|>", "the model stops at <|return|> alone"
    _, checked = renderer.recorded(said[:1], [each.plain for each in said[1:]])
    assert checked.tolist() == mask.tolist()


def test_a_sampled_response_is_ended_once(harmony: PreTrainedTokenizerFast) -> None:
    renderer = rendering(harmony, RETURNS)
    prompt = renderer.prompt([user("hi")])
    ended = np.concatenate([prompt, renderer.response("yes", [user("hi")])])
    longer = renderer.decode(renderer.extend(ended, user("and?")))
    assert longer.endswith("yes<|return|><|start|>user<|message|>and?<|end|><|start|>assistant")
    cut = renderer.decode(renderer.extend(ended[:-1], user("and?")))
    assert cut == harmony.apply_chat_template(
        [each.plain for each in (user("hi"), assistant("yes"), user("and?"))],
        tokenize=False,
        add_generation_prompt=True,
    )


@pytest.mark.parametrize("begin", ["<|im_start|>", "<|user|>"])
def test_a_token_that_begins_a_message_is_no_end(
    tmp_path_factory: pytest.TempPathFactory, begin: str
) -> None:
    """Only the last response of this template has an end; what follows an earlier one begins the next."""
    tokenizer = save_byte_level(
        tmp_path_factory.mktemp("begins"), specials=["<|endoftext|>", "<|im_start|>", "<|user|>", "<|bot|>"]
    )
    template = (
        "{% for m in messages %}{{ BEGIN if m.role == 'user' else '<|bot|>' }}{{ m.content }}"
        "{% if loop.last and not add_generation_prompt %}<|endoftext|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|bot|>{% endif %}"
    )
    renderer = rendering(tokenizer, template.replace("BEGIN", repr(begin)))
    ids, _ = renderer.loss_mask([user("hi"), assistant("yes"), user("and?"), assistant("no")])
    assert renderer.decode(ids).startswith(f"{begin}hi<|bot|>yes<|endoftext|>{begin}and?<|bot|>no")


OPENED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
FORM = "<think>...</think> <answer>...</answer>"
RIGHT, WRONG = "hm\n</think>\n<answer>42</answer>", "<think>hm</think><answer>42</answer>"


@pytest.mark.parametrize(
    "rule",
    [
        lambda: FormatRule(template=FORM),
        lambda: FormatRule(pattern="<think>[^<]*</think>\\s*<answer>.*</answer>"),
        lambda: RegexRule("^<think>[^<]*</think>\\s*<answer>"),
        lambda: RegexRule("<think>[^<]*</think>\\s*<answer>.*", match="whole"),
    ],
)
def test_a_tag_that_the_prompt_opens_belongs_to_the_response(
    tokenizer: PreTrainedTokenizerFast, rule
) -> None:
    opening = rendering(tokenizer, OPENED).opening
    opened, plain, closed = rule(), rule(), rule()
    opened.tell_opening(opening)
    plain.tell_opening(None)
    closed.tell_opening(f"{opening}\n</think>\n")
    assert opened.grade(["?"] * 2, [RIGHT, WRONG]) == [1.0, 0.0]
    assert opened.grade([[user("?").plain]], [[assistant(RIGHT).plain]]) == [1.0]
    assert rule().grade(["?"] * 2, [RIGHT, WRONG]) == [0.0, 1.0], "a template that opens nothing"
    assert plain.grade(["Say <think>.", "So: <think>\n"], [WRONG, RIGHT]) == [1.0, 1.0]
    assert closed.grade(["?"] * 2, [RIGHT, WRONG]) == [0.0, 1.0], "the prompt ends the thoughts itself"
    assert opened.version != plain.version


def test_a_form_that_names_no_opened_tag_is_about_the_response(tokenizer: PreTrainedTokenizerFast) -> None:
    own = FormatRule(template="...</think> <answer>...</answer>")
    own.tell_opening(rendering(tokenizer, OPENED).opening)
    assert own.grade(["?"], [RIGHT]) == [1.0]


@pytest.mark.parametrize(
    ("template", "opening"), [("chatml", "<|im_end|>\n<|im_start|>assistant\n"), (None, None)]
)
def test_the_opening_of_a_prompt(
    tokenizer: PreTrainedTokenizerFast, template: str | None, opening: str | None
) -> None:
    assert Renderer(tokenizer, template=template).opening == opening


def test_no_template_can_write_an_assistants_message_behind_a_response(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    with pytest.raises(TemplateError, match="cannot be appended"):
        Renderer(tokenizer, template="chatml").extend(np.array([1]), Message("assistant", "no"))
