"""The pages' instructions work, and the settings page agrees with the code."""

import dataclasses
import re
import shutil
import typing
from pathlib import Path
from typing import Any

import pytest
import settings_page
import yaml
from fixtures import World, oat

from oat.config.load import load_config
from oat.config.settings import Component, Config, SinkConfig
from oat.plugins.registry import ALGORITHMS, ENGINES, SINKS
from oat.resolve.resolve import resolve
from oat.tracking.sinks import FILES

DOCS = Path(__file__).parents[2] / "docs"
ELSEWHERE = {"commands", "data", "environments", "exploration", "extending", "tour", "watching"}
"""Pages whose blocks other tests run."""
PAGES = [page for page in sorted(DOCS.rglob("*.md")) if page.stem not in ELSEWHERE]
BASE = {
    "model": {"path": "org/name"},
    "prompts": {"path": "prompts.jsonl"},
    "oracle": {"name": "reward.py:reward"},
    "algorithm": {"name": "grpo", "kl_coef": 0.1},
    "stop": {"max_steps": 10},
}


def blocks(language: str) -> list[Any]:
    return [
        pytest.param(block, id=f"{page.stem}-{number}")
        for page in PAGES
        for number, block in enumerate(
            re.findall(
                rf"^```{language}\n(.*?)^```",
                page.read_text(encoding="utf-8"),
                flags=re.DOTALL | re.MULTILINE,
            ),
            1,
        )
    ]


BLOCKS = blocks("yaml")


@pytest.mark.parametrize("block", BLOCKS)
def test_every_block_is_valid(block: str, tmp_path: Path) -> None:
    """Each block of YAML in the pages is valid, as a complete configuration or as sections of one."""
    given = yaml.safe_load(block)
    path = tmp_path / "config.yaml"
    path.write_text(
        block if {"model", "oracle", "stop"} <= set(given) else yaml.safe_dump({**BASE, **given}),
        encoding="utf-8",
    )
    config = resolve(*load_config(path)).config
    assert config.algorithm.name == given.get("algorithm", BASE["algorithm"])["name"]


@pytest.mark.sample(slow=("python-2", "python-3"), seconds=3.4)
@pytest.mark.parametrize("block", blocks("python"))
def test_every_block_of_python_runs(
    block: str, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each block of Python in the pages runs, in a folder with the files that the tour begins with and, if
    the block names it, a run in runs/mine."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(world.folder / "model", "quickstart/start")
    shutil.copy(world.folder / "train.jsonl", "prompts.jsonl")
    if "runs/mine" in block:
        changes = {"run_dir": str(tmp_path / "runs" / "mine"), "evaluation.gold": world.oracle}
        assert oat("train", world.config("grpo", tmp_path, changes)) == 0
    exec(block, {})


def test_every_algorithm_has_a_recipe() -> None:
    whole = [yaml.safe_load(block) for param in BLOCKS for block in param.values]
    assert {given["algorithm"]["name"] for given in whole if "algorithm" in given} == set(ALGORITHMS)


def test_the_page_of_settings_is_made_from_the_code() -> None:
    assert settings_page.PAGE.read_text(encoding="utf-8") == settings_page.page(), (
        "run: python tests/settings_page.py"
    )


def test_every_setting_says_what_it_means() -> None:
    classes = (
        {cls for _, cls in settings_page.sections(Config)}
        | {algorithm.Config for algorithm in ALGORITHMS.values()}
        | {part.Config for part in ENGINES.values()}
    )
    classes |= {SinkConfig, *(SINKS[name].Config for name in SINKS if name != FILES)}
    for cls in classes:
        texts, shapes = settings_page.documented(cls), typing.get_type_hints(cls)
        sections = {
            name
            for name, kind in shapes.items()
            if any(map(dataclasses.is_dataclass, (kind, *typing.get_args(kind))))
        }
        missing = {f.name for f in dataclasses.fields(cls)} - texts.keys() - sections - {"options"}
        assert missing <= ({"name"} if issubclass(cls, Component) else set()), (
            f"{cls.__name__} says nothing about {missing}"
        )


def test_every_older_decision_leads_to_a_file() -> None:
    """Each number in docs/design.md names existing files, or says why it is gone."""
    lines = re.findall(
        r"^\* (\d+)(?: → (.*)|: gone.*)$", (DOCS / "design.md").read_text(), flags=re.MULTILINE
    )
    assert [int(number) for number, _ in lines] == list(range(1, len(lines) + 1))
    places = {place for _, where in lines for place in re.findall(r"`(\S+)`", where)}
    roots = (DOCS, DOCS.parent, DOCS.parent / "src" / "oat")
    assert {place for place in places if not any((root / place).is_file() for root in roots)} == set()


def test_decisions_are_short_and_whole() -> None:
    for record in sorted((DOCS / "decisions").glob("[0-9]*.md")):
        text = record.read_text(encoding="utf-8")
        assert text.startswith(f"# {record.name[:3]}: ")
        assert re.findall(r"^(?:## (\w+)|(Status): )", text, flags=re.MULTILINE) == [
            ("", "Status"),
            ("Context", ""),
            ("Decision", ""),
            ("Consequence", ""),
        ]
        assert len(text.splitlines()) <= 80, record.name


WRITTEN = [*sorted(DOCS.rglob("*.md")), *sorted(DOCS.parent.glob("*.md"))]


def test_every_module_that_a_page_names_is_there() -> None:
    """Every module that a page names exists. Its path may begin at the project, at `src/`, at `src/oat/`, or
    at its box."""
    roots = [
        DOCS.parent,
        *(DOCS.parent / "src" / place for place in ("", "oat", "oat/functional")),
    ]
    gone = {
        (page.name, name)
        for page in WRITTEN
        for name in re.findall(r"`([\w.-]+(?:/[\w.-]+)+\.py)(?:::\w+)?`", page.read_text(encoding="utf-8"))
        if not any((root / name).is_file() for root in roots)
    }
    assert gone == set()


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: page.relative_to(DOCS.parent).as_posix())
def test_prose_keeps_to_110_columns(page: Path) -> None:
    """Lines of prose in the pages have at most 110 columns. Tables, images and code blocks may be wider."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    assert [line for line in text.splitlines() if len(line) > 110 and not line.startswith(("|", "!["))] == []


def test_links_lead_to_headings() -> None:
    """Every link within the repository, from the README and the pages, leads to an existing file, and to an
    existing heading if it names one."""
    for page in [DOCS.parent / "README.md", *sorted(DOCS.rglob("*.md"))]:
        for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", page.read_text(encoding="utf-8")):
            name, _, anchor = target.partition("#")
            file = (page.parent / name).resolve() if name else page
            assert file.exists(), f"{page.name}: {target}"
            text = file.read_text(encoding="utf-8") if anchor else ""
            headings = [
                re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
                for heading in re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
            ]
            assert not anchor or anchor in headings, f"{page.name}: {target}"
