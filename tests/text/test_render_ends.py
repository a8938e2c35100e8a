"""Templates that end the last response otherwise than earlier ones."""

import warnings

import numpy as np
import pytest
from chats import assistant, save_byte_level, user
from transformers import PreTrainedTokenizerFast

from oat.errors import TemplateError
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


def test_no_template_can_write_an_assistants_message_behind_a_response(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    with pytest.raises(TemplateError, match="cannot be appended"):
        Renderer(tokenizer, template="chatml").extend(np.array([1]), Message("assistant", "no"))
