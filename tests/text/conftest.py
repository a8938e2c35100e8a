"""Fixtures of the tests of text/."""

import pytest
from chats import LLAMA_SPECIALS, Family, save_byte_level


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return save_byte_level(tmp_path_factory.mktemp("plain"), bos_token="<s>")


@pytest.fixture(scope="module")
def llama32(tmp_path_factory):
    return Family(
        tmp_path_factory.mktemp("llama32"),
        "llama32",
        LLAMA_SPECIALS,
        "<|eot_id|>",
        bos_token="<|begin_of_text|>",
    )
