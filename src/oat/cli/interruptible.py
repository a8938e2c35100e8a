"""How a command begins whose libraries take seconds to load: it says so, and it handles signals."""

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from oat.control.interruption import Interruption
from oat.errors import printable

_SLOWEST = "transformers.modeling_utils"


@contextmanager
def hearing_signals(command: str, what: str) -> Iterator[Interruption]:
    """Say that a command loads, import torch, and handle SIGTERM and Ctrl-C within this context. An exception
    that is raised within torch's C++ code would abort the process. So the first signal during the import
    takes effect after the import.

    Args:
        command, what: see `say_loading`.
    """
    told = Interruption()
    with told.heard():
        say_loading(command, what)
        importlib.import_module("torch")
        yield told


def say_loading(command: str, what: str = "") -> None:
    """Say on stderr that a command loads, unless its libraries are loaded already. It need not be stdout that
    a terminal shows, and what is printed there may be data.

    Args:
        what: what is loaded beside the libraries, such as the name of a model.
    """
    if _SLOWEST in sys.modules or sys.stderr is None:
        return
    with suppress(OSError, ValueError):  # a closed stream, or a pipe that nobody reads
        line = f"oat {command}: loading {what}".rstrip()
        print(printable(f"{line} ..."), file=sys.stderr, flush=True)
