"""Small tokenizers of the kinds that published models have, saved to disk and loaded as a user's are."""

import json
from pathlib import Path

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import AutoTokenizer, PreTrainedTokenizerFast

TEXTS = [
    "the sky is blue, like the sea.\nthe cat sat on the mat",
    "Once upon a time there were 12 cats and 300 mice; it's said that they didn't eat.",
    "[INST] what is 12 + 30? [/INST] it is 42",
    "user: hi\nassistant: hello there\n\n",
] * 5
SPECIALS = ["<unk>", "<s>", "</s>", "<|user|>", "<|assistant|>", "<think>", "</think>"]
BLANK = "\u2581"
MARKS = normalizers.Sequence([normalizers.Prepend(BLANK), normalizers.Replace(" ", BLANK)])
UNMARKS = [decoders.Replace(BLANK, " "), decoders.ByteFallback(), decoders.Fuse()]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def _bpe(
    normalizer=None, pre_tokenizer=None, decoder=None, *, strips=True, size=420, alphabet=(), learn=None
):
    """Return a byte-fallback BPE tokenizer, whose merges are learned with `learn` as the pre-tokenizer."""
    built = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    if normalizer is not None:
        built.normalizer = normalizer
    if learn or pre_tokenizer:
        built.pre_tokenizer = learn or pre_tokenizer
    built.train_from_iterator(
        TEXTS,
        trainers.BpeTrainer(
            vocab_size=size,
            special_tokens=[*SPECIALS, *BYTES],
            initial_alphabet=list(alphabet),
            show_progress=False,
        ),
    )
    state = json.loads(built.to_str())
    # the trainer takes bytes as special tokens; published models have them as ordinary ones
    state["added_tokens"] = [token for token in state["added_tokens"] if token["content"] in SPECIALS]
    built = Tokenizer.from_str(json.dumps(state))
    if learn and pre_tokenizer is None:
        built.pre_tokenizer = pre_tokenizers.Sequence([])
    elif pre_tokenizer is not None:
        built.pre_tokenizer = pre_tokenizer
    strip = [decoders.Strip(" ", 1, 0)] if strips else []
    built.decoder = decoder or decoders.Sequence([*UNMARKS, *strip])
    return built


def _byte_level(normalizer=None, *, blank=False, regex=None):
    built = Tokenizer(models.BPE())
    if normalizer is not None:
        built.normalizer = normalizer
    own = pre_tokenizers.ByteLevel(add_prefix_space=blank, use_regex=regex is None)
    built.pre_tokenizer = (
        own
        if regex is None
        else pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(regex), "isolated"), own])
    )
    built.decoder = decoders.ByteLevel()
    built.train_from_iterator(
        TEXTS,
        trainers.BpeTrainer(
            vocab_size=420,
            special_tokens=SPECIALS,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return built


def _metaspace(scheme, *, split):
    space = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=split)
    return _bpe(pre_tokenizer=space, strips=scheme != "never", alphabet=BLANK)


def _unigram(*, collapses):
    built = Tokenizer(models.Unigram())
    own = [normalizers.NFKC()]
    if collapses:
        own.append(normalizers.Replace(Regex(" {2,}"), " "))
    built.normalizer = normalizers.Sequence(own)
    built.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    built.decoder = decoders.Metaspace(prepend_scheme="always")
    built.train_from_iterator(
        TEXTS,
        trainers.UnigramTrainer(
            vocab_size=200, special_tokens=SPECIALS, unk_token="<unk>", show_progress=False
        ),
    )
    return built


def _word_piece():
    built = Tokenizer(models.WordPiece(unk_token="<unk>"))
    built.normalizer = normalizers.BertNormalizer(lowercase=True)
    built.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    built.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    built.train_from_iterator(
        TEXTS, trainers.WordPieceTrainer(vocab_size=300, special_tokens=SPECIALS, show_progress=False)
    )
    return built


def _blank_behind():
    """Return a tokenizer whose words end with the blank, and which drops characters that it does not know."""
    names = [*SPECIALS, BLANK, *"abcdefghijklmnopqrstuvwxyzIOST.,:;?'+[]/\n0123456789"]
    words = ["the", "is", "sky", "cat", "a"]
    merges = []
    for word in words:
        made = word[0]
        for letter in [*word[1:], BLANK]:
            merges.append((made, letter))
            made += letter
            if made not in names:
                names.append(made)
    built = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, [*dict.fromkeys(merges)]))
    built.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    built.decoder = decoders.Sequence([*UNMARKS, decoders.Strip(" ", 1, 0)])
    return built


CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""The pattern by which Llama 3 and Qwen split a text into words."""

KINDS = {
    "byte-level": _byte_level,
    "byte-level, composed": lambda: _byte_level(normalizers.NFC(), regex=CL100K),
    "Llama 2": lambda: _bpe(MARKS, alphabet=BLANK, learn=pre_tokenizers.Split(BLANK, "merged_with_next")),
    "words joined": lambda: _bpe(MARKS, alphabet=BLANK),
    "Metaspace always": lambda: _metaspace("always", split=True),
    "Metaspace first": lambda: _metaspace("first", split=False),
    "Metaspace first, split": lambda: _metaspace("first", split=True),
    "Metaspace never": lambda: _metaspace("never", split=False),
    "Gemma": lambda: _bpe(
        normalizers.Replace(" ", BLANK),
        pre_tokenizers.Split(" ", "merged_with_previous"),
        strips=False,
        alphabet=BLANK,
    ),
}
"""Tokenizers that keep every text, apart from a normaliser's NFC, by name."""

LOSSY = {
    "blank before": lambda: _byte_level(blank=True),
    "blank behind": _blank_behind,
    "Unigram": lambda: _unigram(collapses=False),
    "T5": lambda: _unigram(collapses=True),
    "WordPiece": _word_piece,
}
"""Tokenizers that change some texts, by name."""


CHANGING = {
    "strips the end": normalizers.Strip(left=False, right=True),
    "strips the beginning": normalizers.Strip(left=True, right=False),
    "line ends": normalizers.Replace("\r\n", "\n"),
    "no-break space": normalizers.Replace("\u00a0", " "),
    "quotation marks": normalizers.Replace(Regex("[\u201c\u201d]"), '"'),
    "tabs": normalizers.Replace("\t", "    "),
    "NFD": normalizers.NFD(),
    "NFKC": normalizers.NFKC(),
    "zero width": normalizers.Replace("\u200b", ""),
}
"""Normalisers that change some texts, each with a byte-level tokenizer (`save_kind`), by name."""


def save_kind(
    name: str, folder: Path, *, begins: bool = True, ends: str = "", takes: str = "", **options
) -> PreTrainedTokenizerFast:
    """Save a tokenizer of one of the kinds, and return it as it is loaded.

    Args:
        begins: True: it puts <s> before every text.
        ends: special tokens with blanks between them, which it puts behind every text.
        takes: "lstrip", "rstrip" or both: on which sides its special tokens take white space away.
    """
    kinds = {**KINDS, **LOSSY}
    built = kinds[name]() if name in kinds else _byte_level(CHANGING[name])
    sides = {side: side in takes for side in ("lstrip", "rstrip")}
    built.add_special_tokens([AddedToken(text, normalized=False, special=True, **sides) for text in SPECIALS])
    if begins or ends:
        frame = f"{'<s> ' if begins else ''}$A {ends}"
        tokens = [(text, built.token_to_id(text)) for text in frame.split() if text != "$A"]
        built.post_processor = processors.TemplateProcessing(single=frame.strip(), special_tokens=tokens)
    named = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", **options}
    PreTrainedTokenizerFast(tokenizer_object=built, **named).save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)
