"""What would end or replace this process at once: `os._exit`, and `os.execv` and what calls it.

A script that starts a run goes on if its exit code is 0. So users' code may not end the run's process by such
a function, which nothing else would notice. Processes that users' code forks may.
"""

import functools
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

_unfinished: set[int] = set()
"""The processes in which a run goes on."""
_workers: set[int] = set()
"""The processes that a run can replace."""


def hold(is_called: Callable[[], object], is_installed: Callable[[str], bool]) -> None:
    """Let these functions raise SystemExit while users' code is called in this process. This is done once,
    and not in a worker.

    Args:
        is_called: returns a true value if users' code is called now.
        is_installed: returns True if a file does not belong to the user.
    """
    if hasattr(os._exit, "__wrapped__") or os.getpid() in _workers:
        return

    def leave(real: Callable[..., Any], *given: Any, **named: Any) -> Any:
        file = sys._getframe(1).f_code.co_filename
        is_exit = real.__name__ == "_exit"
        code = (*given, *named.values(), 0)[0] if is_exit else 0
        is_success = isinstance(code, int) and code % 256 == 0
        # a library that ends a broken process, such as a test's after its time, gives another code than 0
        if is_called() and (is_success or not is_installed(file)):
            raise SystemExit(f"os.{real.__name__} would end the process of the run")
        if is_exit and is_success and os.getpid() in _unfinished:
            with suppress(OSError):
                os.write(2, b"oat: a user's code called os._exit before the run had ended\n")
            return real(1)
        return real(*given, **named)

    for name in ("_exit", "execv", "execve"):
        real = getattr(os, name)
        setattr(os, name, functools.wraps(real)(functools.partial(leave, real)))


def let_go() -> None:
    """Say that this process is a worker, which users' code may end: the run notices it."""
    _workers.add(os.getpid())


@contextmanager
def unfinished() -> Iterator[None]:
    """A context in which a run goes on in this process. In it, `os._exit(0)` ends the process with the code
    1, also in a thread that users' code has left."""
    own = os.getpid()
    _unfinished.add(own)
    try:
        yield
    finally:
        _unfinished.discard(own)
