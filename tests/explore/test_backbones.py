"""Backbones that are loaded for features alone, compared with transformers' own models of one row."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fixtures import World, oat
from tiny_models import build_config, build_tokenizer, save_model
from tokenizers import processors
from transformers import (
    AutoModel,
    BertConfig,
    DebertaV2Config,
    DebertaV2Model,
    GPT2Config,
    RobertaConfig,
)

from oat.assemble import late_checks
from oat.errors import ConfigError, OatWarning
from oat.explore.settings import FeaturesConfig
from oat.rollout.features import load_backbone
from oat.testing.samples import make_group
from oat.types import Group, Message

SPECIAL = ["[CLS]", "[SEP]", "[PAD]", "<|source|>", "<|candidate1|>", "<|candidate2|>", "<|candidate|>"]
WIDTH, LAYERS = 16, 2
SHAPE = {
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "intermediate_size": 32,
}
DEFAULT = FeaturesConfig().max_tokens


def tokenizer_with_pairs(folder: Path) -> Any:
    tokenizer = build_tokenizer()
    tokenizer.add_special_tokens(
        {
            "additional_special_tokens": SPECIAL,
            "pad_token": "[PAD]",
            "cls_token": "[CLS]",
            "sep_token": "[SEP]",
        }
    )
    ids = [(token, tokenizer.convert_tokens_to_ids(token)) for token in ("[CLS]", "[SEP]")]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=ids
    )
    tokenizer.save_pretrained(folder)
    return tokenizer


@pytest.fixture(scope="module")
def groups() -> list[Group]:
    generator = np.random.default_rng(1)
    return [make_group(number, {"sampler": 3}, generator) for number in range(2)]


def save_encoder(folder: Path, positions: int) -> str:
    """Save a random BERT with a tokenizer of one token per character, and return its path."""
    tokenizer = tokenizer_with_pairs(folder)
    return save_random(
        folder, BertConfig(vocab_size=len(tokenizer), max_position_embeddings=positions, **SHAPE)
    )


def save_random(folder: Path, config: Any) -> str:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        AutoModel.from_config(config).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_encoder(tmp_path_factory.mktemp("encoder"), 128)


@pytest.fixture(scope="module")
def pairrm(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_pairrm(tmp_path_factory.mktemp("pairrm"), 128)


def save_pairrm(folder: Path, positions: int) -> str:
    from safetensors.torch import save_file

    tokenizer = tokenizer_with_pairs(folder)
    markers = {
        "source_prefix_id": "<|source|>",
        "cand1_prefix_id": "<|candidate1|>",
        "cand2_prefix_id": "<|candidate2|>",
        "cand_prefix_id": "<|candidate|>",
    }
    config = DebertaV2Config(
        vocab_size=len(tokenizer),
        max_position_embeddings=positions,
        n_tasks=2,
        **SHAPE,
        **{name: tokenizer.convert_tokens_to_ids(token) for name, token in markers.items()},
    )
    config.save_pretrained(folder)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        backbone = DebertaV2Model(config).state_dict()
    tensors = {f"pretrained_model.{name}": tensor.clone() for name, tensor in backbone.items()}
    sizes = {"1.weight": (WIDTH, 2 * WIDTH), "1.bias": (WIDTH,), "4.weight": (2, WIDTH), "4.bias": (2,)}
    tensors |= {f"head_layer.{name}": torch.zeros(size) for name, size in sizes.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


def each(groups: list[Group], found: list[np.ndarray]) -> list[tuple[str, str, np.ndarray]]:
    return [
        (group.prompt.messages[0].content, row.text, features_GD[sample])
        for group, features_GD in zip(groups, found, strict=True)
        for sample, row in enumerate(group.trajectories)
    ]


@pytest.mark.inventory(62)
@pytest.mark.parametrize(("layer", "pooling"), [(-1, "mean"), (1, "mean"), ("all", "mean"), (-1, "last")])
@torch.no_grad()
def test_an_encoder_reads_prompt_and_response_as_a_pair(
    encoder: str, groups: list[Group], layer: Any, pooling: str
) -> None:
    backbone = load_backbone(encoder, layer, pooling, 128, "cpu")
    module, tokenizer = AutoModel.from_pretrained(encoder), tokenizer_of(encoder)
    for prompt, text, features_D in each(groups, backbone.of(groups)):
        pair = tokenizer(prompt, text, return_tensors="pt")
        states = module(**pair, output_hidden_states=True).hidden_states
        states_TD = torch.cat(states[1:], dim=-1)[0] if layer == "all" else states[layer][0]
        of_response = [place for place, part in enumerate(pair.sequence_ids(0)) if part == 1]
        expected = states_TD[0] if pooling == "last" else states_TD[of_response].mean(dim=0)
        torch.testing.assert_close(torch.from_numpy(features_D), expected, rtol=1e-4, atol=1e-5)
    assert backbone.width == WIDTH * (LAYERS if layer == "all" else 1)


@pytest.mark.inventory(63)
@pytest.mark.parametrize(("layer", "pooling"), [(-1, "mean"), ("all", "mean"), (-1, "last")])
@torch.no_grad()
def test_a_causal_model_reads_prompt_and_response_in_its_own_tokens(
    tmp_path: Path, groups: list[Group], layer: Any, pooling: str
) -> None:
    path = save_model(tmp_path / "model", build_config("llama"))
    backbone = load_backbone(path, layer, pooling, 64, "cpu")
    module, tokenizer = AutoModel.from_pretrained(path), tokenizer_of(path)
    for prompt, text, features_D in each(groups, backbone.of(groups)):
        first = tokenizer(prompt)["input_ids"]
        own = tokenizer(text, add_special_tokens=False)["input_ids"]
        ids = torch.tensor([[*first, *own]])
        states = module(input_ids=ids, output_hidden_states=True).hidden_states
        states_TD = torch.cat(states[1:], dim=-1)[0] if layer == "all" else states[layer][0]
        expected = states_TD[-1] if pooling == "last" else states_TD[len(first) - 1 : -1].mean(dim=0)
        torch.testing.assert_close(torch.from_numpy(features_D), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.inventory(61)
@torch.no_grad()
def test_pairrm_gives_the_states_of_its_two_markers(pairrm: str, groups: list[Group]) -> None:
    backbone = load_backbone(pairrm, -1, "mean", 128, "cpu")
    tokenizer = tokenizer_of(pairrm)
    module = backbone.model.modules[0]  # type: ignore[attr-defined]
    for prompt, text, features_D in each(groups, backbone.of(groups)):
        source = tokenizer("<|source|>" + prompt)["input_ids"]
        ids = torch.tensor([[*source, *tokenizer("<|candidate|>" + text)["input_ids"]]])
        states_TD = module(input_ids=ids).last_hidden_state[0]
        expected = torch.cat([states_TD[1], states_TD[len(source) + 1]])
        torch.testing.assert_close(torch.from_numpy(features_D), expected, rtol=1e-4, atol=1e-5)
    assert backbone.width == 2 * WIDTH


def said(prompt: str, *texts: str) -> Group:
    """Return a group with this prompt and these responses."""
    made = make_group(0, {"sampler": len(texts)}, np.random.default_rng(0))
    rows = [replace(row, text=text) for row, text in zip(made.trajectories, texts, strict=True)]
    return replace(
        made, prompt=replace(made.prompt, messages=(Message("user", prompt),)), trajectories=tuple(rows)
    )


LONG = "the quick brown fox jumps"


@pytest.mark.inventory(63)
@pytest.mark.parametrize("pooling", ["mean", "last"])
@torch.no_grad()
def test_a_causal_model_reads_the_end_of_a_long_prompt(tmp_path: Path, pooling: str) -> None:
    """Of 25 characters of the prompt and 5 of the response, 12 are read: 7 of the prompt and the response. A
    response that is too long by itself keeps its beginning, behind the last token of the prompt."""
    path = save_model(tmp_path / "model", build_config("llama"))
    module, tokenizer = AutoModel.from_pretrained(path), tokenizer_of(path)
    (found_GD,) = load_backbone(path, -1, pooling, 12, "cpu").of([said(LONG, "howdy", "over the lazy dog")])
    prompt = tokenizer(LONG)["input_ids"]
    for features_D, text, kept in zip(found_GD, ("howdy", "over the la"), (7, 1), strict=True):
        ids = torch.tensor([[*prompt[-kept:], *tokenizer(text)["input_ids"]]])
        assert ids.shape == (1, 12)
        states_TD = module(input_ids=ids).last_hidden_state[0]
        expected_D = states_TD[-1] if pooling == "last" else states_TD[kept - 1 : -1].mean(dim=0)
        torch.testing.assert_close(torch.from_numpy(features_D), expected_D, rtol=1e-4, atol=1e-5)


@pytest.mark.inventory(61)
@torch.no_grad()
def test_pairrm_cuts_prompt_and_response_at_their_ends(pairrm: str) -> None:
    """Of 24 tokens the prompt gets at most half, and the response what is left. Both end with [SEP]. A short
    prompt leaves more to the response."""
    backbone, tokenizer = load_backbone(pairrm, -1, "mean", 24, "cpu"), tokenizer_of(pairrm)
    module = backbone.model.modules[0]  # type: ignore[attr-defined]
    found = backbone.of([said(LONG, "over the lazy dog"), said("hi", "over the lazy dog")])
    read = [("the quick", "over the "), ("hi", "over the lazy do")]
    for (features_D,), (source, response) in zip(found, read, strict=True):
        first = tokenizer("<|source|>" + source)["input_ids"]
        ids = torch.tensor([[*first, *tokenizer("<|candidate|>" + response)["input_ids"]]])
        assert ids.shape == (1, 24)
        states_TD = module(input_ids=ids).last_hidden_state[0]
        expected_D = torch.cat([states_TD[1], states_TD[len(first) + 1]])
        torch.testing.assert_close(torch.from_numpy(features_D), expected_D, rtol=1e-4, atol=1e-5)


def test_what_a_backbone_lacks_is_refused(encoder: str, pairrm: str) -> None:
    with pytest.raises(ConfigError, match=r"layer is 9, and .* has 2 layers"):
        load_backbone(encoder, 9, "mean", 128, "cpu")
    with pytest.raises(ConfigError, match="is a PairRM, whose features are"):
        load_backbone(pairrm, "all", "mean", 128, "cpu")


# texts that are longer than a backbone reads

POSITIONS = 32
LETTERS = "".join("abcdefghij"[number % 10] for number in range(50))
ROOM = POSITIONS - 3
"""Three tokens of a row are special ones; two without a response."""


@pytest.mark.parametrize(
    ("prompt", "text", "read"),
    [
        ("ab", "cd", ("ab", "cd")),
        (LETTERS, "cde", (LETTERS[-(ROOM - 3) :], "cde")),
        (LETTERS, LETTERS, (LETTERS[-1:], LETTERS[: ROOM - 1])),
        ("ab", LETTERS[: ROOM - 1], ("b", LETTERS[: ROOM - 1])),
        ("", LETTERS, ("", LETTERS[:ROOM])),
        (LETTERS, "", (LETTERS[-ROOM - 1 :], "")),
    ],
)
@torch.no_grad()
def test_an_encoder_reads_as_many_tokens_as_it_has_positions(
    tmp_path: Path, prompt: str, text: str, read: tuple[str, str]
) -> None:
    """A prompt loses its beginning. If one token of it is left, the response loses its end."""
    path = save_encoder(tmp_path, POSITIONS)
    module, tokenizer = AutoModel.from_pretrained(path), tokenizer_of(path)
    ((found_D,),) = load_backbone(path, -1, "mean", DEFAULT, "cpu").of([said(prompt, text)])
    pair = tokenizer(*read, return_tensors="pt")
    own = [place for place, part in enumerate(pair.sequence_ids(0)) if part == 1] or [0]
    expected_D = module(**{**pair, "token_type_ids": None}).last_hidden_state[0][own].mean(dim=0)
    torch.testing.assert_close(torch.from_numpy(found_D), expected_D, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("size", [1, 9, 24, 28])
def test_a_prompt_is_cut_as_the_tokenizer_cuts_it(encoder: str, size: int) -> None:
    """Features of runs that began when the tokenizer cut the rows stay the same."""
    tokenizer = tokenizer_of(encoder)
    tokenizer.truncation_side = "left"
    backbone: Any = load_backbone(encoder, -1, "mean", POSITIONS, "cpu")
    text = LETTERS[:size]
    own = tokenizer(LETTERS, text, split_special_tokens=True, truncation="only_first", max_length=POSITIONS)
    group = said(LETTERS, text)
    row = backbone._encode_pair(group.prompt.messages, group.trajectories[0])
    assert row.ids == own["input_ids"]
    assert [own.sequence_ids()[place] for place in row.read] == [1] * size


def limited(folder: Path, kind: str) -> str:
    """Save a backbone that reads at most `POSITIONS` tokens, or one with relative positions."""
    tokenizer = tokenizer_with_pairs(folder)
    size, pad = len(tokenizer), tokenizer.pad_token_id
    positions = {"vocab_size": size, "max_position_embeddings": POSITIONS, "pad_token_id": pad}
    if kind == "pairrm":
        return save_pairrm(folder, POSITIONS)
    if kind == "roberta":
        behind = {**positions, "max_position_embeddings": POSITIONS + pad + 1}
        return save_random(folder, RobertaConfig(**behind, **SHAPE))
    if kind == "relative":
        relative = {"relative_attention": True, "position_biased_input": False, "pos_att_type": ["p2c"]}
        return save_random(folder, DebertaV2Config(**positions, **SHAPE, **relative))
    if kind == "gpt2":
        shape = {"n_embd": WIDTH, "n_layer": LAYERS, "n_head": 2, "n_positions": POSITIONS}
        return save_model(folder, GPT2Config(vocab_size=size, bos_token_id=0, eos_token_id=0, **shape))
    return save_model(folder, build_config("llama", context=POSITIONS))


@pytest.mark.parametrize("kind", ["roberta", "relative", "gpt2", "llama", "pairrm"])
def test_long_texts_of_every_kind_of_backbone(tmp_path: Path, kind: str) -> None:
    """No row is longer than the model's positions. A model with relative positions has no such limit."""
    backbone: Any = load_backbone(limited(tmp_path, kind), -1, "mean", DEFAULT, "cpu")
    sizes: list[int] = []
    inner = backbone._features
    backbone._features = lambda rows: sizes.extend(len(row.ids) for row in rows) or inner(rows)
    texts = ("a", LETTERS[:20], LETTERS, LETTERS * 2)
    groups = [said("ab", *texts), said(LETTERS, *texts), said(LETTERS * 2, *texts)]
    found = np.concatenate(backbone.of(groups))
    assert found.shape == (12, backbone.width)
    assert np.isfinite(found).all()
    assert max(sizes) == (203 if kind == "relative" else POSITIONS)


