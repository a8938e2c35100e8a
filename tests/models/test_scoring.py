"""Reward models: which token gives the score, how texts are read, and equal scores in any batch."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_models import CHARACTERS, FAMILIES, build_config, build_tokenizer, save_model, save_reward_model
from tokenizers import processors
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    DebertaV2Config,
    GPT2Config,
    PreTrainedTokenizerFast,
    RobertaConfig,
    XLMRobertaConfig,
)

from oat.errors import ConfigError, ModelError, OatWarning, OracleError, TemplateError
from oat.models.scoring import Encoded, Scorer, batches, hash_of_files, last_attended
from oat.types import Message

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m['role'][0] + ':' + m['content'] + eos_token + ' ' }}{% "
    "endfor %}"
)
PADS = {"the pad is the end": "<eos>", "a pad of its own": "z", "no pad": None}
ENCODERS = {
    "bert": BertConfig(
        vocab_size=44,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=45,
        max_position_embeddings=48,
    ),
    "deberta": DebertaV2Config(
        **{
            "vocab_size": 44,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 45,
            "type_vocab_size": 0,
        },
        **{
            "max_position_embeddings": 48,
            "position_biased_input": False,
            "relative_attention": True,
            "pos_att_type": ["p2c", "c2p"],
        },
    ),
}


def rows_of(*lengths: int, last: int = 0) -> list[Encoded]:
    """Return rows of these lengths. Each ends with the id `last`, the end of text."""
    generator = np.random.default_rng(sum(lengths))
    return [
        Encoded(np.append(generator.integers(1, 26, length - 1), last).astype(np.int32)) for length in lengths
    ]


def slow(path: str, rows: list[Encoded], label: int = 0) -> list[float]:
    """Score one row at a time without padding: the hidden state of the last token times the head, summed in
    Python."""
    module = AutoModelForSequenceClassification.from_pretrained(path).eval()
    head, found = module.score.weight[label].double().tolist(), []
    for row in rows:
        with torch.no_grad():
            hidden = module.base_model(
                input_ids=torch.from_numpy(row.ids.astype(np.int64))[None]
            ).last_hidden_state[0, -1]
        found.append(sum(a * b for a, b in zip(hidden.double().tolist(), head, strict=True)))
    return found


def tokenizer_of(pad: str | None) -> PreTrainedTokenizerFast:
    tokenizer = build_tokenizer()
    if pad is not None:
        tokenizer.pad_token = pad
    return tokenizer


def test_the_last_attended_token_by_hand() -> None:
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [0, 0, 1, 1], [0, 1, 1, 0], [1, 0, 1, 0]])
    assert last_attended(mask).tolist() == [3, 1, 3, 2, 2]


@pytest.mark.inventory(45)
@pytest.mark.parametrize("pad", PADS.values(), ids=PADS)
@pytest.mark.parametrize("family", [*FAMILIES, "gpt2"])
def test_left_and_right_padding_score_the_last_token(tmp_path: Path, family: str, pad: str | None) -> None:
    """The score is that of a row's last token, for any padding id and side, even if the padding id equals the
    last token."""
    config = (
        GPT2Config(vocab_size=44, n_embd=32, n_layer=2, n_head=4, n_positions=48)
        if family == "gpt2"
        else build_config(family)
    )
    config.pad_token_id = None if pad is None else CHARACTERS.index(pad)
    path = save_reward_model(tmp_path, config, tokenizer_of(pad))
    rows, scorer = rows_of(3, 9, 1, 6), Scorer(path)
    expected = torch.tensor(slow(path, rows), dtype=torch.float32)
    assert expected.std() > 0.05
    torch.testing.assert_close(torch.tensor(scorer.score(rows)), expected, rtol=0, atol=1e-5)
    for fill in (0, 7):
        for side in (0, 1):
            ids, mask = torch.full((len(rows), 12), fill), torch.zeros(len(rows), 12, dtype=torch.long)
            for number, row in enumerate(rows):
                place = slice(12 - len(row.ids), 12) if side else slice(0, len(row.ids))
                ids[number, place], mask[number, place] = torch.from_numpy(row.ids.astype(np.int64)), 1
            torch.testing.assert_close(scorer.scores(ids, mask), expected, rtol=0, atol=1e-5)


def test_transformers_scores_another_token_where_the_end_pads(tmp_path: Path) -> None:
    """If the end of text is also the padding, transformers scores another token. So `oat` computes the score
    from hidden states itself."""
    config = build_config("llama")
    config.pad_token_id = 0
    path, rows = save_reward_model(tmp_path, config, tokenizer_of("<eos>")), rows_of(7, 7)
    module = AutoModelForSequenceClassification.from_pretrained(path).eval()
    with torch.no_grad():
        theirs = module(input_ids=torch.tensor(np.stack([row.ids for row in rows]).astype(np.int64))).logits[
            :, 0
        ]
    assert (theirs - torch.tensor(Scorer(path).score(rows))).abs().max() > 0.01


@pytest.mark.sample("llama", seconds=2.2)
@pytest.mark.parametrize("family", ["llama", "bert", "deberta"])
def test_scores_are_equal_at_any_batching(tmp_path: Path, family: str) -> None:
    config = ENCODERS.get(family) or build_config(family)
    path = save_reward_model(tmp_path, config, tokenizer_of("z"))
    rows = rows_of(*(1 + number * 7 % 40 for number in range(30)))
    alone = [Scorer(path).score([row])[0] for row in rows]
    for tokens in (1, 64, 100_000):
        torch.testing.assert_close(
            torch.tensor(Scorer(path, batch_tokens=tokens).score(rows)),
            torch.tensor(alone),
            rtol=0,
            atol=1e-5,
        )
    ranks = np.argsort([score for score in alone if score is not None])
    if family == "llama":
        assert ranks.tolist() == np.argsort(slow(path, rows)).tolist()


def test_batches_by_hand() -> None:
    assert list(batches([3, 9, 1, 6, 6], 18)) == [[1, 3], [4, 0, 2]]
    assert list(batches([3, 9, 1], 1)) == [[1], [0], [2]]
    assert list(batches([], 10)) == []


def test_bfloat16_is_near(tmp_path: Path) -> None:
    path, rows = save_reward_model(tmp_path, build_config("llama"), scale=1.0), rows_of(5, 12, 30)
    half, whole = (torch.tensor(Scorer(path, dtype=dtype).score(rows)) for dtype in ("bfloat16", "float32"))
    assert 0 < (half - whole).abs().max() < 0.05


@pytest.mark.parametrize("family", ENCODERS)
def test_an_encoder_reads_a_pair_as_its_tokenizer_makes_it(tmp_path: Path, family: str) -> None:
    """An encoder reads [CLS] prompt [SEP] response [SEP], here with ids 1 and 2. It gives the scores of the
    model's own code."""
    tokenizer = build_tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="a $A b", pair="a $A b $B:1 b:1", special_tokens=[("a", 1), ("b", 2)]
    )
    path = save_reward_model(tmp_path, ENCODERS[family], tokenizer)
    scorer, module = Scorer(path), AutoModelForSequenceClassification.from_pretrained(path).eval()
    found = scorer.encode([Message("user", "cd")], "e<eos>f")
    ids = [
        1,
        3,
        4,
        2,
        5,
        *tokenizer("<eos>", split_special_tokens=True, add_special_tokens=False)["input_ids"],
        6,
        2,
    ]
    assert 0 not in ids
    assert found.ids.tolist() == ids
    types = torch.tensor([[0, 0, 0, 0] + [1] * (len(ids) - 4)])
    given = {"input_ids": torch.tensor([ids]), **({"token_type_ids": types} if family == "bert" else {})}
    with torch.no_grad():
        expected = module(**given).logits[0, 0].item()
    other = scorer.encode([Message("user", "cdcdcdcd")], "eeeeeee")
    assert scorer.score([other, found])[1] == pytest.approx(expected, abs=1e-5)
    with pytest.raises(TemplateError, match="no chat template"):
        scorer.encode([Message("system", "a"), Message("user", "b")], "c")


