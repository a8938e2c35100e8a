"""Whether a tokenizer fits a model: published pairs pass, impossible ones are refused, and doubtful ones give
a warning."""

import warnings
from contextlib import nullcontext
from typing import Any

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from oat.errors import ModelError, OatWarning
from oat.text.renderer import Renderer
from oat.text.vocabulary import check_vocabulary, num_ids


def tokenizer_of(*ids: int) -> Any:
    words = Tokenizer(models.WordLevel({f"w{id}": id for id in ids}, unk_token=f"w{ids[0]}"))
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token=f"w{ids[0]}")


PUBLISHED = {
    "OPT": (50_265, 50_272),
    "MPT": (50_279, 50_432),
    "Qwen3": (151_669, 151_936),
    "Qwen2.5, large": (151_665, 152_064),
    "BLOOM": (250_680, 250_880),
    "DeepSeek MoE": (100_015, 102_400),
    "Phi-3": (32_011, 32_064),
    "Llama 3": (128_256, 128_256),
    "HyenaDNA": (12, 16),
    "a small alphabet, to a multiple of 128": (15, 128),
}


@pytest.mark.sample(slow=("Qwen2.5, large", "BLOOM"), seconds=1.2)
@pytest.mark.parametrize(("tokens", "rows"), PUBLISHED.values(), ids=PUBLISHED)
def test_embeddings_that_are_filled_up_are_normal(tokens: int, rows: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_vocabulary(tokenizer_of(*range(tokens)), rows, "its tokenizer")


def test_a_share_that_one_published_model_has_is_only_said() -> None:
    with pytest.warns(OatWarning, match="428 tokens, and the model's embeddings have 800 rows"):  # SELFormer
        check_vocabulary(tokenizer_of(*range(428)), 800, "its tokenizer")


@pytest.mark.parametrize(
    ("tokens", "rows", "expected"),
    [
        pytest.param(15, 512, "15 tokens, and the model's embeddings have 512 rows", id="a teaspoon"),
        pytest.param(32_000, 128_256, "cannot be the tokenizer of this model", id="Llama 2 beside Llama 3"),
        pytest.param(50_257, 151_936, "cannot be the tokenizer of this model", id="GPT-2 beside Qwen3"),
        pytest.param(
            32_768,
            32_000,
            r"up to id 32767 \('w32767'\), and the model's embeddings have 32000 rows",
            id="Mistral beside Llama 2",
        ),
    ],
)
def test_what_cannot_be_the_models_is_refused(tokens: int, rows: int, expected: str) -> None:
    with pytest.raises(ModelError, match=expected):
        check_vocabulary(tokenizer_of(*range(tokens)), rows, "its tokenizer")


@pytest.mark.parametrize(("rows", "fits"), [(300, True), (299, False)])
def test_ids_with_holes_count_up_to_the_greatest(rows: int, fits: bool) -> None:
    """A vocabulary with unused ids before its special tokens, as tiktoken's have, counts up to its largest
    id."""
    tokenizer = tokenizer_of(*range(250), 299)
    assert (len(tokenizer), num_ids(tokenizer)) == (251, 300)
    assert Renderer(tokenizer, template=None).num_tokens == 300
    with nullcontext() if fits else pytest.raises(ModelError, match="up to id 299"):
        check_vocabulary(tokenizer, rows, "its tokenizer")
