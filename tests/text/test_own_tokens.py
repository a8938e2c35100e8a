"""The control tokens that a model writes within its turn keep their meaning in its recorded texts. Those that
begin or end turns stay ordinary text. A token that ended a sampled response is its end."""

import re

import numpy as np
import pytest
from chats import assistant, user
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken
from tokenizers_of_all_kinds import save_kind
from transformers import PreTrainedTokenizerFast

from oat.text.changed_texts import made_ordinary
from oat.text.control_tokens import is_own
from oat.text.renderer import Renderer

OWN = re.findall(
    r"\S+",
    """
<think> </think> <tool_call> </tool_call> [THINK] [/THINK] [TOOL_CALLS] [ARGS] [CALL_ID]
<seed:think> </seed:think> <seed:tool_call> </seed:tool_call> <seed:cot_budget_reflect> ◁think▷
◁/think▷ <|begin_of_thought|> <|end_of_thought|> <|begin_of_solution|> <|end_of_solution|>
<|START_THINKING|> <|END_THINKING|> <|START_ACTION|> <|END_ACTION|> <|tool_calls_section_begin|>
<|tool_call_begin|> <|tool_call_argument_begin|> <|tool_call_end|> <|tool_calls_section_end|>
<｜tool▁calls▁begin｜> <｜tool▁call▁begin｜> <｜tool▁sep｜> <｜tool▁call▁end｜> <｜tool▁calls▁end｜>
<|tool_call_start|> <|tool_call_end|> <function_calls> </function_calls> <arg_key> </arg_value>
<reasoning> </reasoning> <thinking> <|tool_call|> <|/tool_call|> <|tool_call> <tool_call|> <thought>
</thought> <start_function_call> <end_function_call> <TOOLCALL> </TOOLCALL> <answer> </answer>
<minimax:tool_call> <|python_tag|> <|think|> <tool_calls> </tool_calls>
""",
)
"""Tags of reasoning and calls of published tokenizers."""
OF_TURNS = re.findall(
    r"\S+",
    """
<s> </s> <|endoftext|> <|end_of_text|> <|im_start|> <|im_end|> <|eot_id|> <|eom_id|>
<|start_header_id|> <|user|> <|assistant|> <|system|> <|observation|> <|end|> <|start|> <|return|>
<|call|> <|message|> <|channel|> [INST] [/INST] [TOOL_RESULTS] [/TOOL_RESULTS] [AVAILABLE_TOOLS]
[SYSTEM_PROMPT] <start_of_turn> <end_of_turn> <tool_response> </tool_response> <|tool_response>
<｜User｜> <｜Assistant｜> <｜end▁of▁sentence｜> <｜tool▁outputs▁begin｜> <｜tool▁output▁end｜> <seed:bos>
<seed:eos> <|START_OF_TURN_TOKEN|> <|END_OF_TURN_TOKEN|> <|CHATBOT_TOKEN|> <|START_TOOL_RESULT|>
<|END_TOOL_RESULT|> <|start_of_role|> <|end_of_role|> <|tool|> <|answer|> <|tool_response_start|>
<|im_user|> <|im_assistant|> <|im_middle|> <|tool_list_start|> [gMASK] <sop> <turn|> <pad> [SEP]
[CLS] <mask> <unk> <|assistant_thought|> <user:think> <function_results>
""",
)
"""Tokens that begin or end turns, messages, results or texts."""
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    tokenizer = save_kind("byte-level", tmp_path_factory.mktemp("own"), begins=False)
    tokenizer.add_tokens([AddedToken(text, special=True) for text in dict.fromkeys([*OWN, *OF_TURNS])])
    return tokenizer


def chat(tokenizer: PreTrainedTokenizerFast, template: str, **options) -> Renderer:
    tokenizer.chat_template = template
    return Renderer(tokenizer, template="tokenizer", **options)


def test_tokens_of_published_tokenizers() -> None:
    assert [token for token in OWN if not is_own(token)] == []
    assert [token for token in OF_TURNS if is_own(token)] == []


