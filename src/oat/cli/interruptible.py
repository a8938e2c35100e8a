"""How a command begins whose libraries take seconds to load: it says so, and it handles signals."""

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from oat.control.interruption import Interruption
from oat.errors import printable

_SLOWEST = "transformers.modeling_utils"


@contextmanager
def hearing_signals(command: str, read: Callable[[], str]) -> Iterator[Interruption]:
    """Handle SIGTERM and Ctrl-C within this context. Before it begins, say that the command loads, and import
    torch. An exception that is raised within torch's C++ code would abort the process. So the first signal
    during the import takes effect after the import.

    Args:
        command: see `say_loading`.
        read: returns what is loaded, for `say_loading`. It refuses what can be refused without torch, so that
            the user need not wait for it, and writes no file.
    """
    told = Interruption()
    with told.heard():
        with told.at_once():
            what = read()
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
