"""What processes do that tests of `oat.processes` start."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from oat.processes.pipe import Pipe

LEAVING = """
import os, sys, time
if os.fork():
    os._exit(0)
os.setsid()
print(os.getpid(), flush=True)
time.sleep(600)
"""
"""A program that leaves its parent, its group and its session."""


def echo(pipe: Pipe, order: Mapping[str, Any]) -> None:
    """Send back what arrives, after what was ordered."""
    print(order.get("says", ""), flush=True)
    pipe.send(str(order.get("text", "")).encode())
    while True:
        head, data, _ = pipe.receive()
        pipe.send(bytes(head), None if data is None else [data])


def start_others(pipe: Pipe, order: Mapping[str, Any]) -> None:
    """Start a process of this group and one that has left everything, and send their numbers. Then sleep."""
    near = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    with subprocess.Popen([sys.executable, "-c", LEAVING], stdout=subprocess.PIPE) as leaving:
        assert leaving.stdout is not None
        far = int(leaving.stdout.readline())
    pipe.send(f"{os.getpid()} {near.pid} {far}".encode())
    _end(order)


def end(pipe: Pipe, order: Mapping[str, Any]) -> None:
    """End as ordered."""
    _end(order)


def outlive(pipe: Pipe, order: Mapping[str, Any]) -> None:
    """When the connection ends, go on so many seconds, and write a file."""
    pipe.send(b"")
    try:
        pipe.receive()
    except (EOFError, OSError):
        time.sleep(order["seconds"])
        Path(order["file"]).write_text("has closed")


def answer(data: memoryview) -> list[bytes]:
    """Answer a call with its text in capitals; "hang" hangs, "exit" and "die" end the process, "gpus" is
    answered with the GPUs that it sees, "fork" with the number of a child in a session of its own, and "jobs"
    with the number of children after some jobs in the background have ended. "signal" signals the group."""
    text = bytes(data).decode()
    if text == "signal":
        _signal_the_group()
    if text == "jobs":
        return [str(_left_after_jobs()).encode()]
    if text == "fork":
        if not (child := os.fork()):
            os.setsid()
            time.sleep(600)
            os._exit(0)
        return [str(child).encode()]
    if text == "hang":
        time.sleep(600)
    if text == "gpus":
        return [os.environ["CUDA_VISIBLE_DEVICES"].encode()]
    if text == "exit":
        os._exit(3)
    if text == "die":
        os.kill(os.getpid(), signal.SIGSEGV)
    return [text.upper().encode()]


def children_of(parent: int) -> list[int]:
    """Return the children of a process, those included that have ended and wait to be reaped."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if int((place / "stat").read_text().rpartition(")")[2].split()[1]) == parent:
                found.append(int(place.name))
    return found


def _signal_the_group() -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.killpg(0, signal.SIGTERM)
    signal.signal(signal.SIGTERM, before)


def _left_after_jobs() -> int:
    for _ in range(3):
        os.system("true &")
    until = time.monotonic() + 5
    while (found := children_of(os.getpid())) and time.monotonic() < until:
        time.sleep(0.01)
    return len(found)


def answering(pipe: Pipe, order: Mapping[str, Any]) -> None:
    """Answer calls."""
    from oat.processes.local import answer_calls

    print("begins", flush=True)
    answer_calls(pipe, answer)


def _end(order: Mapping[str, Any]) -> None:
    match order["how"]:
        case "exits":
            sys.exit(3)
        case "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "hangs deaf":
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)
            while True:
                time.sleep(600)
