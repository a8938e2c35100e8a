"""A text that is encoded in pieces is the text, and decoding gives it back, with tokenizers of many kinds."""

import re
import unicodedata
import warnings
from pathlib import Path

import numpy as np
import pytest
from chats import assistant, user
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers_of_all_kinds import BLANK, CHANGING, KINDS, LOSSY, SPECIALS, save_kind
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from oat.errors import TemplateError
from oat.text.changed_texts import changed_texts
from oat.text.renderer import Renderer
from oat.types import Message

REAL = Path(__file__).parents[3] / "shared" / "real"
"""Pretrained models that lie beside the project, but not in it."""
AFTER_SPECIAL = ("Llama 2", "words joined", "Metaspace always")
"""Tokenizers that put a blank behind a control token, too."""

WORDS = [
    "the sky",
    "is",
    " blue",
    ", like",
    " ",
    "  ",
    "\n",
    "\n\n",
    "cat",
    "t is",
    "'s",
    "12",
    "é",
    "\u0301",
]
NASTY = ["☃", "字", "👩‍🌾", "<|im_", "end|>", "don't", "<", "</think>", "<think>", "<s>", "</s>"]
TEXTS = st.lists(
    st.one_of(
        st.sampled_from(WORDS + NASTY),
        st.text(
            st.characters(exclude_categories=("Cs",), exclude_characters="\ufdd0\ufdd1" + BLANK), max_size=5
        ),
    ),
    max_size=4,
).map("".join)
FEW = settings(derandomize=True, deadline=None, max_examples=12)

TEMPLATES = {
    "plain words": (
        "{{ bos_token }}{% for m in messages %}{{ '[INST] ' + m.content + ' [/INST]' if m.role == 'user' "
        "else ' ' + m.content + ' ' + eos_token }}{% endfor %}"
    ),
    "a line": (
        "{% for m in messages %}{{ '[' + m.role + ']\n' + m.content + eos_token + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '[assistant]\n' }}{% endif %}"
    ),
    "special": (
        "{{ bos_token }}{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
    ),
    "nothing": ("{% for m in messages %}{{ m.content }}{{ eos_token if m.role == 'assistant' }}{% endfor %}"),
}


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, PreTrainedTokenizerFast]:
    return {
        name: save_kind(name, tmp_path_factory.mktemp("kind"), begins=number % 2 == 0)
        for number, name in enumerate([*KINDS, *LOSSY])
    }


def chat(tokenizer: PreTrainedTokenizerFast, template: str) -> Renderer:
    tokenizer.chat_template = TEMPLATES[template]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Renderer(tokenizer, template="tokenizer")


def composed(text: str) -> str:
    """Return a text as a normaliser may write it if it composes characters of both pieces."""
    return unicodedata.normalize("NFKC", text)


def check_joined(tokenizer: PreTrainedTokenizerFast, kind: str, prompt: str, response: str) -> None:
    renderer, is_lossy = Renderer(tokenizer, template=None), kind in LOSSY
    whole = tokenizer(prompt + response)["input_ids"]
    before = tokenizer(prompt)["input_ids"]
    assume(before)
    try:
        ids, mask = renderer.loss_mask([user(prompt), assistant(response)])
    except TemplateError:
        assert is_lossy, "no tokenizer that keeps every text is refused"
        return
    assert ids[~mask].tolist() == before, "the policy reads the prompt as it is sampled from"
    *joined, end = ids.tolist()
    assert end == tokenizer.eos_token_id
    if response.endswith("</s>"):
        joined.append(end)  # a response that has an end gets no other one
    if whole[: len(before)] == before:
        assert joined == whole
    if is_lossy and tokenizer.decode(joined).endswith(prompt + response):
        return  # the pieces keep a text that the tokenizer itself changes
    assert composed(tokenizer.decode(joined)) == composed(tokenizer.decode(whole))
    if not is_lossy and "</s>" not in response:
        text = renderer.text([id for id in ids[mask] if id != end], after=before)
        if kind.startswith("Metaspace"):
            # they put no blank before a blank, and so lose the first one at a beginning
            text, response = (re.sub(r"(?<=>) +|^ +", "", each) for each in (text, response))
        assert composed(text) == composed(response), "an oracle gets the response"


@pytest.mark.parametrize("kind", [*KINDS, *LOSSY])
def test_prompt_and_response_are_the_ids_of_the_whole_text(
    kinds: dict[str, PreTrainedTokenizerFast], kind: str
) -> None:
    """The ids of a prompt and its recorded response are those of the whole text, unless the tokenizer joins
    characters on both sides. They give the text of the whole in every case."""

    @FEW
    @given(TEXTS, TEXTS)
    @example("the sky is", " blue.")
    @example("the sky is", ", like the sea")
    @example("the sky is ", "blue")
    @example("the c", "at sat")
    @example("a", "")
    @example("the sky is", " blue.</s>")
    @example("☃", "☃字")
    @example("a<s>", " b<think>c")
    @example("the cat sat on the mat. " * 30 + "the c", "at sat")
    @example("字" * 700, "字the cat")
    def check(prompt: str, response: str) -> None:
        check_joined(kinds[kind], kind, prompt, response)

    check()


