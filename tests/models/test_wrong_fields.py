"""Any field of a model's configuration files may have a value of a wrong kind: the folder is read, or refused
by one message. And a pipe in the place of a file is refused, since nobody may ever write to it."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from fixtures import World, oat, write_jsonl

WRONG: list[Any] = ["x", -5, 0, 2.5, [None], [[2]], {"a": 1}]
FILES = ("config.json", "generation_config.json")


@pytest.fixture
def folder(world: World, tmp_path: Path) -> Path:
    return Path(shutil.copytree(world.folder / "model", tmp_path / "model"))


def fields_of(file: Path) -> list[str]:
    return [*json.loads(file.read_text(encoding="utf-8"))] if file.exists() else []


def generated(folder: Path) -> int:
    """Sample from the model of a folder."""
    prompts = write_jsonl(folder.parent / "prompts.jsonl", [{"prompt": "1+2="}])
    return oat("generate", folder, "--prompts", prompts, "--max-new-tokens", 2, "--seed", 0)


@pytest.mark.sample("generation_config.json", seconds=3)
@pytest.mark.parametrize("name", FILES)
@pytest.mark.filterwarnings("ignore")
def test_a_wrong_field_is_read_or_refused_by_one_message(
    name: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = folder / name
    before = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    names = {*before, "eos_token_id"}
    refused = 0
    for field in sorted(names):
        for wrong in WRONG:
            file.write_text(json.dumps({**before, field: wrong}), encoding="utf-8")
            code = generated(folder)
            said = capsys.readouterr().err
            assert code in (0, 1, 2), (field, wrong)
            assert "Traceback" not in said, (field, wrong)
            refused += code != 0
    assert refused > 0


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", *FILES])
def test_a_pipe_in_the_place_of_a_file_is_refused(
    name: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    assert generated(folder) == 2
    assert f"{name} is a pipe, a socket or a device" in capsys.readouterr().err
