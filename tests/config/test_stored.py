"""The `config.yaml` of a run is written when its settings are new, and keeps what a user wrote into it."""

import dataclasses
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import yaml
from fixtures import World

from oat.config.load import dump, load_config, to_yaml
from oat.config.settings import Config
from oat.config.stored import load_stored, write_stored


@pytest.fixture
def config(world: World, tmp_path: Path) -> Config:
    changes = {"sampling.stop": ["a # b", "c\nd"], "render.template": "x" * 200 + " # no comment"}
    return load_config(world.config("grpo", tmp_path, changes))[0]


def commented(text: str) -> tuple[str, list[str]]:
    """Return the text with a comment before the first line, after the last, and at the end and below each
    line with a plain value; and the comments."""
    lines, comments = ["# first"], ["# first"]
    for number, line in enumerate(text.splitlines()):
        is_plain = re.fullmatch(r" *\w+: [\w./-]+", line) is not None
        lines += [f"{line}  # {number}", f"    # below {number}"] if is_plain else [line]
        comments += [f"# {number}", f"# below {number}"] if is_plain else []
    return "\n".join([*lines, "# last", ""]), [*comments, "# last"]


def changed(config: Config, section: str, **fields: Any) -> Config:
    if not section:
        return dataclasses.replace(config, **fields)
    return dataclasses.replace(config, **{section: dataclasses.replace(getattr(config, section), **fields)})


def test_equal_settings_are_not_written_anew(config: Config, tmp_path: Path) -> None:
    """Whatever the file looks like: with comments, or in another order and style."""
    file = tmp_path / "config.yaml"
    tree = dump(config)
    other = yaml.safe_dump(dict(reversed(tree.items())), default_flow_style=True)
    for text in (to_yaml(config), commented(to_yaml(config))[0], other):
        file.write_text(text, encoding="utf-8")
        before = file.stat()
        write_stored(file, load_stored(file)[0])
        assert (file.read_text(encoding="utf-8"), file.stat().st_ino) == (text, before.st_ino)


@pytest.mark.parametrize(
    ("section", "fields"),
    [
        ("stop", {"max_steps": None, "max_hours": 1e-5}),
        ("", {"run_dir": "runs/é: #2 'x'\nb", "seed": 3}),
        ("sampling", {"max_new_tokens": 5, "stop": ("z",)}),
        ("prompts", {"path": ("a.jsonl", "b.jsonl")}),
        ("", {"evaluation": None}),
    ],
)
def test_comments_stay_where_settings_change(
    config: Config, tmp_path: Path, section: str, fields: dict[str, Any]
) -> None:
    file, new = tmp_path / "config.yaml", changed(config, section, **fields)
    text, comments = commented(to_yaml(config))
    file.write_text(text, encoding="utf-8")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        write_stored(file, new)
    assert load_config(file)[0] == new
    left = file.read_text(encoding="utf-8").splitlines()
    are_kept = all(any(line.endswith(comment) for line in left) for comment in comments)
    assert are_kept == (not said)
    assert are_kept or "evaluation" in fields or "stop" in fields


def test_a_file_of_other_fields_is_written_anew_and_that_is_said(config: Config, tmp_path: Path) -> None:
    """Earlier versions had fewer. A file without comments loses nothing."""
    file, tree = tmp_path / "config.yaml", dump(config)
    del tree["render"]["special_tokens"]
    for head in ("", "# mine\n"):
        file.write_text(head + yaml.safe_dump(tree), encoding="utf-8")
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            write_stored(file, config)
        assert len(said) == bool(head)
        assert file.read_text(encoding="utf-8") == to_yaml(config)
