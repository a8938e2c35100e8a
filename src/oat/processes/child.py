"""The program of a process that `spawn` starts: `python -P -m oat.processes.child FD`. FD is the number of a
socket. The first message names a function, which the program calls with the connection and the message. When
the function returns, the process ends."""

import importlib
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from oat.processes.pipe import Pipe


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    pipe = Pipe(socket.socket(fileno=int(sys.argv[1])), takes_descriptors=True)
    try:
        order = msgspec.msgpack.decode(pipe.receive().head)
    except EOFError:
        return
    sys.path[:] = order["path"]
    function_of(order["target"])(pipe, order)


def function_of(target: str) -> Callable[[Pipe, Mapping[str, Any]], None]:
    """Return the function that `package.module:name` names."""
    module, _, name = target.partition(":")
    function: Callable[[Pipe, Mapping[str, Any]], None] = getattr(importlib.import_module(module), name)
    return function


def write_to(log: str) -> None:
    """Write to the end of a file from here on what this process prints."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for number in (1, 2):
        os.dup2(file, number)
    os.close(file)


if __name__ == "__main__":
    main()
