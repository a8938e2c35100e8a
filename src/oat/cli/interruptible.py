"""Commands that signals end."""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager

from oat.control.interruption import Interruption


@contextmanager
def hearing_signals() -> Iterator[Interruption]:
    """Handle signals within this context. A signal that comes while torch is imported waits until it is: an
    exception that is raised within torch's C++ aborts the process."""
    told = Interruption()
    with told.heard():
        importlib.import_module("torch")
        yield told