def test_a_template_is_read_to_its_end_with_one_begin(tmp_path: Path) -> None:
    """A tokenizer adds its own begin-of-text token to every text, but a templated text has only one. A
    response cannot contain control tokens."""
    tokenizer = build_tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="z $A", special_tokens=[("z", CHARACTERS.index("z"))]
    )
    tokenizer.bos_token, tokenizer.chat_template = "z", TEMPLATE
    path = save_reward_model(tmp_path, build_config("llama"), tokenizer)
    scorer = Scorer(path)
    text = "zu?ab<eos> a?c<eos> "  # ":" is unknown to this tokenizer and becomes "?"
    expected = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert scorer.encode([Message("user", "ab")], "c").ids.tolist() == expected
    assert scorer.encode([Message("user", "ab")], "c<eos> a").ids.tolist().count(0) == 2


def test_a_plain_text_ends_with_the_end_of_text(tmp_path: Path) -> None:
    scorer = Scorer(save_reward_model(tmp_path, build_config("llama")))
    assert scorer.encode([Message("user", "ab")], "c").ids.tolist() == [1, 2, 3, 0]


def test_of_several_labels_one_is_named(tmp_path: Path) -> None:
    path = save_reward_model(tmp_path, build_config("llama"), labels=3)
    with pytest.raises(ConfigError, match=r"has 3 labels, 0 \(LABEL_0\), .*say by `label`"):
        Scorer(path)
    with pytest.raises(ConfigError, match="no label 3"):
        Scorer(path, label=3)
    rows = rows_of(4, 8)
    assert Scorer(path, label=2).score(rows) == pytest.approx(slow(path, rows, label=2), abs=1e-5)


