"""The side of a worker: it makes a function once, and then serves calls of the function until its connection
ends. `isolated_workers.py` starts the process and may kill it.

Messages are plain data in MessagePack. Nothing is pickled. The first message to the worker names the
function's factory and the limits. The worker's first message says whether it could make the function. Each
later message to the worker holds the arguments of a call, and the worker's reply is one of

    {"value": ...}      the return value of the function
    {"error": text}     the function raised an `OatError`: a person must repair something
    {"failure": text}   the function raised another exception, or an `OatError` that was caused by a
                        MemoryError, RecursionError or SystemExit

The function's prints go to stderr, because stdout is the run's.

Limits: The kernel limits the memory of every worker, and the seconds and the processor seconds of each call.
When the seconds of a call are over, SIGALRM ends the process, even if the parent process has ended. Workers
write no core files.

Confined workers: These run only the package's own code, on texts of models. If the system allows namespaces,
a confined worker has no network. Limits of the kernel and an audit hook stop it from writing files and
starting processes. The hook stops the effects that a hostile text may have through a parser. It does not stop
native code.
"""

import ctypes
import os
import resource
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec

from oat.processes.pipe import Pipe

_NEW_USER, _NEW_NETWORK = 0x10000000, 0x40000000
_REFUSED = ("socket.", "subprocess.", "ctypes.", "shutil.", "tempfile.", "pty.")
_LOOKS = ("os.listdir", "os.scandir", "os.walk", "os.fwalk", "os.getxattr", "os.listxattr")
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def serve(pipe: Pipe, order: Mapping[str, Any]) -> None:
    """Answer the calls that arrive, until the connection ends.

    Args:
        order: what `Workers` was given.
    """
    if order["is_confined"]:
        _leave_network()
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_AS, int(order["memory_gb"] * 1e9))
    made = _attempt(partial(_made, order["factory"], order["arguments"]), is_call=False)
    call = made.pop("value", None)
    if order["is_confined"]:
        _confine()
    _tell(pipe, {"value": getattr(call, "about", None)} if call else made)
    with suppress(EOFError, OSError):
        while call:
            arguments = msgspec.msgpack.decode(pipe.receive().head)
            _begin(order["timeout_s"])
            answer = _attempt(partial(call, *arguments))
            signal.setitimer(signal.ITIMER_REAL, 0)
            _tell(pipe, answer)


def _made(target: str, arguments: list[Any]) -> Callable[..., Any]:
    from oat.errors import escape_streams
    from oat.plugins.leaving import let_go
    from oat.plugins.loading import load_symbol  # only after the limits are set

    let_go()
    escape_streams()
    function: Callable[..., Any] = load_symbol(target)(*arguments)
    return function


def _attempt(action: Callable[[], Any], *, is_call: bool = True) -> dict[str, Any]:
    from oat.errors import OatError

    try:
        return {"value": action()}
    except OatError as error:
        if is_call and isinstance(error.__cause__, MemoryError | RecursionError | SystemExit):
            return {"failure": f"raised {type(error.__cause__).__name__}"}
        return {"error": str(error)}
    except BaseException as error:
        return {"failure": f"raised {type(error).__name__[:80]}"}


def _begin(seconds: float) -> None:
    """Set a timer and a limit of processor seconds, with which the kernel ends this process if the call takes
    longer than `seconds`. A function can catch the timer's signal; it cannot escape the limit."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    used = resource.getrusage(resource.RUSAGE_SELF)
    _limit(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime + seconds) + 2, is_final=False)


def _limit(what: int, most: int, *, is_final: bool = True) -> None:
    _, hard = resource.getrlimit(what)
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(what, (most, most if is_final else hard))


def _leave_network() -> None:
    """Move this process into a namespace without a network and without root's powers. If the system forbids
    this, the process keeps its network."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).unshare(_NEW_USER | _NEW_NETWORK)


def _confine() -> None:
    _limit(resource.RLIMIT_FSIZE, 0)
    _limit(resource.RLIMIT_NPROC, 0)
    sys.addaudithook(_refuse)


def _refuse(event: str, arguments: tuple[Any, ...]) -> None:
    is_writing = event == "open" and isinstance(arguments[2], int) and bool(arguments[2] & _WRITES)
    if is_writing or event.startswith(_REFUSED) or (event.startswith("os.") and event not in _LOOKS):
        raise PermissionError(f"a confined worker may not do {event}")


def _tell(pipe: Pipe, value: dict[str, Any]) -> None:
    try:
        data = msgspec.msgpack.encode(value)
    except (TypeError, ValueError, OverflowError):
        data = msgspec.msgpack.encode({"failure": "returned what is no plain data"})
    pipe.send(data)
