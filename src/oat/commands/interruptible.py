"""How a command begins whose libraries take seconds to load: it says so, and it handles signals."""

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from oat.control.interruption import Interruption
from oat.control.stages import tell

T = TypeVar("T")
_SLOWEST = "transformers.modeling_utils"


@contextmanager
def hearing_signals(read: Callable[[], T], name: Callable[[T], str]) -> Iterator[tuple[Interruption, T]]:
    """Handle SIGTERM and Ctrl-C within this context. Before it begins, read the command's input, say what is
    loaded, and import torch. An exception that is raised within torch's C++ code would abort the process. So
    the first signal during the import takes effect after the import.

    Args:
        read: returns the input, such as a configuration. It refuses what can be refused without torch, so
            that the user need not wait for it, and writes no file.
        name: returns what is loaded, for `say_loading`.

    Yields:
        The request to end the command, and its input.
    """
    told = Interruption()
    with told.heard():
        found = read()  # not `at_once`: the code of a user's part may import torch
        say_loading(name(found))
        importlib.import_module("torch")
        yield told, found


def say_loading(what: str = "") -> None:
    """Say that a command loads, unless its libraries are loaded already.

    Args:
        what: what is loaded beside the libraries, such as the name of a model.
    """
    if _SLOWEST not in sys.modules:
        tell(f"loading torch and {what}" if what else "loading torch")
