"""Fixtures of the tests of assemble/."""

import shutil
from pathlib import Path

import pytest
from fixtures import World
from inputs import make, run


@pytest.fixture(scope="module")
def begun(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a run of two steps. Tests continue copies of it in other folders."""
    folder = make(world, tmp_path_factory.mktemp("begun"))
    code, said = run(folder, "train", "run.yaml")
    assert code == 0, said
    return folder


@pytest.fixture
def copy(begun: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(begun, tmp_path / "copy"))
