"""The jaxtyping signatures of `oat.functional` are checked at run time in every test; the hook must come before the first import of it."""

from collections.abc import Iterator

import jaxtyping
import pytest
import torch
from fixtures import world  # noqa: F401 (a fixture for every test)

jaxtyping.install_import_hook("oat.functional", "beartype.beartype")
torch.set_num_threads(1)


@pytest.fixture
def unchecked() -> Iterator[None]:
    """Without the run-time signatures, as users run it: what is left are our own shape checks."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
