"""A process in which a run goes on does not end with the code 0."""

import os

import pytest

from oat.errors import ConfigError
from oat.plugins.calls import restoring
from oat.plugins.leaving import unfinished


@pytest.mark.parametrize(("is_unfinished", "code", "wanted"), [(True, 0, 1), (True, 3, 3), (False, 0, 0)])
def test_an_unfinished_run_never_ends_well(is_unfinished: bool, code: int, wanted: int) -> None:
    """As in a thread that users' code has left."""
    with restoring("a tool", ConfigError):
        pass
    child = os.fork()
    if child == 0:
        try:
            if is_unfinished:
                with unfinished():
                    os._exit(code)
            os._exit(code)
        finally:
            os.kill(os.getpid(), 9)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == wanted
