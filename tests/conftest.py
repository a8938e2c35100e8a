"""The jaxtyping signatures of `oat.functional` are checked at run time in every test; the hook must come before the first import of it."""

from collections.abc import Iterator

import jaxtyping
import pytest
import torch
from fixtures import world  # noqa: F401 (a fixture for every test)

jaxtyping.install_import_hook("oat.functional", "beartype.beartype")
torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--serialise", action="store_true", help="every run sends its values through the wire encoding (compute.serialise: true)")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--serialise"):
        from oat.config import ComputeConfig

        ComputeConfig.__init__.__defaults__ = (None, True, None)
        assert ComputeConfig().serialise


@pytest.fixture
def unchecked() -> Iterator[None]:
    """Without the run-time signatures, as users run it: what is left are our own shape checks."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