def test_recorded_texts_have_the_tokens_that_sampling_yields(tokenizer: PreTrainedTokenizerFast) -> None:
    renderer = chat(tokenizer, CHATML)
    of_template = renderer.response("x").tolist()[1:]

    @settings(derandomize=True, deadline=None, max_examples=30)
    @given(st.lists(st.sampled_from([*OWN, *OF_TURNS, "x", " y\n"]), max_size=6))
    def check(pieces: list[str]) -> None:
        text = "".join(pieces)
        ids = renderer.response(text).tolist()
        assert ids[-1:] == of_template
        specials = [id for id in ids[:-1] if id in tokenizer.added_tokens_decoder]
        own = [piece for piece in pieces if is_own(piece)]
        assert specials == tokenizer.convert_tokens_to_ids(own)
        assert renderer.text(ids, after=renderer.prompt([user("hi")])) == text
        assert made_ordinary(renderer, [], text) == [piece for piece in pieces if piece in OF_TURNS]
        asked = [id for id in renderer.prompt([user(text)]).tolist() if id in tokenizer.added_tokens_decoder]
        assert asked == tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>", "<|im_start|>"])

    check()


def test_a_tag_that_ends_turns_stays_text(tokenizer: PreTrainedTokenizerFast) -> None:
    renderer = chat(tokenizer, CHATML.replace("<|im_end|>", "<|end_of_thought|>"))
    end = tokenizer.convert_tokens_to_ids("<|end_of_thought|>")
    assert renderer.response("a<|end_of_thought|>b").tolist().count(end) == 1


@pytest.mark.parametrize("end", ["<|eom_id|>", "<|call|>"])
def test_an_end_that_was_sampled_gets_no_other_one(tokenizer: PreTrainedTokenizerFast, end: str) -> None:
    """Behind it stands what the template writes behind its own end."""
    renderer = chat(tokenizer, CHATML, eos_ids=[tokenizer.convert_tokens_to_ids(end)])
    before = renderer.prompt([user("hi")])
    written = renderer.written([user("hi")], [assistant("x"), user("and?")])
    for sampled, ended in ((f"x{end}", f"x{end}"), ("x<|im_end|>", "x<|im_end|>"), ("x", "x<|im_end|>")):
        ids = np.concatenate([before, tokenizer(sampled, add_special_tokens=False)["input_ids"]])
        told = renderer.decode(renderer.extend(ids, user("and?")))
        assert told == written.replace("x<|im_end|>", ended) + "<|im_start|>assistant\n"


def test_a_text_has_its_own_tokens_though_they_end_it(tokenizer: PreTrainedTokenizerFast) -> None:
    """The generation_config.json of a model may name </answer>, or the end of a call, as an end."""
    ends = {token: tokenizer.convert_tokens_to_ids(token) for token in [*OWN, *OF_TURNS]}
    renderer, (x,) = chat(tokenizer, CHATML, eos_ids=[*ends.values()]), tokenizer("x")["input_ids"]
    for token, id in ends.items():
        text = f"x{token}" if token in OWN else "x"
        assert renderer.text([x, id]) == text
        assert renderer.text_ends([x, id]).tolist() == [1, len(text)]
    turn = chat(tokenizer, CHATML.replace("<|im_end|>", "</answer>"))
    assert turn.text([x, ends["</answer>"]]) == "x", "the template ends a turn with it"


def test_an_end_that_begins_the_next_message_stands_there_once(tokenizer: PreTrainedTokenizerFast) -> None:
    """The models of GLM end a response with the token of the next role."""
    template = (
        "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
    )
    renderer = chat(tokenizer, template, eos_ids=[tokenizer.convert_tokens_to_ids("<|user|>")])
    before = renderer.prompt([user("hi")])
    ids = np.concatenate([before, tokenizer("x<|user|>", add_special_tokens=False)["input_ids"]])
    told = renderer.decode(renderer.extend(ids, user("and?")))
    assert told == "<|user|>\nhi<|assistant|>\nx<|user|>\nand?<|assistant|>\n"
