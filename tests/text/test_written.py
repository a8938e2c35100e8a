"""Rewards, samples and files get what the model wrote: its first blank, and its special tokens except the
tokens that end a response."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from fixtures import checked, oat, write_jsonl
from tokenizers_of_all_kinds import BLANK, save_kind
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from oat import load_run
from oat.engines.torch import TorchEngine
from oat.models.loading import load_lm
from oat.rollout.actor import Actor
from oat.seeds import Seeds
from oat.text.renderer import Renderer
from oat.types import Message, Prompt, Sampling

TOKENS = (f"{BLANK}is", f"{BLANK}sky", "<think>", "</think>", "\n\n", "<0xE2>")
"""The tokens that the model writes, each as often as the others, besides the end-of-text."""

REWARD = """
from transformers import AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained({model!r})


def written(prompts, completions, completion_ids, **columns):
    scores = []
    for prompt, text, ids in zip(prompts, completions, completion_ids):
        before = tokenizer(prompt)["input_ids"]
        ids = [id for id in ids if id != tokenizer.eos_token_id]
        whole = tokenizer.decode([*before, *ids], skip_special_tokens={drops})
        before = tokenizer.decode(before, skip_special_tokens={drops})
        scores.append(float(whole == before + text))
    return scores
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a model that draws each token from `TOKENS` and the end-of-text."""
    folder = tmp_path_factory.mktemp("written")
    tokenizer = save_kind("Metaspace first, split", folder)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        max_position_embeddings=64,
        tie_word_embeddings=False,
    )
    module = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
        module.model.norm.weight.fill_(1.0)
        module.model.embed_tokens.weight.fill_(1.0)
        module.lm_head.weight.fill_(-10.0)
        drawn = [*tokenizer.convert_tokens_to_ids(TOKENS), tokenizer.eos_token_id]
        module.lm_head.weight[drawn] = 0.0
    module.save_pretrained(folder)
    write_jsonl(folder / "prompts.jsonl", [{"prompt": text} for text in ("the sky", "the cat is", "it")])
    return folder


def config_of(model: Path, folder: Path, drops: bool, **render: object) -> Path:
    (folder / "reward.py").write_text(REWARD.format(model=str(model), drops=drops), encoding="utf-8")
    tree = {
        "run_dir": str(folder / "run"),
        "model": {"path": str(model)},
        "prompts": {"path": str(model / "prompts.jsonl")},
        "render": render,
        "sampling": {"max_new_tokens": 6},
        "oracle": {"name": f"{folder / 'reward.py'}:written"},
        "algorithm": {"name": "grpo", "prompts": 3, "samples": 16},
        "learner": {"learning_rate": 0.0, "micro_batch_size": 64},
        "compute": {"threads": 1},
        "stop": {"max_steps": 1},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
    return folder / "config.yaml"


@pytest.mark.parametrize("special", ["drop", None])
def test_a_reward_gets_what_the_model_wrote(model: Path, tmp_path: Path, special: str | None) -> None:
    render = {} if special is None else {"special_tokens": special}
    assert oat("train", config_of(model, tmp_path, special == "drop", **render)) == 0
    run = tmp_path / "run"
    *_, row = (json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines())
    assert row["reward/mean"] == 1.0, "each text is what its ids add to the prompt"
    samples = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    texts = [text for each in samples for text in each["responses"]]
    assert any(text.startswith(" is") for text in texts)
    assert any("<think>" in text for text in texts) == (special != "drop")
    assert not any("</s>" in text or "<s>" in text for text in texts)
    asked = {text for texts in load_run(run).questions["candidates"] for text in texts}
    assert {*texts} <= asked, "the ledger has the same texts"
    stored = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))
    assert stored["render"]["special_tokens"] == (special or "keep")


def test_a_check_names_what_the_tokenizer_changes(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(model, tmp_path / "model")
    changes = {"tokenizer_config.json": {"tokenizer_class": "LlamaTokenizer", "backend": None}}
    changes["tokenizer.json"] = {"normalizer": {"type": "Lowercase"}}
    for name, fields in changes.items():
        found = json.loads((folder / name).read_text(encoding="utf-8"))
        (folder / name).write_text(json.dumps({**found, **fields}), encoding="utf-8")
    _, notes = checked(capsys, config_of(folder, tmp_path, False))
    assert any("' a' becomes 'a'" in note for note in notes)
    assert any(note.startswith("LlamaTokenizer of transformers encodes") for note in notes)


def test_generated_texts_are_what_the_model_wrote(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    command = ("generate", model, "--prompts", model / "prompts.jsonl", "--n", 16, "--max-new-tokens", 6)
    assert oat(*command) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    texts = [text for row in rows for text in row["responses"]]
    assert any(text.startswith(" is") for text in texts)
    assert any("</think>" in text for text in texts)
    assert not any("</s>" in text for text in texts)


STOPS = (" is", "</think>\n", " sky<think>", "is sky")


@pytest.mark.parametrize("stop", STOPS)
def test_a_stop_string_is_found_where_the_text_has_it(model: Path, stop: str) -> None:
    """A response ends with the token that completes the stop string, also at its beginning; no later token
    is sampled."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    renderer = Renderer(tokenizer, template=None, stop=(stop,))
    engine = TorchEngine(
        {"sampler": load_lm(str(model))},
        num_tokens=renderer.num_tokens,
        stop_ids=renderer.stop_ids,
        decode=renderer.decode,
    )
    actor = Actor(renderer, engine, Sampling(12, stop=(stop,)), Seeds(0))
    prompt = Prompt(0, 0, (Message("user", "the sky"),))
    (group,) = actor.sample([prompt], {"sampler": 64}, ("test",))
    before = tokenizer("the sky")["input_ids"]

    def shown(ids: Sequence[int] | np.ndarray) -> str:
        kept = [int(id) for id in ids if id != tokenizer.eos_token_id]
        return tokenizer.decode([*before, *kept]).removeprefix(tokenizer.decode(before))

    found = 0
    for row in group.trajectories:
        text = shown(row.completion)
        head = text.partition(stop)[0]
        closes = "/" in stop and stop in text and head.rfind("<think>") > head.rfind("</think>")
        assert row.text == head + stop * closes
        assert stop not in shown(row.completion[:-1])
        if stop in text:
            found += 1
            assert row.finish_reason == "stop"
    assert found


FORM = "<think>...</think> <answer>...</answer>"
PATTERN = {"name": "regex", "pattern": r"\<think\>.*\</think\>\s*END", "match": "whole"}


@pytest.mark.parametrize(
    ("stop", "rule", "is_told"),
    [
        ("</answer>", {"name": "format", "template": FORM}, False),
        ("Q:", {"name": "format", "template": FORM}, False),
        ("</think>", {"name": "format", "template": FORM}, True),
        ("END", {"name": "mixture", "sources": [PATTERN, {"name": "length", "target": 3}]}, True),
    ],
)
def test_a_stop_string_that_a_form_needs_is_told(
    model: Path, tmp_path: Path, recwarn: pytest.WarningsRecorder, stop: str, rule: dict, is_told: bool
) -> None:
    path = config_of(model, tmp_path, False)
    tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    tree["sampling"]["stop"], tree["oracle"] = [stop], rule
    path.write_text(yaml.safe_dump(tree), encoding="utf-8")
    assert oat("check", path) == 0
    assert any("sampling.stop ends" in str(each.message) for each in recwarn) == is_told