def test_a_normalisation_that_transformers_does_not_read_is_said(tmp_path: Path) -> None:
    """OpenRLHF writes a mean and a deviation of scores into `config.json`, and its own code divides by it."""
    config = build_config("llama")
    config.mean, config.std = 0.0, 1.0
    Scorer(save_reward_model(tmp_path / "neutral", config))
    config.mean, config.std = 1.5, 2.0
    with pytest.warns(OatWarning, match=r"the mean 1\.5 and the std 2\.0 of scores"):
        Scorer(save_reward_model(tmp_path / "normalised", config))


def test_what_is_longer_than_the_model_reads_has_no_score(tmp_path: Path) -> None:
    path, rows = save_reward_model(tmp_path, build_config("llama")), rows_of(5, 49, 48, 7)
    assert [score is None for score in Scorer(path).score(rows)] == [False, True, False, False]
    assert [score is None for score in Scorer(path, max_tokens=6).score(rows)] == [False, True, True, True]
    with pytest.raises(ConfigError, match=r"max_tokens is 49, and the model .* has 48 positions"):
        Scorer(path, max_tokens=49)


@pytest.mark.parametrize("cls", [RobertaConfig, XLMRobertaConfig])
def test_positions_that_begin_behind_the_padding(tmp_path: Path, cls: type) -> None:
    """The positions of such a model begin after its padding id, so two of 50 belong to no token. A text of 48
    tokens gets a score, and a text of 49 tokens gets none."""
    sizes = {
        "vocab_size": 44,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 45,
    }
    scorer = Scorer(
        save_reward_model(
            tmp_path, cls(**sizes, max_position_embeddings=50, pad_token_id=1), tokenizer_of("a")
        )
    )
    rows = [Encoded(np.full(size, 5, dtype=np.int32)) for size in (48, 49)]
    assert [score is None for score in scorer.score(rows)] == [False, True]


def test_the_version_follows_the_files(tmp_path: Path) -> None:
    path = save_reward_model(tmp_path, build_config("llama"))
    first = hash_of_files(path)
    assert (len(first), hash_of_files(path)) == (16, first)
    save_reward_model(tmp_path, build_config("llama"), scale=2.9)
    assert hash_of_files(path) != first


def test_models_that_are_none_are_refused(tmp_path: Path) -> None:
    """Refused are: a language model without a score head, another architecture, another model's tokenizer,
    and weights that are not finite."""
    config = build_config("llama")
    config.num_labels = 1
    with pytest.raises(ModelError, match=r"lack 1 tensors, for example `score\.weight`"):
        Scorer(save_model(tmp_path / "lm", config)).score(rows_of(3))
    with pytest.raises(ModelError, match="there is no directory"):
        Scorer(str(tmp_path / "none"))
    with pytest.raises(ModelError, match=r"up to id 39 .*embeddings have 30 rows"):
        Scorer(save_reward_model(tmp_path / "small", build_config("llama", vocab_rows=30))).score(rows_of(3))
    with pytest.raises(
        ModelError,
        match=(
            r"40 tokens, and the model's embeddings have 512 rows: .*give the tokenizer that belongs to the "
            r"model"
        ),
    ):
        Scorer(save_reward_model(tmp_path / "large", build_config("llama", vocab_rows=512))).score(rows_of(3))
    with pytest.raises(ModelError, match="not finite"):
        Scorer(save_reward_model(tmp_path / "nan", build_config("llama"), scale=float("nan"))).score(
            rows_of(3)
        )
    (tmp_path / "bart").mkdir()
    (tmp_path / "bart" / "config.json").write_text(json.dumps({"model_type": "bart", "num_labels": 1}))
    build_tokenizer().save_pretrained(tmp_path / "bart")
    with pytest.raises(
        ModelError, match=r"`bart`, an encoder with a decoder, which is not supported; give a decoder"
    ):
        Scorer(str(tmp_path / "bart"))
    (tmp_path / "clip").mkdir()
    (tmp_path / "clip" / "config.json").write_text(json.dumps({"model_type": "clip"}))
    build_tokenizer().save_pretrained(tmp_path / "clip")
    with pytest.raises(ModelError, match="`clip`, which is no reward model"):
        Scorer(str(tmp_path / "clip"))


def test_a_score_that_is_not_finite_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scorer = Scorer(save_reward_model(tmp_path, build_config("llama")))
    monkeypatch.setattr(scorer, "scores", lambda *_: torch.tensor([float("inf")]))
    with pytest.raises(OracleError, match="gives inf"):
        scorer.score(rows_of(3))
