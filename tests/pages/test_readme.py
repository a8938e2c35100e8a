"""The README is short, and its files and commands work as typed (that of pip: test_wheel.py)."""

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
from readme import README, ROOT, commands, files
from tiny_models import build_config, build_tokenizer, save_model

from oat.cli import main

HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"
TEMPLATE = (
    "{% for m in messages %}{{ m.role }} {{ m.content }}{{ eos_token }}{% endfor %}{% if "
    "add_generation_prompt %}assistant {% endif %}"
)
MOST_WORDS = 900
OF_MAKE = {"make quickstart": "oat quickstart", "make test": "pytest"}
"""The README's commands of make, and what each of them runs."""


def of_shell() -> list[str]:
    """Return all commands of the README's shell blocks, without comments."""
    blocks = re.findall(r"```sh\n(.*?)```", README, flags=re.DOTALL)
    return [" ".join(shlex.split(line, comments=True)) for line in "".join(blocks).splitlines() if line]


def test_the_readme_is_read_in_two_minutes() -> None:
    assert len(README.split()) <= MOST_WORDS


def test_every_command_is_typed_by_a_test() -> None:
    of_oat = [" ".join(shlex.split(line, comments=True)) for line in commands(README)]
    assert of_shell() == [*OF_MAKE, *of_oat]
    assert {line.split()[0] for line in of_oat} == {"oat"}
    assert re.findall(r"`(pip [^`]*)`", README) == ["pip install '.[lora,plot]'"]


@pytest.mark.parametrize("line", OF_MAKE)
def test_the_commands_of_make(line: str) -> None:
    """Make would run what the README says. Other tests run the programs themselves."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    planned = subprocess.run(
        [*line.split(), "--dry-run"], cwd=ROOT, env=own, check=True, capture_output=True, text=True
    ).stdout
    assert OF_MAKE[line] in planned


def test_the_chat_model_learns_as_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    save_model(tmp_path / "model", build_config("llama", context=256))
    tokenizer = build_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(tmp_path / "model")
    assert set(files(README)) == {"prompts.jsonl", "reward.py", "chat.yaml"}
    for name, text in files(README).items():
        Path(name).write_text(text.replace(HUB, "model"), encoding="utf-8")
    for line in commands(README):
        _, *words = shlex.split(line, comments=True)
        small = ["--stop.max_steps", "2"] if words[0] == "train" else []
        assert main([*words, *small]) == 0, capsys.readouterr().err
    assert Path("runs/chat/checkpoints/latest").exists()
    assert Path("plot.png").read_bytes().startswith(b"\x89PNG")
    assert Path("my-model/model.safetensors").exists()


def test_the_largest_runs_are_those_of_the_pages() -> None:
    """What the README says about the largest runs stands in the pages that it names."""
    pages = {
        name: (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8") for name in ("gpu", "first_run")
    }
    told = {"gpu": r"477 million", "first_run": re.escape(HUB.partition("/")[2])}
    for name, figure in told.items():
        assert re.search(figure, pages[name]), name
        assert re.search(figure, README), name
    sizes = [float(size) for size in re.findall(r"(\d+) million weights", pages["gpu"])]
    assert max(sizes) == 477
