"""Fixtures of the tests of data/."""

import datasets
import pytest


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Return an empty cache folder for the library `datasets`, which is set to offline mode."""
    datasets.disable_progress_bars()
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return tmp_path / "cache"
