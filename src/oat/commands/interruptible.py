"""How a command begins whose libraries take seconds to load: it says so, and it handles signals."""

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from oat.control.interruption import Interruption
from oat.control.stages import tell

_SLOWEST = "transformers.modeling_utils"


@contextmanager
def hearing_signals(read: Callable[[], str]) -> Iterator[Interruption]:
    """Handle SIGTERM and Ctrl-C within this context. Before it begins, say that the command loads, and import
    torch. An exception that is raised within torch's C++ code would abort the process. So the first signal
    during the import takes effect after the import.

    Args:
        read: returns what is loaded, for `say_loading`. It refuses what can be refused without torch, so that
            the user need not wait for it, and writes no file.
    """
    told = Interruption()
    with told.heard():
        with told.at_once():
            what = read()
        say_loading(what)
        importlib.import_module("torch")
        yield told


def say_loading(what: str = "") -> None:
    """Say that a command loads, unless its libraries are loaded already.

    Args:
        what: what is loaded beside the libraries, such as the name of a model.
    """
    if _SLOWEST not in sys.modules:
        tell(f"loading torch and {what}" if what else "loading torch")
