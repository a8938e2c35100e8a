"""A model is made of its source: a folder, an identity, settings, and tensors as they come."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from source_of import source_of
from tiny_models import build_config, save_model

from oat.config.settings import LoraConfig, ModelConfig
from oat.errors import ModelError
from oat.models.causal_lm import CausalLM
from oat.models.frozen import frozen_checksum
from oat.models.identity import model_identity
from oat.models.loading import load_config, load_lm
from oat.models.lora import load_model
from oat.models.sources import ModelSource, lms_of

CPU = torch.device("cpu")
LORA = LoraConfig(rank=2, alpha=4.0, targets=("q_proj", "v_proj"))


@pytest.fixture(scope="module", params=["llama", "qwen3", "tied"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    config = build_config("llama" if request.param == "tied" else request.param)
    config.tie_word_embeddings = request.param == "tied"
    return save_model(tmp_path_factory.mktemp(request.param), config)


def logits(lm: CausalLM) -> torch.Tensor:
    with torch.no_grad():
        return lm.head(lm.hidden(torch.arange(6)[None]))


@pytest.mark.parametrize("lora", [None, LORA], ids=["plain", "lora"])
def test_a_whole_source_needs_no_weights_in_its_folder(path: str, lora: LoraConfig | None) -> None:
    lm = load_model(ModelConfig(path, lora=lora), seed=3)
    with torch.no_grad():
        for parameter in lm.trainable().values():
            parameter.add_(0.01)
    source = source_of(lm)
    assert not [*Path(source.path).glob("*.safetensors")]
    made = lms_of({"sampler": source})["sampler"]
    assert torch.equal(logits(made), logits(lm))
    assert made.takes_layouts == lm.takes_layouts
    assert made.trainable().keys() == lm.trainable().keys()
    assert made.tensors().keys() == lm.tensors().keys()


def broken(tensors: dict[str, torch.Tensor], name: str, how: str) -> Iterator[tuple[str, torch.Tensor]]:
    for each, tensor in tensors.items():
        if each != name:
            yield each, tensor
        elif how == "unknown":
            yield f"{name}s", tensor
        elif how == "shape":
            yield name, tensor[:1]


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("missing", r"1 of \d+ tensors did not come, for example `model.norm.weight`"),
        ("unknown", r"`model.norm.weights` came, which the model does not have; did you mean"),
        ("shape", r"`model.norm.weight` came with the shape \(1,\), and the model has \(\d+,\)"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(path: str, how: str, words: str) -> None:
    lm = load_lm(path)
    source = replace(source_of(lm), tensors=lambda: broken(lm.tensors(), "model.norm.weight", how))
    with pytest.raises(ModelError, match=words):
        lms_of({"sampler": source})


def test_a_folder_of_another_model_is_refused(path: str) -> None:
    identity = model_identity(load_config(path))
    lms_of({"policy": ModelSource(ModelConfig(path), CPU, identity=identity)})
    identity["config.json"]["num_hidden_layers"] = 77
    with pytest.raises(ModelError, match="num_hidden_layers was 77 and is"):
        lms_of({"policy": ModelSource(ModelConfig(path), CPU, identity=identity)})


def test_some_tensors_replace_those_of_the_folder(path: str) -> None:
    lm = load_model(ModelConfig(path, lora=LORA), seed=3)
    frozen = frozen_checksum(lm.module, lm.trainable().values())
    own = {name: torch.randn_like(tensor) for name, tensor in lm.trainable().items()}
    source = ModelSource(ModelConfig(path, lora=LORA), CPU, seed=4, tensors=own.items, frozen=frozen)
    made = lms_of({"policy": source})["policy"]
    assert all(torch.equal(made.trainable()[name], tensor) for name, tensor in own.items())
    with pytest.raises(ModelError, match="is not the model beside which the weights were trained"):
        lms_of({"policy": replace(source, frozen=frozen + 1)})


def test_sources_share_what_they_say(path: str) -> None:
    policy = ModelSource(ModelConfig(path, lora=LORA), CPU, seed=3)
    sampler = replace(policy, seed=4, base=policy)
    reference = replace(policy, model=ModelConfig(path), base=policy)
    found = lms_of({"sampler": sampler, "policy": policy, "again": policy, "reference": reference})
    assert found["policy"] is found["again"]
    pointers: list[dict[str, int]] = [
        {name: tensor.data_ptr() for name, tensor in found[slot].tensors().items()}
        for slot in ("policy", "sampler", "reference")
    ]
    trained = found["policy"].trainable().keys()
    assert {name for name in pointers[0] if pointers[0][name] != pointers[1][name]} == trained
    assert pointers[2] == pointers[0]
    assert found["reference"].is_base
    assert np.allclose(logits(found["reference"]), logits(load_lm(path)), atol=1e-6)


def test_a_model_of_the_process_is_taken(path: str) -> None:
    lm: Any = load_lm(path)
    assert lms_of({"policy": ModelSource(ModelConfig(path), CPU, lm=lm)})["policy"] is lm
