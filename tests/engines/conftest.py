"""Fixtures of the tests of engines/."""

import pytest
from tiny_models import (
    FAMILIES,
    build_config,
    save_model,
)


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    return {family: save_model(tmp_path_factory.mktemp(family), build_config(family)) for family in FAMILIES}
