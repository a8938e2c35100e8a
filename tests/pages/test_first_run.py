"""The page of a first real run works as typed, with a tiny model instead of the hub's. The index of pages
names every page."""

import io
import re
import shlex
from pathlib import Path

import pytest
from tiny_models import build_config, build_tokenizer, save_model

from oat.cli import main

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGE = (DOCS / "first_run.md").read_text(encoding="utf-8")
HUB = "Qwen/Qwen2.5-0.5B-Instruct"
TEMPLATE = (
    "{% for m in messages %}{{ m.role }} {{ m.content }}{{ eos_token }}{% endfor %}{% if "
    "add_generation_prompt %}assistant {% endif %}"
)


@pytest.mark.slow(
    instead="tests/pages/test_tour.py::test_the_tour_works_as_typed has the same commands",
    seconds=8.6,
)
def test_the_page_works_as_typed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    save_model(tmp_path / "model", build_config("qwen3", context=256))
    tokenizer = build_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(tmp_path / "model")
    files = dict(re.findall(r"<!-- file: (\S+) -->\n```\w+\n(.*?)```", PAGE, flags=re.DOTALL))
    assert set(files) == {"train.jsonl", "heldout.jsonl", "reward.py", "first.yaml"}
    for name, text in files.items():
        Path(name).write_text(
            text.replace(HUB, "model").replace("max_steps: 60", "max_steps: 4"), encoding="utf-8"
        )
    blocks = re.findall(r"<!-- run -->\n```sh\n(.*?)```", PAGE, flags=re.DOTALL)
    lines = [
        shlex.split(line.replace(HUB, "model"), comments=True)
        for block in blocks
        for line in block.splitlines()
    ]
    assert len(lines) == 12
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"What is 2 + 3?\n")))
    for program, *arguments in lines:
        assert program == "oat"
        assert main(arguments) == 0, capsys.readouterr().err
    assert Path("my-model/model.safetensors").exists()
    assert Path("plot.png").exists()
    assert len(Path("said.jsonl").read_text(encoding="utf-8").splitlines()) == 2


def test_the_index_names_every_page():
    """docs/README.md names every page. Decision records are named in an index of their own."""
    indices = [DOCS / "README.md", DOCS / "decisions" / "README.md"]
    linked = {
        (index.parent / target).resolve()
        for index in indices
        for target in re.findall(r"\]\(([^)#]+)", index.read_text(encoding="utf-8"))
    }
    assert {*DOCS.rglob("*.md")} - linked == {DOCS / "README.md"}
