"""R23: memory, files and threads of a long run do not grow. The boxes are those of `oat train`, but the
engine and the learner do nothing, so thousands of steps take minutes."""

from collections.abc import Callable
from pathlib import Path

import pytest
from fixtures import World, forked
from growth import grow, growth_is_bounded


@pytest.mark.fault("R23")
@pytest.mark.parametrize(("first", "last"), [(100, 250), pytest.param(1000, 10_000, marks=pytest.mark.large)])
def test_a_long_run_does_not_grow(
    world: World, tmp_path: Path, figure: Callable[[str], None], first: int, last: int
) -> None:
    code = forked(lambda: grow(str(world.folder), str(tmp_path), str(first), str(last)), tmp_path / "log")
    assert code == 0, (tmp_path / "log").read_text()
    growth_is_bounded(tmp_path, first, last, figure)
