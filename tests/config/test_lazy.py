"""Stand-ins for modules that are imported when they are first used, sections that nothing reads, and texts
that only one YAML loader reads."""

from pathlib import Path
from typing import Any

import pytest
from fixtures import World

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


@pytest.mark.parametrize("depth", [900, 40_000])
def test_deep_nesting_is_refused(tmp_path: Path, depth: int) -> None:
    file = tmp_path / "deep.yaml"
    file.write_text("x: " + "[" * depth + "]" * (depth if depth < 1000 else 0))
    with pytest.raises(ConfigError, match="this is not YAML"):
        read_tree(file)
