"""The guard, run as a program: it ends a session when its input ends, also before it has read anything, and
when its parent has ended although somebody keeps its input open."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from oat.runtime import guard

PARENT = """
import os, subprocess, sys
command = [sys.executable, "-I", sys.argv[1], sys.argv[2], str(os.getpid())]
subprocess.Popen(command, stdin=int(sys.argv[3]))
"""


@pytest.fixture
def session() -> "Iterator[subprocess.Popen[bytes]]":
    made = subprocess.Popen(["sleep", "60"], start_new_session=True)
    yield made
    made.kill()
    made.wait()


def test_its_input_ends_before_it_has_read(session: "subprocess.Popen[bytes]", tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    command = [sys.executable, "-I", guard.__file__, str(tmp_path / "files"), str(os.getpid())]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as own:
        own.communicate(f"{session.pid}\n".encode(), timeout=60)
    assert session.wait(60) == -9
    assert not (tmp_path / "files").exists()


def test_its_parent_ends_first(session: "subprocess.Popen[bytes]", tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    theirs, ours = os.pipe()  # this process keeps the input open, as a forked child would
    os.write(ours, f"{session.pid}\n".encode())
    command = [sys.executable, "-c", PARENT, guard.__file__, str(tmp_path / "files"), str(theirs)]
    subprocess.run(command, pass_fds=[theirs], check=True)
    assert session.wait(60) == -9
    os.close(theirs)
    os.close(ours)
