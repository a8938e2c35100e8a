"""A context that handles signals during a command."""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager

from oat.control.interruption import Interruption


@contextmanager
def hearing_signals() -> Iterator[Interruption]:
    """Import torch, and handle SIGTERM and Ctrl-C within this context. An exception that is raised within
    torch's C++ code would abort the process. So the first signal during the import takes effect after the
    import."""
    told = Interruption()
    with told.heard():
        importlib.import_module("torch")
        yield told