def test_features_of_runs_that_began_before_keep_their_identity(tmp_path: Path) -> None:
    backbone = load_backbone(save_encoder(tmp_path, POSITIONS), -1, "mean", DEFAULT, "cpu")
    assert backbone.identity["max_tokens"] == DEFAULT == 2048


def run_with(world: World, folder: Path, backbone: str, **features: Any) -> Path:
    """Write a configuration whose responses are longer than the backbone reads."""
    ensemble = {"members": 3, "hidden": 8}
    changes = {
        "explorer": {
            "name": "ensemble",
            "samples": 3,
            "ensemble": ensemble,
            "features": {"backbone": backbone, **features},
        },
        "sampling.max_new_tokens": 20,
        "stop.max_steps": 1,
        "evaluation": None,
    }
    return world.config("dpo", folder, changes)


@pytest.mark.sample("pairrm", seconds=0.5)
@pytest.mark.parametrize("kind", ["bert", "pairrm"])
def test_a_run_reads_what_its_backbone_has_positions_for(world: World, tmp_path: Path, kind: str) -> None:
    path = (save_encoder if kind == "bert" else save_pairrm)(tmp_path / "backbone", 8)
    config = run_with(world, tmp_path, path)
    assert oat("check", config) == 0
    assert oat("train", config) == 0


