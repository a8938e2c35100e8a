"""The number of characters that are complete after each token, for three kinds of tokenizers."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from oat.text.decoding import moved_ends, text_ends
from oat.text.renderer import Renderer

STOP = "##"


def saved(folder: Path, built: Tokenizer) -> PreTrainedTokenizerFast:
    PreTrainedTokenizerFast(tokenizer_object=built, unk_token="<unk>", eos_token="</s>").save_pretrained(
        folder
    )
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def with_bytes(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    """Return a tokenizer as Llama 2 has it: words begin with a mark, unknown characters become bytes, and the
    first space of a text is dropped."""
    names = ["<unk>", "</s>", *[f"<0x{byte:02X}>" for byte in range(256)], "▁", *"abc#\n", "▁a", "bc"]
    vocabulary = {token: i for i, token in enumerate(names)}
    built = Tokenizer(models.BPE(vocabulary, [("▁", "a"), ("b", "c")], unk_token="<unk>", byte_fallback=True))
    built.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    built.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return saved(tmp_path_factory.mktemp("bytes"), built)


@pytest.fixture(scope="module")
def of_words(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    """Return a tokenizer whose decoder puts spaces between words, as BERT's does."""
    names = ["<unk>", "</s>", "ab", "##c", "##ü", "é", "!", ".", "#"]
    built = Tokenizer(models.WordPiece({token: i for i, token in enumerate(names)}, unk_token="<unk>"))
    built.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    return saved(tmp_path_factory.mktemp("words"), built)


def slowly(renderer: Renderer, ids: Sequence[int]) -> list[int]:
    """Return the ends by decoding every beginning of the ids."""
    text, best, found = renderer.text(np.array(ids)), 0, []
    for t in range(len(ids)):
        kept = [i for i in ids[: t + 1] if i not in renderer.stop_ids]
        beginning = renderer.decode(kept)
        size = 0
        while size < min(len(beginning), len(text)) and beginning[size] == text[size]:
            size += 1
        best = max(best, size)
        found.append(best)
    return found


@pytest.mark.parametrize("kind", ["tokenizer", "with_bytes", "of_words"])
def test_as_if_every_beginning_were_decoded(kind: str, request: pytest.FixtureRequest) -> None:
    renderer = Renderer(request.getfixturevalue(kind), template=None, stop=(STOP,))
    ids = st.lists(st.integers(0, renderer.num_tokens - 1), max_size=12)

    @settings(max_examples=150, deadline=None)
    @given(ids)
    def check(ids: list[int]) -> None:
        ends = renderer.text_ends(np.array(ids, dtype=np.int32))
        assert ends.dtype == np.int32
        assert ends.tolist() == slowly(renderer, ids)

    check()


TEXTS = ["", "a", "naïve 🌾 café\n", "日本語\n#### 4", "one\n\ntwo ## three", "\u200d👩‍🌾\ufffd!"]


@pytest.mark.parametrize("kind", ["tokenizer", "with_bytes"])
@pytest.mark.parametrize("text", TEXTS)
def test_texts_of_many_scripts(kind: str, text: str, request: pytest.FixtureRequest) -> None:
    renderer = Renderer(request.getfixturevalue(kind), template=None, stop=(STOP,))
    ids = renderer.response(text)
    ends = renderer.text_ends(ids)
    assert ends.tolist() == slowly(renderer, ids.tolist())
    assert ends[-1] == len(renderer.text(ids)) == len(text.split(STOP)[0])


def test_a_character_of_several_tokens_is_complete_after_the_last(tokenizer: PreTrainedTokenizerFast) -> None:
    renderer = Renderer(tokenizer, template=None)
    ids = renderer.response("🌾")
    assert len(ids) == 5, "four bytes and the end"
    assert renderer.text_ends(ids).tolist() == [0, 0, 0, 1, 1]
    assert renderer.text_ends(ids[:0]).tolist() == []


def test_a_decoder_that_changes_its_mind_is_followed() -> None:
    """A text that later ids change is compared with what came out in the end."""

    def decode(ids: Sequence[int]) -> str:
        text = "".join(map(str, ids))
        return text.replace("12", "x")

    ids = [3, 1, 2, 1, 4]
    assert text_ends(ids, decode(ids), decode, [decode([i]) for i in ids]).tolist() == [1, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("text", "other", "expected"),
    [
        ("ab", "ab", [0, 1, 2]),
        ("ab c", " ab  c\n", [0, 2, 3, 3, 7]),
        ("<think>\n\n</think>\n\nab", "ab", [0] * 18 + [0, 0, 1, 2]),
        ("a b\n", "a b", [0, 1, 1, 3, 3]),
        ("ab", "  ", None),
        ("ab", "b a", None),
    ],
)
def test_ends_of_another_text_by_hand(text: str, other: str, expected: list[int] | None) -> None:
    moved = moved_ends(np.arange(len(text) + 1, dtype=np.int32), text, other)
    if other.isspace():
        assert moved is not None
        assert set(moved.tolist()) == {len(other)}
    else:
        assert (None if moved is None else moved.tolist()) == expected
