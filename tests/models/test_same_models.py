"""Two directories hold the same model if they hold the same values, whatever the bytes of their files are."""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from tiny_models import build_config, save_model

from oat.models.identity import hold_same
from oat.models.loading import load_tokenizer

Change = Callable[[Path], Any]


def fields(name: str, **changes: Any) -> Change:
    def change(folder: Path) -> None:
        found = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({**found, **changes}, sort_keys=True))

    return change


def other_weight(folder: Path) -> None:
    """Change a number that no sample of a tensor would meet."""
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"].view(-1)[1050] += 1e-6
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def in_shards(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    places = {name: f"model-0000{1 + number % 2}-of-00002.safetensors" for number, name in enumerate(tensors)}
    for file in set(places.values()):
        save_file({name: t for name, t in tensors.items() if places[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


def other_template(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")


def other_tokens(folder: Path) -> None:
    tokenizer = load_tokenizer(str(folder))
    tokenizer.add_tokens(["+"])
    tokenizer.save_pretrained(folder)


SAME: Mapping[str, Change] = {
    "nothing": lambda folder: None,
    "without the hub": fields("tokenizer_config.json", local_files_only=True),
    "with the hub": fields("tokenizer_config.json", local_files_only=False),
    "another version": fields("config.json", transformers_version="5.99.0"),
    "another version of the settings": fields("generation_config.json", transformers_version="5.99.0"),
    "in shards": in_shards,
}
OTHER: Mapping[str, Change] = {
    "a weight": other_weight,
    "the ends": fields("generation_config.json", eos_token_id=[0, 1]),
    "the configuration": fields("config.json", rms_norm_eps=1e-3),
    "the template": other_template,
    "the tokens": other_tokens,
    "nothing that can be read": lambda folder: (folder / "config.json").unlink(),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("model"), build_config("llama"))


@pytest.mark.parametrize("name", [*SAME, *OTHER])
def test_values_are_compared(model: str, tmp_path: Path, name: str) -> None:
    shutil.copytree(model, tmp_path / "copy")
    {**SAME, **OTHER}[name](tmp_path / "copy")
    for pair in ((model, str(tmp_path / "copy")), (str(tmp_path / "copy"), model)):
        assert hold_same(*pair) == (name in SAME)
