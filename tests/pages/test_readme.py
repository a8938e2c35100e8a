"""The README is short, and its files and commands work as typed (that of pip: test_wheel.py)."""

import os
import re
import shlex
import subprocess
import venv
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
    assert of_shell() == [*OF_MAKE, ". .venv/bin/activate", *of_oat]
    assert {line.split()[0] for line in of_oat} == {"oat"}
    assert re.findall(r"`(pip [^`]*)`", README) == ["pip install '.[lora,plot]'"]


def test_the_environment_is_activated_as_typed(tmp_path: Path) -> None:
    venv.create(tmp_path / ".venv")
    (line,) = [each for each in of_shell() if each.startswith(". ")]
    found = subprocess.run(
        ["sh", "-c", f"{line}; command -v python"], cwd=tmp_path, check=True, capture_output=True, text=True
    )
    assert found.stdout.strip() == str(tmp_path / ".venv" / "bin" / "python")


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


def test_its_figures_are_those_of_the_pages() -> None:
    """Figures of the README stand in the pages that it names beside them."""
    pages = {
        name: (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
        for name in ("benchmarks", "exploration", "gpu", "first_run", "resume")
    }
    ratios = {
        name: re.findall(
            r"^\| (?:5M|50M), .*? ([\d.]+)x \(",
            pages["benchmarks"].partition(f"<!-- {name} -->")[2].partition("<!-- end")[0],
            flags=re.MULTILINE,
        )
        for name in ("step", "direct")
    }
    told = [[f"{float(ratio):.1f}" for ratio in ratios[name]] for name in ("step", "direct")]
    assert f"GRPO {told[0][0]}, DPO {' and '.join(told[1])} ([benchmarks]" in README
    assert set(told[0]) == {told[0][0]}
    (best,) = re.findall(r"SEA with labels needs ([\d.]+) of passive's pairs", pages["exploration"])
    assert f"SEA with model labels needed {best} of the queries" in README
    assert "300 runs" in README
    assert "100 of 100, 100 of 100" in pages["resume"]
    sizes = [int(size) for size in re.findall(r"(\d+) million weights", pages["gpu"])]
    assert f"{max(sizes)} million on one GPU" in README
    assert "Llama-3.2-1B" in pages["benchmarks"]
    for figure in re.findall(r"rose from (-?[\d.]+) to (-?[\d.]+)", README)[0]:
        assert figure in pages["first_run"]
