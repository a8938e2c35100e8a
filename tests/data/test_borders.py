"""The end of a prompt that two texts share."""

import re
import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers_of_all_kinds import save_kind
from transformers import PreTrainedTokenizerFast

from oat.data.fit import Fit
from oat.data.formats import Layout, implicit_end
from oat.data.prompts import PromptSet, Source
from oat.text.renderer import Renderer


def anywhere(before: str, after: str) -> bool:
    return True


@pytest.mark.parametrize(
    ("first", "second", "prompt"),
    [
        ("the mat", "the man", "the"),
        ("the cat sat", "the cat lay", "the cat"),
        ("the cat", "the cats", "the"),
        ("the cat", "the cat sat", "the cat"),
        ("pi is 3.14", "pi is 3.15", "pi is"),
        ("I don't", "I don'm", "I"),
        ("well-known", "well-kept", "well-"),
        ("what?\nyes", "what?\nno", "what?\n"),
        ("a  b", "a  c", "a "),
        ("天空是蓝色", "天空是绿色", "天空是"),
        ("caf e\u0301", "caf e\u0300", "caf"),
        ("so 👩\u200d🌾", "so 👩\u200d🔬", "so"),
        ("यह किताब के लिए", "यह किताब का है", "यह किताब"),
        ("বাংলা ভাষায়", "বাংলা ভাষার", "বাংলা"),
        ("நான் வந்தேன்", "நான் வந்தான்", "நான்"),
        ("ภาษาไทยดี", "ภาษาไทยไม่ดี", "ภาษาไทย"),
        ("mat", "man", ""),
        ("Yes it is.", "Yeah no.", ""),
        ("x", "y", ""),
    ],
)
def test_by_hand(first: str, second: str, prompt: str) -> None:
    assert first[: implicit_end(first, second, anywhere)] == prompt


@pytest.fixture(scope="module", params=["byte-level", "byte-level, composed", "Llama 2", "blank behind"])
def tokenizer(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> PreTrainedTokenizerFast:
    return save_kind(request.param, tmp_path_factory.mktemp("kind"))


PARTS = ["the", "sky", " ", "\n", "\n\n", "it's", ".", "..", "12", "34", "é", "字", "cat", "- "]


def test_the_prompt_ends_at_a_token_and_at_a_word(tokenizer: PreTrainedTokenizerFast) -> None:
    """Where both texts have such a place, the prompt ends at it, and the last one is taken."""
    renderer = Renderer(tokenizer, template=None)

    def is_right(text: str, place: int) -> bool:
        ids, before = (
            tokenizer(each, add_special_tokens=False)["input_ids"] for each in (text, text[:place])
        )
        around = text[place - 1 : place + 1]
        splits_word = len(around) == 2 and around.isalnum() and "字" not in around
        splits_word |= any(re.match(r"\d[.,]\d", text[max(0, place - back) :]) for back in (1, 2))
        return ids[: len(before)] == before and not splits_word and "'" not in around

    @settings(derandomize=True, deadline=None, max_examples=25)
    @given(st.tuples(*[st.lists(st.sampled_from(PARTS), min_size=1, max_size=5).map("".join)] * 3))
    def check(texts: tuple[str, str, str]) -> None:
        first, second = texts[0] + texts[1], texts[0] + texts[2]
        size = implicit_end(first, second, renderer.is_border)
        shared = next(n for n in range(len(first), -1, -1) if second.startswith(first[:n]))
        assert size <= shared
        right = [
            place
            for place in range(1, shared + 1)
            if first[:place].strip() and is_right(first, place) and is_right(second, place)
        ]
        if right:
            assert size in right
            assert right[-1] - size <= 1

    check()


def test_a_set_of_prompts_is_split_by_its_tokenizer(tokenizer: PreTrainedTokenizerFast) -> None:
    records = [{"chosen": "the cat.\n\nyes", "rejected": "the cat.\nno"}]
    fit = Fit(Renderer(tokenizer, template=None))
    (prompt,) = PromptSet(Source(records), Layout(responses=("chosen", "rejected")), fit)
    joins = len(tokenizer("\n\n", add_special_tokens=False)["input_ids"]) < len(
        tokenizer("\n", add_special_tokens=False)["input_ids"] * 2
    )
    assert prompt.messages[0].content + prompt.columns["chosen"] == records[0]["chosen"]
    for name in ("chosen", "rejected"):
        ids, _ = fit.renderer.recorded(prompt.messages, prompt.columns[name])
        assert ids.tolist()[:-1] == tokenizer(records[0][name])["input_ids"]
    assert prompt.messages[0].content == "the cat.\n" or joins
    assert unicodedata.is_normalized("NFC", prompt.messages[0].content)
