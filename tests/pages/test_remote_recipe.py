"""The two shells of docs/tour.md and docs/oracles/remote.md work as typed, with small models instead of the
hub's."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tiny_models import build_config, build_tokenizer, save_model, save_reward_model
from transformers import DistilBertConfig

ROOT = Path(__file__).parents[2]
TOUR, PAGE = ((ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("tour.md", "oracles/remote.md"))
WRITER, CLASSIFIER = (
    "raincandy-u/TinyStories-656K",
    "distilbert/distilbert-base-uncased-finetuned-sst-2-english",
)
SMALL = (
    "--sampling.max_new_tokens 6 --sampling.overflow cut --algorithm.prompts 3 --stop.max_steps 2 "
    "--evaluation.max_prompts 2 --engine.threads 1"
)


def typed(marker: str, page: str = TOUR) -> str:
    """Return the block under a marker, without its comment."""
    block = re.search(rf"<!-- {marker} -->\n```sh\n(.*?)```", page, flags=re.DOTALL)
    assert block is not None
    return block[1].partition("#")[0].strip()


@pytest.mark.slow
def test_two_shells(tmp_path: Path) -> None:
    """The commands of both shells work. The run starts before the server, and waits for it."""
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    writer = save_model(tmp_path / "writer", build_config("llama", context=2048))
    shape = {
        "vocab_size": 44,
        "dim": 32,
        "n_layers": 1,
        "n_heads": 2,
        "hidden_dim": 64,
        "max_position_embeddings": 2048,
        "pad_token_id": 0,
    }
    classifier = save_reward_model(
        tmp_path / "classifier", DistilBertConfig(**shape), build_tokenizer(), labels=2
    )
    with socket.create_server(("127.0.0.1", 0)) as chosen:
        port = chosen.getsockname()[1]
    recipe = tmp_path / "configs" / "dpo_remote.yaml"
    text = recipe.read_text(encoding="utf-8")
    assert CLASSIFIER in text.splitlines()[1]
    assert typed("serve") in text.splitlines()[1]
    recipe.write_text(text.replace(WRITER, writer).replace(":8000", f":{port}"), encoding="utf-8")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "oat").write_text(f'#!/bin/sh\nexec {sys.executable} -m oat "$@"\n', encoding="utf-8")
    (tmp_path / "bin" / "oat").chmod(0o755)
    path = f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"
    own = {
        "cwd": tmp_path,
        "env": {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    }
    words = f"{typed('train')} {SMALL}"
    training = subprocess.Popen(
        ["bash", "-c", words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **own
    )  # type: ignore[call-overload]
    time.sleep(1.0)
    words = f"exec {typed('serve').replace(CLASSIFIER, classifier)} --port {port}"
    serving = subprocess.Popen(
        ["bash", "-c", words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **own
    )  # type: ignore[call-overload]
    try:
        said, _ = training.communicate(timeout=300.0)
        assert training.returncode == 0, said
        assert "oracle/retries" in (tmp_path / "runs" / "dpo_remote" / "metrics.jsonl").read_text(
            encoding="utf-8"
        )
    finally:
        training.kill()
        serving.send_signal(signal.SIGTERM)
        said, _ = serving.communicate(timeout=60.0)
    assert serving.returncode == 0, said
    assert "oat serve: ready: POST " in said


@pytest.mark.parametrize("marker", ["serve", "train"])
def test_the_blocks_are_one_command_each(marker: str) -> None:
    assert re.fullmatch(r"oat (serve|train) [^\n]+", typed(marker))
    assert typed(marker, PAGE) == typed(marker), "the page shows what the tour shows"
