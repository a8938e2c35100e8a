"""The renderer, on real tokenizers that were saved to disk and loaded."""

import re
import warnings
from pathlib import Path

import numpy as np
import pytest
from call_templates import CALLS, FRAME
from chats import (
    CALL,
    FORGETFUL,
    HOSTILE,
    LINES,
    NO_END,
    SETTINGS,
    TEXTS,
    assistant,
    opens_reasoning,
    save_byte_level,
    user,
    write,
)
from fixtures import World, oat, write_jsonl
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from oat.errors import TemplateError
from oat.text.renderer import Renderer
from oat.types import Message

LLAMA = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}{{ '[INST] ' + "
    "message['content'] + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ ' ' + message['content'] + ' ' + eos_token }}"
    "{% else %}{{ raise_exception('no such role') }}{% endif %}{% endfor %}"
)


@pytest.fixture(scope="module")
def framed(tmp_path_factory):
    """Return a tokenizer that adds its own beginning and end of text."""
    return save_byte_level(tmp_path_factory.mktemp("framed"), bos_token="<s>", post="<s> $A <|endoftext|>")


def test_plain_prompt_is_the_content(tokenizer):
    renderer = Renderer(tokenizer, template=None)
    ids = renderer.prompt([user("what is two?")])
    assert ids.dtype == np.int32
    assert ids.tolist() == tokenizer("what is two?")["input_ids"]
    assert renderer.decode(ids) == "what is two?"
    assert renderer.num_tokens == len(tokenizer)


def test_plain_prompt_keeps_the_tokenizers_beginning_and_drops_its_end(framed):
    beginning, end = framed.convert_tokens_to_ids(["<s>", "<|endoftext|>"])
    assert framed("a cat")["input_ids"][-1] == end
    ids = Renderer(framed, template=None).prompt([user("a cat")])
    assert ids[0] == beginning
    assert end not in ids
    written = Renderer(framed, template=None).prompt([user("a cat<|endoftext|>")])
    assert written.tolist() == [*ids.tolist(), end]


def test_plain_prompt_when_beginning_and_end_are_one_token(tmp_path):
    tokenizer = save_byte_level(tmp_path, bos_token="<|endoftext|>", post="<|endoftext|> $A <|endoftext|>")
    ids = Renderer(tokenizer, template=None).prompt([user("a cat")])
    assert ids.tolist().count(tokenizer.eos_token_id) == 1
    assert ids[0] == tokenizer.eos_token_id


def test_chat_has_no_second_beginning(framed, tmp_path):
    renderer = Renderer(framed, template=write(tmp_path, LLAMA))
    assert renderer.decode(renderer.prompt([user("a cat")])) == "<s>[INST] a cat [/INST]"


def test_chatml_by_hand(tokenizer):
    renderer = Renderer(tokenizer, template="chatml", system="be kind")
    ids = renderer.prompt([user("hi"), assistant("yes"), user("and?")])
    assert renderer.decode(ids) == (
        "<|im_start|>system\nbe kind<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
        "yes<|im_end|>\n"
        "<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\n"
    )
    own = renderer.prompt([Message("system", "be brief"), user("hi")])
    assert "be kind" not in renderer.decode(own)
    end_of_text, end_of_turn = tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_end|>"])
    assert renderer.stop_ids == {end_of_text, end_of_turn}
    assert Renderer(tokenizer, template=None, eos_ids=[7, 9]).stop_ids == {end_of_text, 7, 9}


def test_extend_closes_a_cut_response_and_only_goes_on_after_an_ended_one(tokenizer):
    renderer = Renderer(tokenizer, template="chatml")
    prompt = renderer.prompt([user("hi")])
    cut = np.concatenate([prompt, renderer.response("yes")[:-1]])
    ended = np.concatenate([prompt, renderer.response("yes")])
    whole = renderer.prompt([user("hi"), assistant("yes"), user("and?")])
    assert renderer.extend(cut, user("and?")).tolist() == whole.tolist()
    assert renderer.extend(ended, user("and?")).tolist() == whole.tolist()


def test_extend_of_a_plain_prompt_appends_the_content(tokenizer):
    renderer = Renderer(tokenizer, template=None)
    ids = renderer.prompt([user("what is")])
    assert renderer.decode(renderer.extend(ids, user(" two?"))) == "what is two?"


def test_a_template_that_pads_responses_is_followed(framed, tmp_path):
    renderer = Renderer(framed, template=write(tmp_path, LLAMA))
    messages = [user("hi"), assistant("yes"), user("and?"), assistant("no")]
    ids, mask = renderer.loss_mask(messages)
    assert (
        renderer.decode(ids) == "<s>[INST] hi [/INST] yes <|endoftext|>[INST] and? [/INST] no <|endoftext|>"
    )
    assert renderer.decode(ids[mask]) == " yes <|endoftext|> no <|endoftext|>"
    cut = renderer.prompt([user("hi")])
    assert (
        renderer.decode(renderer.extend(cut, user("and?")))
        == "<s>[INST] hi [/INST] <|endoftext|>[INST] and? [/INST]"
    )


def test_a_template_without_an_end_of_turn_uses_the_tokenizers(tokenizer, tmp_path):
    renderer = Renderer(tokenizer, template=write(tmp_path, NO_END))
    ids, mask = renderer.loss_mask([user("hi"), assistant("yes"), user("and?"), assistant("no")])
    assert (
        renderer.decode(ids)
        == "user: hi\nassistant: yes<|endoftext|>\nuser: and?\nassistant: no<|endoftext|>"
    )
    assert renderer.decode(ids[mask]) == "yes<|endoftext|>no<|endoftext|>"


def test_text_is_clean_and_cut_at_the_first_stop(tokenizer):
    renderer = Renderer(tokenizer, template="chatml", stop=["Q:", "\n\n"])
    ids = np.append(tokenizer("four\n\nQ: more")["input_ids"], tokenizer.convert_tokens_to_ids("<|im_end|>"))
    assert renderer.text(ids) == "four"
    assert renderer.decode(ids) == "four\n\nQ: more<|im_end|>"
    assert renderer.text(np.array([], dtype=np.int32)) == ""


@SETTINGS
@given(
    prompt=HOSTILE,
    response=TEXTS,
    later=HOSTILE,
    ended=st.booleans(),
    template=st.sampled_from([None, "chatml"]),
)
def test_extend_begins_with_its_ids(tokenizer, prompt, response, later, ended, template):
    renderer = Renderer(tokenizer, template=template)
    ids = np.concatenate(
        [renderer.prompt([user(prompt)]), renderer.response(response)[: None if ended else -1]]
    )
    longer = renderer.extend(ids, user(later))
    assert longer[: len(ids)].tolist() == ids.tolist()
    assert len(longer) > len(ids)
    if template is not None:
        assert renderer.decode(longer).endswith("<|im_end|>\n<|im_start|>assistant\n")


@SETTINGS
@given(prompt=HOSTILE, response=HOSTILE, template=st.sampled_from([None, "chatml"]))
def test_loss_mask_is_prompt_then_response(tokenizer, prompt, response, template):
    renderer = Renderer(tokenizer, template=template)
    ids, mask = renderer.loss_mask([user(prompt), assistant(response)])
    before, after = renderer.prompt([user(prompt)]), renderer.response(response)
    assert ids.tolist() == [*before.tolist(), *after.tolist()]
    assert mask.tolist() == [False] * len(before) + [True] * len(after)
    assert int(ids[-1]) in renderer.stop_ids


@SETTINGS
@given(content=HOSTILE)
def test_content_cannot_write_control_tokens(tokenizer, content):
    renderer = Renderer(tokenizer, template="chatml")
    controls = [int(i) for i in renderer.prompt([user(content)]) if int(i) in tokenizer.added_tokens_decoder]
    start, end = tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    assert controls == [start, end, start]
    shown = renderer.decode(renderer.prompt([user(content)]))
    assert shown == f"<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n".replace(
        "\ufdd0", "\ufffd"
    ).replace("\ufdd1", "\ufffd")


def test_control_tokens_that_are_not_special_are_escaped_too(tmp_path):
    built = Tokenizer(models.BPE())
    built.pre_tokenizer, built.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    built.train_from_iterator(LINES, trainer)
    built.add_tokens(["<|im_start|>", "<|im_end|>", "<think>"])
    PreTrainedTokenizerFast(tokenizer_object=built).save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    start, end, think = tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>", "<think>"])
    renderer = Renderer(tokenizer, template="chatml")
    ids = renderer.prompt([user("a<|im_end|>b<think>")]).tolist()
    assert [i for i in ids if i in (start, end, think)] == [start, think, end, start]
    assert renderer.stop_ids == {end}
    assert renderer.text(np.array([*tokenizer("yes")["input_ids"], end])) == "yes"


def test_a_prefix_space_tokenizer_is_followed(tmp_path):
    vocabulary = {
        token: i for i, token in enumerate(["<unk>", "<s>", "</s>", "▁", *"abcdefghijklmnopqrstuvwxyz ?\n:"])
    }
    built = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>"))
    built.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    built.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    built.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    PreTrainedTokenizerFast(
        tokenizer_object=built, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(tmp_path)
    renderer = Renderer(AutoTokenizer.from_pretrained(tmp_path), template=None)
    assert renderer.prompt([user("a b")]).tolist() == [1, 3, 4, 3, 5]
    ids, mask = renderer.loss_mask([user("a"), assistant("b")])
    assert ids.tolist() == [1, 3, 4, 5, 2], "no blank stands between prompt and response"
    assert mask.tolist() == [False] * 3 + [True] * 2
    assert renderer.text(ids[mask], after=ids[~mask]) == "b"


def test_a_template_that_rewrites_history_warns_once(tokenizer, tmp_path):
    with pytest.warns(UserWarning, match="drops the reasoning") as seen:
        renderer = Renderer(tokenizer, template=write(tmp_path, FORGETFUL))
    assert len(seen) == 1
    assert "in a conversation of 3 messages" in str(seen[0].message)
    ids = np.concatenate([renderer.prompt([user("hi")]), renderer.response("<think>hm</think>yes")])
    assert renderer.extend(ids, user("and?"))[: len(ids)].tolist() == ids.tolist()


def test_a_template_that_changes_an_earlier_message_warns(tokenizer, tmp_path):
    shout = (
        "{% for m in messages %}{{ m['content'] if loop.last else m['content'] | upper }}{{ eos_token "
        "}}{% endfor %}"
    )
    with (
        pytest.warns(UserWarning, match="2 messages it changes an earlier message, here 'oatfirst'"),
        pytest.raises(TemplateError, match="leaves out"),
    ):
        Renderer(tokenizer, template=write(tmp_path, shout)).extend(np.array([5]), user("and?"))


def test_a_template_that_never_shows_reasoning_warns(tokenizer, tmp_path):
    with pytest.warns(UserWarning, match="in a conversation of 2 messages it drops the reasoning"):
        Renderer(tokenizer, template=write(tmp_path, FORGETFUL.replace("not loop.last and ", "")))


def test_the_built_in_template_does_not_warn(tokenizer):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Renderer(tokenizer, template="chatml")


def test_a_template_that_always_fills_in_reasoning_does_so_in_responses(tokenizer, tmp_path):
    thoughtful = (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + ('<think></think>' if m['role'] == "
        "'assistant' and loop.last else '') }}"
        "{{ m['content'] + '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ "
        "'<|im_start|>assistant\n' }}{% endif %}"
    )
    with pytest.warns(UserWarning, match="changes an earlier message"):
        renderer = Renderer(tokenizer, template=write(tmp_path, thoughtful))
    assert renderer.decode(renderer.response("yes")) == "<think></think>yes<|im_end|>"


def test_a_template_that_leaves_out_some_of_a_response_is_not_followed(tokenizer, tmp_path):
    with pytest.warns(UserWarning, match="drops the reasoning"):
        renderer = Renderer(tokenizer, template=write(tmp_path, FORGETFUL.replace("not loop.last and ", "")))
    assert renderer.decode(renderer.response("<think>hm</think>yes")) == "<think>hm</think>yes<|im_end|>"
    assert renderer.decode(renderer.response("yes")) == "yes<|im_end|>"


def test_a_template_that_does_not_go_on_from_its_own_prompt_is_not_followed(tokenizer, tmp_path):
    with pytest.warns(UserWarning, match="drops the reasoning"):
        renderer = Renderer(tokenizer, template=write(tmp_path, opens_reasoning(FORGETFUL)))
    assert renderer.decode(renderer.prompt([user("hi")])).endswith("assistant\n<think>\n")
    assert renderer.decode(renderer.response("hm</think>yes")) == "hm</think>yes<|im_end|>"


def test_a_message_of_weight_0_is_not_learned(tokenizer):
    renderer = Renderer(tokenizer, template="chatml")
    messages = [
        user("hi"),
        Message("assistant", "no", {"weight": 0}),
        user("and?"),
        Message("assistant", "yes", {"weight": 1}),
    ]
    ids, mask = renderer.loss_mask(messages)
    assert renderer.decode(ids[mask]) == "yes<|im_end|>"
    same, all_of_them = renderer.loss_mask([user("hi"), assistant("no"), user("and?"), assistant("yes")])
    assert ids.tolist() == same.tolist()
    assert renderer.decode(same[all_of_them]) == "no<|im_end|>yes<|im_end|>"


def test_fields_of_a_response_that_cannot_be_written_are_refused(tokenizer, tmp_path):
    chatml = Renderer(tokenizer, template="chatml")
    call = Message("assistant", "", {"tool_calls": [CALL]})
    for renderer in (chatml, Renderer(tokenizer, template=None)):
        with pytest.raises(
            TemplateError,
            match=(
                "a response has no text, and the template writes nothing of its tool_calls; choose a template"
            ),
        ):
            renderer.loss_mask([user("hi"), call])
    assert chatml.decode(chatml.response(Message("assistant", "yes", {"name": "Ann"}))) == "yes<|im_end|>", (
        "what it does not read changes nothing"
    )
    named = (
        "{% for m in messages %}{{ m.role }}{{ ' ' + m.name if m.name }}: {{ m.content }}{{ eos_token "
        "}}{% endfor %}"
    )
    renderer = Renderer(
        tokenizer, template=write(tmp_path, named + "{% if add_generation_prompt %}assistant: {% endif %}")
    )
    assert (
        renderer.decode(renderer.prompt([Message("user", "hi", {"name": "Ann"})]))
        == "user Ann: hi<|endoftext|>assistant: "
    )
    with pytest.raises(
        TemplateError,
        match="the template writes a response with name otherwise than it begins and ends other responses",
    ):
        renderer.loss_mask([user("hi"), Message("assistant", "yes", {"name": "Bob"})])
    assert [renderer.reads(name) for name in ("name", "tool_calls")] == [True, False]


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning", "thinking"])
@pytest.mark.parametrize(
    ("condition", "reads"),
    [
        ("m.FIELD", (True, True)),
        ("m.FIELD and m.tool_calls", (False, True)),
        ("m.FIELD and m.content", (True, False)),
        ("m.FIELD and enable_thinking", (False, False)),
        ("m.FIELD and m.tool_calls and raise_exception('no')", (False, True)),
    ],
)
def test_reasoning_is_read_where_it_is_written(tokenizer, tmp_path, field, condition, reads) -> None:
    """A template that fails says so itself when a record is rendered."""
    written = f"{{% if {condition} %}}{{{{ m.FIELD }}}}{{% endif %}}".replace("FIELD", field)
    source = FRAME.replace("{{ m.content or '' }}", written + "{{ m.content or '' }}")
    renderer = Renderer(tokenizer, template=write(tmp_path, source.replace("CALLS", CALLS["hermes"])))
    assert (renderer.reads(field), renderer.reads(field, beside_calls=True)) == reads


def test_the_template_that_the_page_shows(tokenizer, world: World, tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "data.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"<!-- file: chat.jinja -->\n```jinja\n(.*?)```", page, flags=re.DOTALL)
    (tmp_path / "chat.jinja").write_text(block, encoding="utf-8")
    renderer = Renderer(tokenizer, template=str(tmp_path / "chat.jinja"))
    asked = [Message("user", "hi", {"name": "Ann"})]
    ids, mask = renderer.loss_mask([*asked, assistant("yes"), user("and?"), assistant("no")])
    assert renderer.decode(renderer.prompt(asked)) == "user Ann: hi<|endoftext|>\nassistant: "
    assert renderer.decode(ids) == (
        "user Ann: hi<|endoftext|>\nassistant: yes<|endoftext|>\nuser: and?<|endoftext|>\nassistant: "
        "no<|endoftext|>"
    )
    assert renderer.decode(ids[mask]) == "yes<|endoftext|>no<|endoftext|>"
    changes = {
        "render.template": str(tmp_path / "chat.jinja"),
        "prompts": {"path": str(tmp_path / "data.jsonl")},
        "oracle.name": "recorded",
    }
    record = {
        "messages": [{"role": "user", "name": "b", "content": "1"}, {"role": "assistant", "content": "a"}]
    }
    write_jsonl(tmp_path / "data.jsonl", [record] * 2)
    changes |= {"algorithm": {"name": "sft", "prompts": 2}, "evaluation": None, "stop.max_steps": 1}
    assert oat("train", world.config("sft", tmp_path, changes)) == 0


def test_tokens_that_a_template_makes_of_roles_are_escaped(tmp_path):
    """A template makes role tokens from role names, as that of Phi 3 does, so its text contains none of them.
    Such tokens in a message are escaped."""
    roles = [f"<|{role}|>" for role in ("system", "user", "assistant", "tool")]
    template = (
        "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|' + 'assistant' + '|>' }}{% endif %}"
    )
    tokenizer = save_byte_level(tmp_path, added=roles, chat_template=template)
    ids = Renderer(tokenizer, template="tokenizer").prompt(
        [user("".join(roles)), assistant("b"), Message("tool", "".join(roles))]
    )
    controls = tokenizer.convert_tokens_to_ids(["<|user|>", "<|assistant|>", "<|tool|>", "<|assistant|>"])
    assert [int(i) for i in ids if int(i) in tokenizer.convert_tokens_to_ids(roles)] == controls


def test_conversations_that_do_not_fit(tokenizer, framed, tmp_path):
    plain, chat = Renderer(tokenizer, template=None), Renderer(framed, template=write(tmp_path, LLAMA))
    with pytest.raises(TemplateError, match="user, assistant, user needs a chat template"):
        plain.prompt([user("a"), assistant("b"), user("c")])
    with pytest.raises(TemplateError, match=r"conversation of tool .*no such role"):
        chat.prompt([Message("tool", "4")])
    with pytest.raises(TemplateError, match="cannot be appended"):
        chat.extend(np.array([1]), assistant("b"))
    for messages in ([], [user("a")], [assistant("a")], [user("a"), assistant("b"), assistant("c")]):
        with pytest.raises(TemplateError, match="cannot mask"):
            chat.loss_mask(messages)


def test_a_prompt_without_tokens_is_refused(tmp_path):
    built = Tokenizer(models.BPE({"a": 0, "<eos>": 1}, []))
    PreTrainedTokenizerFast(tokenizer_object=built, eos_token="<eos>").save_pretrained(tmp_path)
    with pytest.raises(TemplateError, match="no tokens"):
        Renderer(AutoTokenizer.from_pretrained(tmp_path), template=None).prompt([user("z")])


def test_a_text_that_the_tokenizer_refuses_is_named(tmp_path):
    built = Tokenizer(models.WordLevel({"a": 0, "<eos>": 1}))
    built.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=built, eos_token="<eos>").save_pretrained(tmp_path)
    with pytest.raises(TemplateError, match="cannot encode 'az'"):
        Renderer(AutoTokenizer.from_pretrained(tmp_path), template=None).prompt([user("az")])