@pytest.mark.sample("check", seconds=0.5)
@pytest.mark.parametrize("command", ["check", "train", "features"])
def test_more_tokens_than_positions_are_refused(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    path = save_encoder(tmp_path / "backbone", 16)
    config = run_with(world, tmp_path, path, max_tokens=17)
    assert oat(command, config) == 2
    error = capsys.readouterr().err
    assert f"{config}:" in error
    assert f"explorer.features.max_tokens is 17, and the backbone {path} has 16 positions; set as" in error
    assert not (tmp_path / "dpo").exists()
    assert oat("check", run_with(world, tmp_path, path, max_tokens=16)) == 0


def test_a_run_that_began_with_more_tokens_goes_on(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = run_with(world, tmp_path, save_encoder(tmp_path / "backbone", 32), max_tokens=64)
    with monkeypatch.context() as before:
        before.setattr(late_checks, "positions_of", lambda path: None)
        assert oat("train", config) == 0
    with pytest.warns(OatWarning, match=r"explorer\.features\.max_tokens is 64, and the backbone"):
        assert oat("train", config, "--stop.max_steps", 2) == 0


def test_a_backbone_that_reads_one_message_is_refused_for_conversations(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str], pairrm: str, encoder: str
) -> None:
    """One prompt of the data has two messages. Neither a PairRM nor a causal model without a chat template
    can read it, and the run is refused before it samples. An encoder reads it."""
    two = [{"role": "user", "content": "1+1="}, {"role": "user", "content": "2+2="}]
    lines = [json.dumps({"prompt": two[:1]}), json.dumps({"prompt": two})]
    (tmp_path / "talks.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (tmp_path / "t.jinja").write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    causal = save_model(tmp_path / "causal", build_config("llama"))
    (tmp_path / "reward.py").write_text(
        "def one(prompts, completions, **columns): return [1.0] * len(prompts)"
    )

    def config(path: str) -> Path:
        explorer = {"name": "ensemble", "samples": 4, "features": {"backbone": path}}
        changes = {
            "explorer": explorer,
            "evaluation": None,
            "prompts": {"path": str(tmp_path / "talks.jsonl")},
            "render": {"template": str(tmp_path / "t.jinja")},
            "oracle.name": f"{tmp_path / 'reward.py'}:one",
            "algorithm.prompts": 2,
        }
        return world.config("dpo", tmp_path, changes)

    for path in (pairrm, causal):
        for command in ("check", "train", "features"):
            assert oat(command, config(path)) == 2
            said = f"explorer.features.backbone is {path}, which reads a prompt of one message, and a prompt"
            assert f"{said} has 2; take an encoder" in capsys.readouterr().err
    assert not (tmp_path / "dpo").exists()
    assert oat("check", config(encoder)) == 0


def tokenizer_of(path: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path)