@pytest.mark.parametrize("kind", [*KINDS, *LOSSY])
@pytest.mark.parametrize("begins", [True, False])
def test_a_text_that_has_a_beginning_gets_no_second_one(tmp_path: Path, kind: str, begins: bool) -> None:
    tokenizer = save_kind(kind, tmp_path, begins=begins)
    first = tokenizer.convert_ids_to_tokens(tokenizer("x")["input_ids"][:1])[0] if begins else "<s>"
    renderer, text = Renderer(tokenizer, template=None), f"{first}the sky is"
    alone = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert renderer.prompt([user(text)]).tolist() == alone
    learned, mask = renderer.recorded([], text)
    assert learned[: len(alone)].tolist() == alone
    assert not mask[0]
    (answered, _) = renderer.loss_mask([user(text), assistant(" blue")])
    assert answered[: len(alone)].tolist() == alone


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "byte-level, composed"])
def test_a_conversation_of_several_turns_is_what_the_template_writes(
    kinds: dict[str, PreTrainedTokenizerFast], kind: str, template: str
) -> None:
    """Prompt, responses and the messages between them, rendered one after another, have the text of the whole
    conversation. Control tokens in messages stay text."""
    tokenizer = kinds[kind]
    renderer = chat(tokenizer, template)

    @settings(FEW, max_examples=6)
    @given(st.tuples(*[TEXTS] * 4))
    @example(("hi", "yes", "and</s>?", "no, <s>never"))
    @example(("hi", " yes ", "an", "d"))
    def check(texts: tuple[str, ...]) -> None:
        texts = tuple(f"x{text}" for text in texts) if template == "nothing" else texts
        messages = [Message(("user", "assistant")[place % 2], text) for place, text in enumerate(texts)]
        ids, _ = renderer.loss_mask(messages)
        written = tokenizer.apply_chat_template([each.plain for each in messages], tokenize=False)
        decoded = renderer.decode(ids)
        if kind.startswith("Metaspace") and any(text.startswith(" ") for text in texts):
            # this kind of tokenizer puts no blank before a blank, so it loses the one behind a control token
            written, decoded = (text.replace(" ", "") for text in (written, decoded))
        assert written.startswith(decoded.rstrip("\n"))
        controls = [id for id in ids.tolist() if id in tokenizer.added_tokens_decoder]
        plain = [*texts[::2], *(text.replace("<think>", "").replace("</think>", "") for text in texts[1::2])]
        if not any(mark in text for mark in SPECIALS for text in plain):
            whole = tokenizer(written, add_special_tokens=False)["input_ids"]
            assert controls == [id for id in whole[: len(ids)] if id in tokenizer.added_tokens_decoder]

    check()


@pytest.mark.parametrize("kind", [*KINDS, "blank behind", "WordPiece"])
def test_the_text_of_sampled_ids_is_what_they_add_to_the_prompt(
    kinds: dict[str, PreTrainedTokenizerFast], kind: str
) -> None:
    """Any ids behind a prompt have the text that they add to it."""
    tokenizer = kinds[kind]
    renderer = Renderer(tokenizer, template=None)
    prompt = renderer.prompt([user("the sky is")])
    ordinary = sorted({*tokenizer.get_vocab().values()} - tokenizer.added_tokens_decoder.keys())
    special = tokenizer.convert_tokens_to_ids(["<think>", "</think>"])

    @FEW
    @given(st.lists(st.sampled_from(ordinary), max_size=6), st.booleans())
    @example([tokenizer.convert_tokens_to_ids(f"{BLANK}the")], False)
    def check(ids: list[int], thinks: bool) -> None:
        before = tokenizer.decode(prompt)
        added = tokenizer.decode([*prompt, *ids])
        assume(added.startswith(before))
        assert renderer.text([*ids, tokenizer.eos_token_id], after=prompt) == added.removeprefix(before)
        ends = renderer.text_ends(ids, after=prompt)
        assert [0, *ends][-1] == len(added) - len(before)
        if thinks and kind not in (*AFTER_SPECIAL, "WordPiece"):
            ids = [special[0], *ids, special[1]]
            added = tokenizer.decode([*prompt, *ids]).removeprefix(before)
            assert renderer.text(ids, after=prompt) == added
            assert added.count("think>") == 2
        dropped = Renderer(tokenizer, template=None, special_tokens="drop")
        assert "think>" not in dropped.text([*special, *ids], after=prompt)

    check()


@pytest.mark.parametrize("kind", AFTER_SPECIAL)
def test_behind_a_control_token_the_blank_of_the_tokenizer_is_no_text(
    kinds: dict[str, PreTrainedTokenizerFast], kind: str
) -> None:
    renderer = chat(kinds[kind], "special")
    for text in ("the sky", "<think>the sky</think>is\nblue"):
        ids, mask = renderer.loss_mask([user("hi"), assistant(text)])
        assert renderer.text(ids[mask], after=ids[~mask]) == text
        ends = renderer.text_ends(ids[mask], after=ids[~mask])
        assert ends[-1] == len(text)


