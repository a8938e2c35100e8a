"""Fixtures of the tests of config/."""

from pathlib import Path

import pytest
from configurations import ALGORITHM, MINIMAL


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the working directory, with `run.yaml` and a user's algorithm."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(MINIMAL, encoding="utf-8")
    (tmp_path / "mine.py").write_text(ALGORITHM, encoding="utf-8")
    return tmp_path
