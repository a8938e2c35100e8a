"""The side of a process that works for a run. It answers calls with bytes (`runtime/calls.py`)."""

import hashlib
import importlib.metadata
import os
import socket
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from oat.errors import ConfigError, OatWarning, escape_streams
from oat.files import absolute
from oat.plugins.loading import load_symbol, own_files
from oat.processes.child import write_to
from oat.processes.local import answer_calls
from oat.processes.pipe import Pipe
from oat.runtime.calls import answered

WORKER, SERVE = f"{__name__}:Worker", f"{__name__}:serve"
"""The names under which a launcher finds what answers calls in a process."""
_COMPARED = ("torch", "transformers", "numpy")
_SOURCES = Path(__file__).parents[1]


class Box(Protocol):
    """What a worker makes and calls."""

    def call(self, name: str, arguments: Sequence[Any]) -> Any: ...


class Worker:
    """Works for a run in a process of its own.

    Args:
        log: path of a file to which this process then writes what it would print, after its number and its
            machine. If the directory is not there, as on another machine, the output stays where it is. "":
            it stays.
    """

    def __init__(self, log: str = ""):
        self._box: Box | None = None
        self._warned: list[str] = []
        escape_streams()
        if log and Path(log).parent.is_dir():
            write_to(log)
            _say_who()
        warnings.showwarning = self._note  # type: ignore[assignment]

    def call(self, data: np.ndarray) -> bytes:
        """Answer a call whose bytes come as an array, with the bytes of the reply; see `answer`."""
        return b"".join(self.answer(data.data))

    def answer(self, data: bytes | memoryview) -> list[bytes | memoryview]:
        """Answer a call: `prepare`, then `make`, then the calls of the box that was made. The reply to `make`
        has the user's own files that this process has imported (`loading.own_files`).

        Args:
            data: the bytes of the call.

        Returns:
            The parts of the reply.
        """
        self._warned.clear()
        return answered(self._called, data, self._warned)

    def _called(self, name: str, arguments: Sequence[Any]) -> Any:
        if name == "prepare":
            return prepared(*arguments)
        if name == "make":
            symbol, plan = arguments
            self._box = load_symbol(symbol)(plan)
            return own_files(Path.cwd())
        assert self._box is not None, "the box is made before it is called"
        return self._box.call(name, arguments)

    def _note(self, message: Warning | str, category: type[Warning], *rest: Any) -> None:
        print(f"{category.__name__}: {message}", file=sys.stderr, flush=True)
        if issubclass(category, OatWarning):
            self._warned.append(str(message))


def serve(pipe: Pipe, order: Mapping[str, Any]) -> None:
    """Work for a run in a process of its own, whose output goes to its place already."""
    _say_who()
    answer_calls(pipe, Worker().answer)


def versions() -> dict[str, str]:
    """Return what must be equal in all processes of a run: the versions of packages, and a hash of the
    sources of `oat`."""
    sources = hashlib.sha256()
    for file in sorted(_SOURCES.rglob("*.py")):
        sources.update(file.relative_to(_SOURCES).as_posix().encode() + b"\0" + file.read_bytes())
    return {
        "oat": f"{importlib.metadata.version('oat-align')} (sources {sources.hexdigest()[:8]})",
        **{name: importlib.metadata.version(name) for name in _COMPARED},
    }


def surroundings() -> tuple[str, list[str]]:
    """Return the folder from which this process sees relative paths, and the folders in which it looks for
    modules."""
    return str(absolute(Path()).resolve()), [place for place in sys.path if place]


def prepared(
    expected: Mapping[str, str], parts: Sequence[str], folder: str, places: Sequence[str]
) -> dict[str, Any]:
    """Check that this process can work for a run. From here on, it sees relative paths and finds modules as
    the run's own process does, as far as the folders are on this machine.

    Args:
        expected: `versions` of the run's own process.
        parts: the names of the user's parts, which must be found here (`load_symbol`).
        folder, places: `surroundings` of the run's own process.

    Returns:
        Name of the machine, and number of the process.

    Raises:
        ConfigError: a version differs, or a part is not found.
    """
    machine, found = socket.gethostname(), versions()
    if Path(folder).is_dir():
        os.chdir(folder)
    sys.path += [place for place in places if place not in sys.path]
    wrong = [
        f"{name} {found.get(name)} instead of {version}"
        for name, version in expected.items()
        if found.get(name) != version
    ]
    if wrong:
        raise ConfigError(
            f"the machine {machine} has {', '.join(wrong)} (oat is in {_SOURCES}); install the same versions "
            "on every machine"
        )
    for part in parts:
        try:
            load_symbol(part)
        except ConfigError as error:
            raise ConfigError(f"on the machine {machine}: {error}") from None
    return {"machine": machine, "process": os.getpid()}


def _say_who() -> None:
    print(f"{time.strftime('%F %T')} process {os.getpid()} on {socket.gethostname()}", flush=True)