@pytest.mark.parametrize("kind", [*KINDS, "blank behind", "Unigram"])
def test_what_an_environment_says_follows_the_sampled_ids(
    kinds: dict[str, PreTrainedTokenizerFast], kind: str
) -> None:
    tokenizer = kinds[kind]
    renderer = Renderer(tokenizer, template=None)
    prompt = renderer.prompt([user("the sky")])
    for sampled, said in ((" is", " blue"), (" is ", "blue"), (" i", "s blue"), ("", ", like")):
        ids = np.concatenate([prompt, renderer.response(sampled, [user("the sky")])[:-1]])
        longer = renderer.extend(ids, user(said))
        assert longer[: len(ids)].tolist() == ids.tolist()
        assert renderer.decode(longer).removeprefix("<s>").strip() == f"the sky{sampled}{said}".strip()
        assert renderer.extend(ids, user(said)).tolist() == longer.tolist()


@pytest.mark.parametrize("kind", ["Llama 2", "Metaspace first, split", "Unigram"])
def test_a_reward_model_without_a_template_reads_the_whole_text(
    kinds: dict[str, PreTrainedTokenizerFast], kind: str
) -> None:
    tokenizer = kinds[kind]
    renderer = Renderer(tokenizer, template=None)
    whole = tokenizer("the sky is blue")["input_ids"]
    assert renderer.whole([user("the sky is")], " blue").tolist() == [*whole, tokenizer.eos_token_id]
    spelled = renderer.whole([user("the sky is")], " <s>blue</s>").tolist()
    assert not {*tokenizer.all_special_ids} & {*spelled[len(tokenizer("the sky is")["input_ids"]) : -1]} - {
        tokenizer.unk_token_id
    }, "what a policy spells out ends nothing"
    inner = renderer.within([user("the sky is")], " blue")
    assert [*tokenizer("the sky is")["input_ids"], *inner.tolist()] == whole


def test_a_vocabulary_without_a_blank_or_an_unknown_token(tmp_path: Path) -> None:
    built = Tokenizer(models.WordLevel({letter: id for id, letter in enumerate("0123456789+=")}))
    built.pre_tokenizer, built.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    renderer = Renderer(PreTrainedTokenizerFast(tokenizer_object=built), template=None)
    ids, mask = renderer.loss_mask([user("1+2="), assistant("3")])
    assert (renderer.decode(ids), renderer.text(ids[mask], after=ids[~mask])) == ("1+2=3", "3")


def test_a_tokenizer_that_changes_texts_is_known(
    kinds: dict[str, PreTrainedTokenizerFast], tmp_path: Path
) -> None:
    """Those that keep every text are not named, apart from what loses the blank at a beginning, or composes
    characters."""
    changed = {name: [*changed_texts(tokenizer)] for name, tokenizer in kinds.items()}
    for name in KINDS:
        for text, now in changed[name]:
            is_composed = name == "byte-level, composed" and unicodedata.normalize("NFC", text) == now
            assert is_composed or text.removeprefix(" ") == now
    assert [name for name in KINDS if changed[name] and name != "byte-level, composed"] == [
        "Metaspace always",
        "Metaspace first",
        "Metaspace first, split",
    ]
    assert all(len(changed[name]) > 1 for name in LOSSY)
    for name, tokenizer in kinds.items():
        for text, _ in changed[name]:
            assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) != text
    for name in CHANGING:
        assert [*changed_texts(save_kind(name, tmp_path / "other"))], name
    for takes in ("lstrip", "rstrip"):
        assert [*changed_texts(save_kind("byte-level", tmp_path / "taking", takes=takes))]


@pytest.mark.parametrize("name", ["stories260k", "tinystories656k"])
def test_pretrained_tokenizers(name: str) -> None:
    if not (REAL / name).exists():
        pytest.skip("no pretrained models lie beside the project")
    tokenizer = AutoTokenizer.from_pretrained(REAL / name)
    story = 'Once upon a time, there was a little girl. She said "I like it, too!"\nThe end'
    for place in range(1, len(story)):
        renderer = Renderer(tokenizer, template=None)
        ids, mask = renderer.loss_mask([user(story[:place]), assistant(story[place:])])
        assert tokenizer.decode(ids[:-1]) == tokenizer.decode(tokenizer(story)["input_ids"])
        assert renderer.text(ids[mask], after=ids[~mask]) == story[place:]


def test_a_tokenizer_of_complete_words_knows_the_blank_between_two() -> None:
    """No text of one character is a token of it."""
    inner = Tokenizer(
        models.WordLevel({word: id for id, word in enumerate(["<e>", "w1", "w2", "w3"])}, "<e>")
    )
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    renderer = Renderer(PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<e>"), template=None)
    prompt = renderer.prompt([Message("user", "w1 w2")])
    assert renderer.text([3, 1], prompt) == " w3 w1"
    assert renderer.within([Message("user", "w1 w2")], " w3 w1").tolist() == [3, 1]
    assert renderer.recorded([Message("user", "w1 w2")], " w3 w1")[0].tolist() == [1, 2, 3, 1, 0]
