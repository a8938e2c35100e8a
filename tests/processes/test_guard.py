"""The guard: whatever ends a process, what it has started ends soon after it."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from planned_kills import is_alive

from oat.processes import guard
from oat.processes.marks import VARIABLE

PARENT = """
import os, subprocess, sys
command = [sys.executable, "-P", "-m", "oat.processes.guard", sys.argv[1], str(os.getpid())]
subprocess.Popen(command, stdin=int(sys.argv[2]))
"""


@pytest.fixture
def session() -> "Iterator[subprocess.Popen[bytes]]":
    made = subprocess.Popen(["sleep", "60"], start_new_session=True)
    yield made
    made.kill()
    made.wait()


def lines(*what: guard.Guarded) -> bytes:
    return "".join(json.dumps(["+", *each]) + "\n" for each in what).encode()


@pytest.mark.parametrize("torn", [b"", b'["-", "fold'])
def test_its_input_ends_before_it_has_read(
    session: "subprocess.Popen[bytes]", tmp_path: Path, torn: bytes
) -> None:
    """A line that the parent could not finish is left out."""
    folder = tmp_path / "a folder\nof two lines"
    folder.mkdir()
    command = [sys.executable, "-P", "-m", "oat.processes.guard", f"mark of {tmp_path}", str(os.getpid())]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as own:
        own.communicate(lines(("session", session.pid), ("folder", str(folder))) + torn, timeout=60)
    assert session.wait(60) == -9
    assert not folder.exists()


def test_its_parent_ends_first(session: "subprocess.Popen[bytes]", tmp_path: Path) -> None:
    theirs, ours = os.pipe()  # this process keeps the input open, as a forked child would
    os.write(ours, lines(("session", session.pid)))
    command = [sys.executable, "-c", PARENT, f"mark of {tmp_path}", str(theirs)]
    subprocess.run(command, pass_fds=[theirs], check=True)
    assert session.wait(60) == -9
    os.close(theirs)
    os.close(ours)


def test_what_is_taken_back_is_left(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    command = [sys.executable, "-P", "-m", "oat.processes.guard", f"mark of {tmp_path}", str(os.getpid())]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as own:
        taken = lines(("folder", str(kept))) + lines(("folder", str(kept))).replace(b'"+"', b'"-"')
        own.communicate(taken, timeout=60)
    assert kept.exists()


@pytest.mark.parametrize("first", ["lives on", "has ended"])
def test_a_mark_with_time(tmp_path: Path, first: str) -> None:
    """Processes of a mark live on as long as their first one does, at most so many seconds."""
    mark = f"mark of {tmp_path}"
    own = {**os.environ, VARIABLE: f"{mark}/1"}
    leader, other = (subprocess.Popen(["sleep", "60"], env=own) for _ in range(2))
    late = subprocess.Popen(["sleep", "60"], env={**os.environ, VARIABLE: f"{mark}/2"})
    if first == "has ended":
        leader.kill()
        leader.wait()
    command = [sys.executable, "-P", "-m", "oat.processes.guard", mark, str(os.getpid())]
    begin = time.monotonic()
    with subprocess.Popen(command, stdin=subprocess.PIPE) as program:
        assert program.stdin is not None
        program.stdin.write(lines(("time", f"{mark}/1", leader.pid, 3.0)))
        program.stdin.close()
        assert late.wait(60) == -9
        if first == "lives on":
            assert is_alive(leader.pid)
            assert is_alive(other.pid)
        assert other.wait(60) == -9
        assert leader.wait(60) == -9
        assert program.wait(60) == 0
    assert (time.monotonic() - begin >= 3.0) or first == "has ended"
