"""Stand-ins for modules that are imported when they are first used, sections that nothing reads, and texts
that only one YAML loader reads."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fixtures import World

from oat.config.flags import parse_flag
from oat.config.load import read_tree
from oat.errors import ConfigError
from oat.lazy import lazily
from oat.resolve.targets import resolve_file


def test_a_stand_in_answers_as_its_module() -> None:
    module: Any = lazily("colorsys")
    assert not hasattr(module, "nothing")
    assert module.rgb_to_hsv(0.0, 0.0, 0.0) == (0.0, 0.0, 0.0)
    assert not hasattr(module, "nothing")
    with pytest.raises(AttributeError, match="nothing"):
        _ = module.nothing


@pytest.mark.parametrize(
    ("algorithm", "changes", "field"),
    [
        ("grpo", {"model.reference_update": {}}, "model.reference_update"),
        ("grpo", {"model.reference_update": {"every": 1}}, "model.reference_update"),
        ("dpo", {"evaluation": {"pairs": "p.jsonl", "gold": "exact_match"}}, "evaluation.gold"),
        ("dpo", {"evaluation": {"pairs": "p.jsonl", "oracle": {"name": "exact_match"}}}, "evaluation.oracle"),
    ],
)
def test_a_section_that_nothing_reads_is_refused(
    world: World, tmp_path: Path, algorithm: str, changes: dict[str, Any], field: str
) -> None:
    with pytest.raises(ConfigError, match=f"nothing reads {field} with"):
        resolve_file(world.config(algorithm, tmp_path, changes))


FORMS: dict[str, Callable[[int], str]] = {
    "lists in brackets": lambda depth: "x: " + "[" * depth + "]" * depth,
    "brackets that are left open": lambda depth: "x: " + "[" * depth,
    "fields in brackets": lambda depth: "x: " + "{a: " * depth + "1" + "}" * depth,
    "lists in one line": lambda depth: "x:\n  " + "- " * depth + "a",
    "a list after another end of line": lambda depth: "x:\u2028  " + "- " * depth + "a",
    "a list after a byte order mark": lambda depth: "\ufeff" + "- " * depth + "a",
    "fields in lines": lambda depth: "x:\n" + "".join(f"{' ' * (place + 1)}a:\n" for place in range(depth)),
    "keys in one line": lambda depth: "x:\n  " + "? " * depth + "a",
}


@pytest.mark.parametrize("depth", [101, 900, 200_000])
@pytest.mark.parametrize("form", FORMS)
def test_deep_nesting_is_refused(tmp_path: Path, form: str, depth: int) -> None:
    """No Python, and no loader, decides how deep is too deep."""
    file = tmp_path / "deep.yaml"
    file.write_text(FORMS[form](min(depth, 3_000) if "in lines" in form else depth), encoding="utf-8")
    with pytest.raises(ConfigError, match="this is not YAML"):
        read_tree(file)
    if depth > 10_000 and "in lines" not in form:
        with pytest.raises(ConfigError, match=r"--oracle\.a: cannot read the value"):
            parse_flag("--oracle.a", FORMS[form](depth).removeprefix("x:").strip(" \n"))


def test_nesting_that_is_allowed(tmp_path: Path) -> None:
    file = tmp_path / "deep.yaml"
    for form in ("lists in brackets", "fields in brackets", "lists in one line", "fields in lines"):
        file.write_text(FORMS[form](90), encoding="utf-8")
        assert read_tree(file)[0]
