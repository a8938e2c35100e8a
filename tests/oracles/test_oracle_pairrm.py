"""PairRM, compared with a forward pass from the published format, of one row at a time without padding."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from fixtures import World, make_group, make_questions, oat
from safetensors.torch import load_file, save_file
from tiny_models import build_tokenizer
from tokenizers import processors
from transformers import DebertaV2Config, DebertaV2Model

from oat.errors import ConfigError, ModelError, OatWarning, OracleError
from oat.models.pairrm import PairRMModel
from oat.oracles.make import build_oracle
from oat.oracles.pairrm import PairRM
from oat.testing import check_oracle

RECIPE = Path(__file__).parents[2] / "configs" / "reward_models" / "dpo_pairrm.yaml"
SPECIAL = ["[CLS]", "[SEP]", "[PAD]", "<|source|>", "<|candidate1|>", "<|candidate2|>"]
CLS, SEP, PAD, SOURCE, FIRST, SECOND = range(40, 46)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Save a random model of the architecture, with two tasks and the file layout of the hub's model. Return
    its path."""
    folder = tmp_path_factory.mktemp("pairrm")
    tokenizer = build_tokenizer()
    tokenizer.add_special_tokens(
        {
            "additional_special_tokens": SPECIAL,
            "pad_token": "[PAD]",
            "cls_token": "[CLS]",
            "sep_token": "[SEP]",
        }
    )
    single = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", CLS), ("[SEP]", SEP)]
    )
    tokenizer.backend_tokenizer.post_processor = single
    tokenizer.save_pretrained(folder)
    config = shaped()
    config.save_pretrained(folder)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        tensors = {
            f"pretrained_model.{name}": 3 * tensor
            for name, tensor in DebertaV2Model(config).state_dict().items()
        }
        sizes = {"1.weight": (32, 64), "1.bias": (32,), "4.weight": (2, 32), "4.bias": (2,)}
        tensors |= {f"head_layer.{name}": torch.randn(size) for name, size in sizes.items()}
    save_file(
        {name: tensor.clone().contiguous() for name, tensor in tensors.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    return str(folder)


def shaped() -> DebertaV2Config:
    """Return the configuration of a small model, with the fields of PairRM's own configuration."""
    shape = {
        "vocab_size": 46,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 45,
        "type_vocab_size": 0,
    }
    relative = {
        "relative_attention": True,
        "position_buckets": 8,
        "pos_att_type": ["p2c", "c2p"],
        "position_biased_input": False,
    }
    own = {
        "n_tasks": 2,
        "drop_out": 0.1,
        "sep_token_id": SEP,
        "source_prefix_id": SOURCE,
        "cand_prefix_id": 45,
    }
    own |= {"cand1_prefix_id": FIRST, "cand2_prefix_id": SECOND}
    return DebertaV2Config(
        **shape,
        **relative,
        max_position_embeddings=64,
        pad_token_id=PAD,
        norm_rel_ebd="layer_norm",
        share_att_key=True,
        **own,
    )


def slow_logit(path: str, source: str, first: str, second: str) -> float:
    """Return the log-odds that the first response wins. The text's characters are its tokens, and a piece is
    [CLS] marker text [SEP]."""
    letters = build_tokenizer().get_vocab()
    pieces = [
        [CLS, marker, *(letters[c] for c in text), SEP]
        for marker, text in ((SOURCE, source), (FIRST, first), (SECOND, second))
    ]
    tensors = load_file(Path(path, "model.safetensors"))
    backbone = DebertaV2Model(DebertaV2Config.from_pretrained(path)).eval()
    backbone.load_state_dict(
        {
            name.removeprefix("pretrained_model."): t
            for name, t in tensors.items()
            if name.startswith("pretrained_model.")
        }
    )
    with torch.no_grad():
        hidden = (
            backbone(input_ids=torch.tensor([[id for piece in pieces for id in piece]]))
            .last_hidden_state[0]
            .double()
            .numpy()
        )
    weights = {name: t.double().numpy() for name, t in tensors.items() if name.startswith("head_layer.")}
    places = [1, len(pieces[0]) + 1, len(pieces[0]) + len(pieces[1]) + 1]

    def score(candidate: int) -> np.ndarray:
        both = np.concatenate([hidden[places[0]], hidden[places[candidate]]])
        inner = np.tanh(weights["head_layer.1.weight"] @ both + weights["head_layer.1.bias"])
        return weights["head_layer.4.weight"] @ inner + weights["head_layer.4.bias"]

    return float((score(1) - score(2)).mean())


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def compared(oracle: PairRM, *pairs: tuple[str, str]) -> list[float]:
    groups = [make_group(number, *pair) for number, pair in enumerate(pairs)]
    tickets = oracle.submit(make_questions(groups, "compare", 0, oracle="pairrm"))
    found = dict(oracle.collect(tickets, 1.0))
    return [found[ticket].values[0] for ticket in tickets]


PAIRS = [("a", "bcd efg"), ("hello there", "no"), ("", "x"), ("abcabcabc", "abcabcabd")]


@pytest.mark.inventory(78)
def test_probabilities_are_those_of_a_slow_forward_pass_in_both_orders(path: str) -> None:
    expected = []
    for number, (first, second) in enumerate(PAIRS):
        one, other = (
            slow_logit(path, f"p{number}", first, second),
            slow_logit(path, f"p{number}", second, first),
        )
        expected.append((sigmoid(one) + 1 - sigmoid(other)) / 2)
    assert np.std(expected) > 0.01
    for tokens in (4, 60, 10_000):
        assert compared(
            build_oracle("pairrm", {"path": path, "batch_tokens": tokens}), *PAIRS
        ) == pytest.approx(expected, abs=1e-5)
    turned = compared(PairRM(path), *((second, first) for first, second in PAIRS))
    assert [a + b for a, b in zip(expected, turned, strict=True)] == pytest.approx(
        [1.0] * len(PAIRS), abs=1e-5
    )


def test_long_texts_are_cut_as_the_format_says(path: str) -> None:
    """PairRM cuts long texts on the right. Both responses get equal parts of the length that the prompt
    leaves."""
    oracle = PairRM(path, source_tokens=8, candidate_tokens=6)  # 20 together
    ids = oracle.encode("abcdefgh", "a" * 30, "b")
    assert ids[:8] == [CLS, SOURCE, 1, 2, 3, 4, 5, SEP]
    assert ids[8:14] == [CLS, FIRST, 1, 1, 1, SEP]
    assert ids[14:] == [CLS, SECOND, 2, SEP]
    assert oracle.encode("a", "a" * 30, "b")[4:12] == [CLS, FIRST, 1, 1, 1, 1, 1, SEP]


def test_a_response_cannot_write_markers(path: str) -> None:
    ids = PairRM(path).encode("a<|candidate2|>", "b[SEP]<|source|>", "<|candidate1|>")
    assert [ids.count(id) for id in (SOURCE, FIRST, SECOND, SEP, CLS)] == [1, 1, 1, 3, 3]


@pytest.mark.slow(
    instead="the other tests of the file; tests/models/test_scoring.py scores with DeBERTa", seconds=4.1
)
def test_it_keeps_the_protocol_and_leaves_random_numbers_alone(path: str) -> None:
    before = torch.random.get_rng_state()
    check_oracle("pairrm", options={"path": path})
    assert torch.equal(torch.random.get_rng_state(), before)


def test_bfloat16_is_near(path: str) -> None:
    assert compared(PairRM(path, dtype="bfloat16"), *PAIRS) == pytest.approx(
        compared(PairRM(path), *PAIRS), abs=0.05
    )


def test_a_conversation_is_refused(path: str) -> None:
    (question,) = make_questions([make_group(0, "a", "b")], "compare", 0, oracle="pairrm")
    oracle = PairRM(path)
    tickets = oracle.submit([replace(question, messages=question.messages * 2)])
    with pytest.raises(OracleError, match=r"reads one text as the prompt, and question .* has 2 messages"):
        oracle.collect(tickets, 1.0)


def test_models_that_are_none_are_refused(path: str, world: World, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="is no PairRM"):
        PairRM(str(world.folder / "model"))
    with pytest.raises(ConfigError, match="candidate_tokens is 3"):
        PairRM(path, candidate_tokens=3)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes(Path(path, name).read_bytes())
    with pytest.raises(ModelError, match=r"has no model\.safetensors"):
        compared(PairRM(str(tmp_path)), ("a", "b"))
    tensors = load_file(Path(path, "model.safetensors"))
    save_file(
        {name: tensor for name, tensor in tensors.items() if name != "head_layer.4.bias"},
        tmp_path / "model.safetensors",
    )
    with pytest.raises(ModelError, match=r"lack `head_layer\.4\.bias`"):
        compared(PairRM(str(tmp_path)), ("a", "b"))
    config = json.loads(Path(path, "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "cand1_prefix_id": 7}))
    with pytest.raises(ModelError, match=r"does not give <\|candidate1\|> the id of"):
        PairRM(str(tmp_path))


def test_its_recipe_runs(path: str, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    flags = [
        "--model.path",
        world.folder / "model",
        "--prompts.path",
        world.folder / "train.jsonl",
        "--algorithm.prompts",
        "4",
    ]
    assert (
        oat(
            "train",
            RECIPE,
            *flags,
            "--oracle.path",
            path,
            "--sampling.max_new_tokens",
            "4",
            "--stop.max_steps",
            "2",
        )
        == 0
    )
    row = json.loads(Path("runs/dpo_pairrm/metrics.jsonl").read_text().splitlines()[-1])
    assert row["oracle/queries"] == 8


@pytest.mark.parametrize("kind", ["more", "quantised", "shards"])
def test_what_a_folder_holds_beside_the_model(path: str, tmp_path: Path, kind: str) -> None:
    shutil.copytree(path, tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    held = load_file(file)
    if kind == "more":
        held["head_layer.6.weight"] = torch.ones(2)
    if kind == "quantised":
        held["head_layer.4.weight"] = held["head_layer.4.weight"].to(torch.int8)
    if kind == "shards":
        index = {"metadata": {}, "weight_map": dict.fromkeys(held, "model-00001-of-00001.safetensors")}
        (tmp_path / "model" / "model.safetensors.index.json").write_text(json.dumps(index))
    save_file(held, file, metadata={"format": "pt"})
    model = PairRMModel(str(tmp_path / "model"), "float32", "cpu")
    if kind == "more":
        with pytest.warns(OatWarning, match=r"head_layer\.6\.weight"):
            assert model.modules
    else:
        with pytest.raises(ModelError, match={"quantised": "quantised", "shards": "nobody can tell"}[kind]):
            assert model.modules
