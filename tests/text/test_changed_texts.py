"""What tokenizers take from texts or put behind them: the ends of texts, white space beside tokens, unknown
characters; and the records that are learned otherwise than they are written."""

import re
import warnings
from pathlib import Path

import pytest
import yaml
from chats import assistant, user
from fixtures import checked, write_jsonl
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers_of_all_kinds import CHANGING, KINDS, LOSSY, save_kind
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from oat.text.changed_texts import changed_part
from oat.text.renderer import Renderer

FEW = settings(derandomize=True, deadline=None, max_examples=10)
HEADER = (
    "{{ bos_token }}{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + eos_token + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
"""A template whose header ends with a line break, as Phi-3's does."""
LEAD = HEADER.replace("{{ '<|assistant|>\n' }}", "{{ '<|assistant|>' }}")
"""One that writes the line break with the response, and not with the generation prompt."""
BLANKS = st.lists(
    st.sampled_from(["return", " x", "    ", "\n", "\t", " ", "the sky", "<think>", "</think>", "<s>", "."]),
    max_size=5,
).map("".join)


@pytest.mark.parametrize("ends", ["</s>", "<unk>", "<|user|> </s>", "</s> <|user|>"])
@pytest.mark.parametrize("kind", ["byte-level", "Llama 2", "Unigram"])
def test_what_a_tokenizer_puts_behind_texts_stands_at_the_end_of_the_whole_text(
    tmp_path: Path, kind: str, ends: str
) -> None:
    """It does not stand between prompt and response. A response is learned up to the first token of it, which
    ends a sampled response too."""
    for options in ({}, {"eos_token": None}):
        tokenizer = save_kind(kind, tmp_path, ends=ends, **options)
        renderer = Renderer(tokenizer, template=None)
        suffix = tokenizer.convert_tokens_to_ids(ends.split())
        for prompt, response in (("the sky is", " blue."), ("the sky is", ", like"), ("a\n", "")):
            whole = tokenizer(prompt + response)["input_ids"]
            ids, mask = renderer.recorded([user(prompt)], response)
            assert ids.tolist() == whole[: len(whole) - len(suffix) + 1]
            assert ids[~mask].tolist() == tokenizer(prompt)["input_ids"][: -len(suffix)]
            assert int(ids[-1]) in renderer.stop_ids
            assert renderer.whole([user(prompt)], response).tolist() == whole
            assert renderer.text(ids[mask], after=ids[~mask]) == response
        text, learned = renderer.recorded([], "the sky")
        assert text.tolist() == tokenizer("the sky")["input_ids"][: len(text)]
        assert (int(text[-1]), learned[-1]) == (suffix[0], True)


def test_a_tokenizer_of_sentences_ends_responses_as_it_ends_texts(tmp_path: Path) -> None:
    tokenizer = save_kind("WordPiece", tmp_path, ends="<|user|>", eos_token=None)
    renderer = Renderer(tokenizer, template=None)
    ids, mask = renderer.recorded([user("the sky is")], " blue")
    assert ids.tolist() == tokenizer("the sky is blue")["input_ids"]
    assert renderer.stop_ids == {int(ids[-1])}
    assert ids[~mask].tolist() == tokenizer("the sky is")["input_ids"][:-1]


@pytest.mark.parametrize("template", [None, HEADER, LEAD])
@pytest.mark.parametrize("takes", ["lstrip", "rstrip", "lstrip rstrip"])
@pytest.mark.parametrize("kind", ["byte-level", "Llama 2"])
def test_a_response_keeps_the_white_space_that_tokens_beside_it_take_away(
    tmp_path: Path, kind: str, takes: str, template: str | None
) -> None:
    """A sampled response has such white space, so a recorded one has it. Where there is none, the ids are
    those of the whole text."""
    tokenizer = save_kind(kind, tmp_path, takes=takes)
    tokenizer.chat_template = template
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        renderer = Renderer(tokenizer, template=template and "tokenizer")
    prompt = [user("hi" if template else "hi <think>")]

    @FEW
    @given(BLANKS)
    @example("    return x\n\n    done\n")
    @example("<think>    the sky\n </think>\n\n  is")
    @example("x")
    def check(response: str) -> None:
        ids, mask = renderer.recorded(prompt, response)
        before = ids[~mask]
        text = renderer.text(ids[mask], after=before)
        if template == LEAD and "rstrip" not in takes:
            text = text.removeprefix("\n")  # the template's own
        assert text == response
        assert before.tolist() == renderer.prompt(prompt).tolist()
        written = renderer.written(prompt, [assistant(response)])
        whole = tokenizer(written, add_special_tokens=template is None)["input_ids"]
        learned = ids[:-1] if template is None else ids  # without a template, the text has no end
        has_blanks = any(map(str.isspace, response)) or "<s>" in response
        if not has_blanks and whole[: len(before)] == before.tolist():
            assert learned.tolist() == whole[: len(learned)]

    check()


@pytest.mark.parametrize("unknown", ["\U0001f355", "\u2615", "<unk>"])
@pytest.mark.parametrize("kind", ["Unigram", "T5", "WordPiece"])
def test_an_unknown_character_opens_no_text(tmp_path: Path, kind: str, unknown: str) -> None:
    tokenizer = save_kind(kind, tmp_path)
    renderer = Renderer(tokenizer, template=None)
    prompt = [user(f"the cat {unknown}")]
    ids, mask = renderer.recorded(prompt, " the sky is")
    if unknown != "<unk>":
        assert renderer.text(ids[mask], after=ids[~mask]) == " the sky is"
    known, learned = renderer.recorded([user("the cat")], " the sky is")
    sampled = known[learned]
    assert renderer.text(sampled, after=renderer.prompt(prompt)) == " the sky is"
    said = renderer.extend(renderer.prompt(prompt), user(" the sky is"))
    assert said[len(ids[~mask]) :].tolist() == sampled[:-1].tolist()


@pytest.mark.parametrize("kind", [*KINDS, *LOSSY, *CHANGING])
def test_records_that_a_tokenizer_changes_are_found(tmp_path: Path, kind: str) -> None:
    """A record counts as changed if and only if transformers' ids do not give its text back."""
    tokenizer: PreTrainedTokenizerFast = save_kind(kind, tmp_path, begins=False)
    renderer = Renderer(tokenizer, template=None)

    @settings(FEW, max_examples=6)
    @given(
        st.text(st.sampled_from("aT \n\t\r\u00a0\u201c\u200be\u0301\ufb01\u5b57.'"), min_size=1, max_size=6)
    )
    @example("the sky \n\n")
    @example("\r\n \u00e9")
    @example("the sky")
    def check(text: str) -> None:
        ids = tokenizer(f"x{text}")["input_ids"]
        is_kept = f"x{text}" in tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        found = changed_part(renderer, [user(f"x{text}")], None)
        assert (found is None) == is_kept

    check()


def test_check_counts_what_is_learned_otherwise_than_it_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The tokenizer changes the text of one record; another has a special token that is no own tag, and the
    prompt of a third one is already rendered."""
    tokenizer = save_kind("no-break space", tmp_path)
    tokenizer.chat_template = HEADER
    tokenizer.save_pretrained(tmp_path)
    shape = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **shape)).save_pretrained(tmp_path)
    answers = [
        "the\u00a0sky",
        "<think>the sky</think>is",
        "the<|user|>sky",
        "<tool_call>{'name': 'f'}</tool_call>",
        "is",
    ]
    asked = ["hi"] * 4 + ["<|user|>hi"]
    records = [
        {"messages": [user(prompt).plain, assistant(text).plain]}
        for prompt, text in zip(asked, answers, strict=True)
    ]
    write_jsonl(tmp_path / "data.jsonl", records)
    tree = {
        "run_dir": str(tmp_path / "run"),
        "model": {"path": str(tmp_path)},
        "prompts": {"path": str(tmp_path / "data.jsonl")},
        "render": {"template": "tokenizer"},
        "oracle": {"name": "recorded"},
        "algorithm": {"name": "sft", "prompts": 2},
        "stop": {"max_steps": 1},
        "compute": {"threads": 1},
        "engine": {"threads": 1},
    }
    (tmp_path / "oat.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
    _, notes = checked(capsys, tmp_path / "oat.yaml")
    changed, ordinary, unread = notes[:3]
    assert re.search(r"1 of 5 responses .*row 4: ", unread)
    assert re.search(r"of 5 records that were compared, it changes 1\b.*the.xa0sky", changed)
    assert "'<|user|>' in 2 of 5 records" in ordinary
    assert "think" not in ordinary
