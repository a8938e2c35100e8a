"""Functions that run several programs at a time. If a program fails, the other programs are ended."""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType

from oat.errors import OatError

_PATIENCE_S = 10.0
_TAIL_LINES = 20


class ChildError(OatError, RuntimeError):
    """A program of the quickstart failed."""

    exit_code = 1


def run_all(
    commands: Mapping[str, Sequence[str]],
    logs: Path,
    *,
    at_a_time: int,
    report: Callable[[str, float | None], None] = lambda name, seconds: None,
) -> None:
    """Run commands in order, each with one thread. When this call ends, no command is running.

    Args:
        commands: words of each command, by name.
        logs: folder of the files NAME.log, to which the outputs are written. Existing files are overwritten.
        at_a_time: largest number of commands that run at a time.
        report: called with (name, None) when a command starts, and with (name, its duration in seconds) when
            the command has succeeded.

    Raises:
        ChildError: a command failed; the message shows the last lines of its output. The other commands are
            ended.
    """
    waiting = list(commands)
    running: dict[str, tuple[subprocess.Popen[bytes], float]] = {}
    with ExitStack() as stack:
        while waiting or running:
            while waiting and len(running) < at_a_time:
                name = waiting.pop(0)
                report(name, None)
                running[name] = (
                    stack.enter_context(_child(commands[name], logs / f"{name}.log")),
                    time.monotonic(),
                )
            time.sleep(0.1)
            for name, (process, began) in list(running.items()):
                code = process.poll()
                if code is None:
                    continue
                if code != 0:
                    raise ChildError(_failure(name, code, logs / f"{name}.log"))
                del running[name]
                report(name, time.monotonic() - began)


@contextmanager
def interrupted_by_sigterm() -> Iterator[None]:
    """A context in which SIGTERM raises a KeyboardInterrupt, so that the child processes are ended. In a
    thread other than the main thread, it does nothing, because only the main thread can handle signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _child(command: Sequence[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=environment
        )
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(_PATIENCE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _failure(name: str, code: int, log: Path) -> str:
    tail = log.read_text(encoding="utf-8", errors="replace").splitlines()[-_TAIL_LINES:]
    return "\n".join(
        [f"{name} failed with exit code {code}; the end of {log}:", *(f"  {line}" for line in tail)]
    )
