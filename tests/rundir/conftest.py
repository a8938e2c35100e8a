"""Fixtures of the tests of rundir/."""

from pathlib import Path

import pytest

from oat.rundir.checkpoints import Checkpoints


@pytest.fixture
def checkpoints(tmp_path: Path) -> Checkpoints:
    return Checkpoints(tmp_path / "checkpoints", every=1, keep_last=2)
